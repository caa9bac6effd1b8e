# SPDX-License-Identifier: Apache-2.0
"""vLLM's scheduler without a model, with the engine patch or without, timed step by step.

The timed part of a step is vLLM's work in the engine's thread: `add_request`, `schedule` and `update_from_output`,
which publishes the step's events. The making of prompts and of sampled tokens is left out. Wall time includes
everything that holds up the engine, also waiting for the interpreter while another thread of the process runs; CPU time
is the work of the thread itself.
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

from tests.engine.group_sets import GPU_SETS, OFFLOAD_SETS, OffloadSet
from tests.engine.oracle import Oracle
from tests.engine.patched import ENVIRONMENT, patched, tap_of
from tests.engine.workload import PromptTree

VOCAB_SIZE = 512
MAX_UNFINISHED = 5
# The heartbeat that users have, not that of the tests.
PATCHED = {**ENVIRONMENT, "KVROUTER_PATCH_HEARTBEAT_S": "1"}
# After a block all threads come to rest, so that none of its work falls into the next block.
REST_S = 0.002


class Steps(NamedTuple):
    """Microseconds of a step, as means over a block."""

    wall_us: float
    cpu_us: float
    # Only one step in 100 takes longer than this.
    late_us: float


class Engine(Oracle):
    """One engine whose work is decided by the seed alone."""

    def __init__(
        self, case: str, model: Path, patch: bool, seed: int = 1, settings: dict[str, Any] | None = None
    ) -> None:
        """Build the engine of a case.

        Args:
            case: The name of one of GPU_SETS or OFFLOAD_SETS.
            model: The folder of the model.
            patch: Whether to load the engine patch.
            seed: The seed of its requests.
            settings: Settings of the offload connector, which replace or complete those of the case.
        """
        known_set = next(candidate for candidate in (*GPU_SETS, *OFFLOAD_SETS) if candidate.name == case)
        group_set, offload = (
            (known_set.group_set, known_set.connector_config() | (settings or {}))
            if isinstance(known_set, OffloadSet)
            else (known_set, None)
        )
        rng = Random(seed)
        with patched(PATCHED) if patch else nullcontext():
            super().__init__(group_set, model, rng, offload)
        publisher = self.scheduler.kv_event_publisher
        # Publish directly again, without the oracle's count of events.
        publisher.publish = self._publish
        self.reporter: Any = tap_of(self).reporter if patch else None
        # Publishes past the patch, to vLLM's own topic alone.
        self.publish_stock: Callable[[Any], None] = functools.partial(type(publisher).publish, publisher)
        self.requests = self.steps = 0
        self._tree = PromptTree(rng, VOCAB_SIZE)
        self._model_s = 0.0
        self._wall_ns = self._cpu_ns = 0
        for name in ("add_request", "schedule", "update_from_output"):
            setattr(self.scheduler, name, self._timed(getattr(self.scheduler, name)))

    def _timed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            cpu, wall = time.thread_time_ns(), time.perf_counter_ns()
            result = original(*arguments)
            self._wall_ns += time.perf_counter_ns() - wall
            self._cpu_ns += time.thread_time_ns() - cpu
            return result

        return timed

    def _run_model(self, output: Any) -> Any:
        if self._model_s:
            time.sleep(self._model_s)
        return super()._run_model(output)

    def block(self, steps: int, model_s: float = 0.0) -> Steps:
        """Run this many steps under full load.

        Args:
            steps: The number of steps.
            model_s: The time that the model takes, in which other threads may run.
        """
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
        """Wait until all published messages have been sent."""
        stock = self.scheduler.kv_event_publisher._event_queue
        while stock.qsize() or (self.reporter is not None and len(self.reporter._queue)):
            time.sleep(REST_S)
        time.sleep(REST_S)

    def reporter_cpu_s(self) -> float:
        """Return the CPU time of the reporter's thread. Source: /proc/PID/task/TID/schedstat (ns)."""
        return int(Path(f"/proc/self/task/{self.reporter._thread.native_id}/schedstat").read_text().split()[0]) / 1e9

    def ledger_bytes(self) -> int:
        """Return the bytes of the ledger's arrays and dicts."""
        total = 0
        for counts in self.reporter._stream.ledger._places.values():
            total += counts._hashes.nbytes + counts._counts.nbytes
            # Each hash is an int object of 36 bytes; the count objects are shared.
            total += sys.getsizeof(counts._fresh) + 36 * len(counts._fresh)
        return total


def resident_bytes() -> int:
    """Return the resident bytes of this process, after free pages were given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def alone(case: str, model: Path, patch: bool, requests: int) -> dict[str, int]:
    """Measure the memory of a process that runs only one engine.

    Returns:
        The growth in bytes since before the engine: `built` with the new engine, `worked` after this many requests; and
        `ledger`, the bytes of the ledger, with the patch.
    """
    before = resident_bytes()
    engine = Engine(case, model, patch)
    built = resident_bytes()
    while engine.requests < requests:
        engine.block(100)
        # Let all queues run empty, as their lengths depend on the load of the machine.
        engine.rest()
    sizes = {"built": built - before, "worked": resident_bytes() - before}
    if patch:
        sizes["ledger"] = engine.ledger_bytes()
    engine.close()
    return sizes
