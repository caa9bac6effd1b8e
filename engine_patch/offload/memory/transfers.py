# SPDX-License-Identifier: Apache-2.0
"""Copies beside the engine: submitted by its thread, done by other threads, polled later.

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
from typing import Any, NamedTuple

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
    fence: Any


class Transfers:
    """The threads of a copier, `copier.lanes` of them: one does everything, of two each has one direction.

    One thread calls this, the engine's. A job id is in use until its result was taken.
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
        directions = [(True, False)] if copier.lanes == 1 else [(True,), (False,)]
        self._threads = [
            threading.Thread(target=self._run, args=(own,), name="kvrouter-offload-copy", daemon=True)
            for own in directions
        ]
        for thread in self._threads:
            thread.start()

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
        """End the threads after their present copies. Queued jobs that did not begin count as failed."""
        with self._change:
            self._closed = True
            for job in self._queued:
                self._end(job, TransferResult(job.job_id, False, 0, 0.0))
            self._queued.clear()
            self._change.notify_all()
        for thread in self._threads:
            thread.join()

    def _submit(self, job_id: int, is_load: bool, plan: Plan) -> None:
        try:
            job = _Job(job_id, is_load, plan, self._copier.fence())
        except Exception:
            # A device that failed takes no events, so the copy would fail as well.
            log.exception("kvrouter: offload %s %d not submitted: it counts as failed", _kind(is_load), job_id)
            job = None
        with self._change:
            if job is None or self._closed:
                self._results.append(TransferResult(job_id, False, 0, 0.0))
                return
            self._unfinished.add(job_id)
            self._queued.append(job)
            self._change.notify_all()

    def _run(self, directions: tuple[bool, ...]) -> None:
        while (job := self._next(directions)) is not None:
            start = self._clock()
            ok, copied = False, 0
            try:
                copy = self._copier.load if job.is_load else self._copier.store
                copied = copy(job.plan, job.fence)
                ok = True
            except Exception:
                log.exception("kvrouter: offload %s %d failed", _kind(job.is_load), job.job_id)
            with self._change:
                self._end(job, TransferResult(job.job_id, ok, copied, self._clock() - start))

    def _next(self, directions: tuple[bool, ...]) -> _Job | None:
        """Return the next job of these directions, or None at the end."""
        with self._change:
            while True:
                jobs = [job for job in self._queued if job.is_load in directions]
                if jobs:
                    # min takes the first of several equal jobs, so each kind stays in its order.
                    job = min(jobs, key=lambda job: (job.job_id not in self._awaited, not job.is_load))
                    self._queued.remove(job)
                    return job
                if self._closed:
                    return None
                self._change.wait()

    def _end(self, job: _Job, result: TransferResult) -> None:
        self._unfinished.discard(job.job_id)
        self._results.append(result)
        self._change.notify_all()


def _kind(is_load: bool) -> str:
    return "load" if is_load else "store"
