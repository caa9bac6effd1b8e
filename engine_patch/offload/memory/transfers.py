# SPDX-License-Identifier: Apache-2.0
"""Copies in main memory beside the engine: submitted by its thread, made by another thread, polled later.

The engine's thread never waits except in `wait` and `close`. A copy that fails is a result, not an exception: the
engine continues without the data. Loads come before stores, because a request waits for a load; a copy that a thread
waits for comes before both. That order is safe because a slot is loaded only after its store was reported, and a
block's next owner waits for the block's store.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from kvrouter.engine_patch.offload.memory.copier import Copier
from kvrouter.engine_patch.offload.memory.slot_layout import Plan

log = logging.getLogger("vllm.kvrouter.offload")


class TransferResult(NamedTuple):
    """The result of one copy."""

    job_id: int
    ok: bool
    # Bytes copied; 0 if the copy failed.
    num_bytes: int
    # Seconds that the copy took, without its time in the queue.
    seconds: float


@dataclass(frozen=True)
class _Job:
    job_id: int
    is_load: bool
    plan: Plan


class Transfers:
    """The thread of a copier.

    One thread calls this, the engine's. A job id is in use until its result was taken. Results that the engine
    computed on the CPU are in memory when it submits a copy, so no copy has to wait for them.
    """

    def __init__(self, copier: Copier, clock: Callable[[], float] = time.monotonic) -> None:
        self._copier = copier
        self._clock = clock
        # Guards everything below; notified when a job is added or ends, when `wait` begins, and at `close`.
        self._change = threading.Condition()
        self._queued: deque[_Job] = deque()
        self._unfinished: set[int] = set()
        self._awaited: frozenset[int] = frozenset()
        self._results: deque[TransferResult] = deque()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kvrouter-offload-copy", daemon=True)
        self._thread.start()

    def submit_store(self, job_id: int, plan: Plan) -> None:
        """Queue a copy from the cache to slots, and return at once."""
        self._submit(job_id, False, plan)

    def submit_load(self, job_id: int, plan: Plan) -> None:
        """Queue a copy from slots to the cache, and return at once."""
        self._submit(job_id, True, plan)

    def finished(self) -> list[TransferResult]:
        """Return the results since the last call, in the order in which the copies ended."""
        with self._change:
            results = list(self._results)
            self._results.clear()
        return results

    def wait(self, job_ids: Iterable[int]) -> None:
        """Wait until these jobs have ended, with or without success; unknown jobs count as ended."""
        with self._change:
            self._awaited = frozenset(job_ids)
            self._change.notify_all()
            self._change.wait_for(lambda: self._unfinished.isdisjoint(self._awaited))
            self._awaited = frozenset()

    def close(self) -> None:
        """End the thread after its present copy. Queued jobs that did not begin count as failed."""
        with self._change:
            self._closed = True
            for job in self._queued:
                self._end(job, TransferResult(job.job_id, False, 0, 0.0))
            self._queued.clear()
            self._change.notify_all()
        self._thread.join()

    def _submit(self, job_id: int, is_load: bool, plan: Plan) -> None:
        with self._change:
            if self._closed:
                self._results.append(TransferResult(job_id, False, 0, 0.0))
                return
            self._unfinished.add(job_id)
            self._queued.append(_Job(job_id, is_load, plan))
            self._change.notify_all()

    def _run(self) -> None:
        while (job := self._next()) is not None:
            start = self._clock()
            ok, copied = False, 0
            try:
                copy = self._copier.load if job.is_load else self._copier.store
                copied = copy(job.plan)
                ok = True
            except Exception:
                log.exception("kvrouter: offload %s %d failed", kind_of(job.is_load), job.job_id)
            with self._change:
                self._end(job, TransferResult(job.job_id, ok, copied, self._clock() - start))

    def _next(self) -> _Job | None:
        """Return the next job, or None at the end."""
        with self._change:
            while True:
                if self._queued:
                    # min takes the first of several equal jobs, so each kind stays in its order.
                    job = min(self._queued, key=lambda job: (job.job_id not in self._awaited, not job.is_load))
                    self._queued.remove(job)
                    return job
                if self._closed:
                    return None
                self._change.wait()

    def _end(self, job: _Job, result: TransferResult) -> None:
        self._unfinished.discard(job.job_id)
        self._results.append(result)
        self._change.notify_all()


def kind_of(is_load: bool) -> str:
    """Return the name of a copy's direction, for logs."""
    return "load" if is_load else "store"
