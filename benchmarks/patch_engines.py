# SPDX-License-Identifier: Apache-2.0
"""vLLM's scheduler without a model, with the engine patch or without, timed step by step.

What is timed is vLLM's part of a step in the engine's thread: `add_request`, `schedule` and `update_from_output`, which
publishes the step's events. Making prompts and sampling up tokens is left out. Wall time has everything that holds up
the engine, also waiting for the interpreter while another thread of the process runs; CPU time is what the thread
itself does.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from benchmarks.workload import PromptTree  # type: ignore[attr-defined]  # of the engine tests: engine_venv.py
from tests.engine.group_sets import GPU_SETS, OFFLOAD_SETS, OffloadSet
from tests.engine.oracle import Oracle
from tests.engine.patched import ENVIRONMENT, patched, tap_of

VOCAB_SIZE = 512
MAX_UNFINISHED = 5
# A user's heartbeat, not that of tests.
PATCHED = {**ENVIRONMENT, "KVROUTER_PATCH_HEARTBEAT_S": "1"}
# After a block all threads come to rest, so that none of its work falls into the next one.
REST_S = 0.002


class Steps(NamedTuple):
    """Microseconds a step, means over a block. late: of 100 steps, the slowest takes longer than this."""

    wall_us: float
    cpu_us: float
    late_us: float


class Engine(Oracle):
    """One engine, its work decided by the seed alone."""

    def __init__(
        self, case: str, model: Path, patch: bool, seed: int = 1, settings: dict[str, Any] | None = None
    ) -> None:
        """settings: of the connector, in place of or beside the case's own."""
        chosen = next(known for known in (*GPU_SETS, *OFFLOAD_SETS) if known.name == case)
        group_set, offload = (
            (chosen.group_set, chosen.connector_config() | (settings or {}))
            if isinstance(chosen, OffloadSet)
            else (chosen, None)
        )
        rng = Random(seed)
        with patched(PATCHED) if patch else nullcontext():
            super().__init__(group_set, model, rng, offload)
        publisher = self.scheduler.kv_event_publisher
        # Not through the oracle's own count of events.
        publisher.publish = self._publish
        self.reporter: Any = tap_of(self).reporter if patch else None
        # Past the patch: to vLLM's own topic alone.
        self.publish_stock: Callable[[Any], None] = functools.partial(type(publisher).publish, publisher)
        self.requests = self.steps = 0
        self._tree = PromptTree(rng, VOCAB_SIZE)
        self._model_s = 0.0
        self._wall_ns = self._cpu_ns = 0
        for name in ("add_request", "schedule", "update_from_output"):
            setattr(self.scheduler, name, self._timed(getattr(self.scheduler, name)))

    def _timed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*given: Any) -> Any:
            cpu, wall = time.thread_time_ns(), time.perf_counter_ns()
            result = original(*given)
            self._wall_ns += time.perf_counter_ns() - wall
            self._cpu_ns += time.thread_time_ns() - cpu
            return result

        return timed

    def _run_model(self, output: Any) -> Any:
        if self._model_s:
            time.sleep(self._model_s)
        return super()._run_model(output)

    def block(self, steps: int, model_s: float = 0.0) -> Steps:
        """This many steps under full load. model_s: how long the model takes, during which other threads may run."""
        self._model_s = model_s
        walls, cpus = [], []
        for _ in range(steps):
            self._wall_ns = self._cpu_ns = 0
            while self.unfinished < MAX_UNFINISHED:
                self.submit(self._tree.request())
                self.requests += 1
            self.step(self._tree)
            walls.append(self._wall_ns / 1e3)
            cpus.append(self._cpu_ns / 1e3)
        self.steps += steps
        return Steps(statistics.mean(walls), statistics.mean(cpus), statistics.quantiles(walls, n=100)[-1])

    def rest(self) -> None:
        """Waits until everything that was published has been sent."""
        stock = self.scheduler.kv_event_publisher._event_queue
        while stock.qsize() or (self.reporter is not None and len(self.reporter._queue)):
            time.sleep(REST_S)
        time.sleep(REST_S)

    def reporter_cpu_s(self) -> float:
        """CPU time of the reporter's thread. Source: /proc/PID/task/TID/schedstat (ns)."""
        return int(Path(f"/proc/self/task/{self.reporter._thread.native_id}/schedstat").read_text().split()[0]) / 1e9

    def ledger_bytes(self) -> int:
        """What the ledger's arrays and dicts take."""
        total = 0
        for held in self.reporter._stream.ledger._places.values():
            total += held._hashes.nbytes + held._counts.nbytes
            # A number of 64 bits takes 36 bytes, a count is shared.
            total += sys.getsizeof(held._fresh) + 36 * len(held._fresh)
        return total


def resident_bytes() -> int:
    """Of this process, after free pages were given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def alone(case: str, model: Path, patch: bool, requests: int) -> dict[str, int]:
    """Memory of a process that runs nothing but one engine: before it, with it, after this many requests."""
    before = resident_bytes()
    engine = Engine(case, model, patch)
    built = resident_bytes()
    while engine.requests < requests:
        engine.block(100)
        # Nobody is to wait in a queue: how fast others take turns on the machine decides how much that is.
        engine.rest()
    found = {"built": built - before, "worked": resident_bytes() - before}
    if patch:
        found["ledger"] = engine.ledger_bytes()
    engine.close()
    return found
