# SPDX-License-Identifier: Apache-2.0
"""Copies that a device makes beside the engine: submitted whole by the engine's thread, polled later.

There is no thread: the device orders each copy behind the work that the engine had queued before, and an event shows
its end. A thread that submits copies would wait for the interpreter some 20 times a copy, up to 5 ms each, while the
engine's thread runs; measured on an H200, that left 2 of 38 GB/s. To submit a copy takes 0.1 ms. A copy that fails is a
result, not an exception: the engine continues without the data.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import NamedTuple, Protocol

from kvrouter.engine_patch.offload.memory.slot_layout import Plan
from kvrouter.engine_patch.offload.memory.transfers import TransferResult, kind_of

log = logging.getLogger("vllm.kvrouter.offload")


class DeviceCopy(Protocol):
    """A copy that the device was given. Every method raises if the device failed."""

    num_bytes: int

    def is_done(self) -> bool:
        """Return whether the copy has ended."""
        ...

    def wait(self) -> None:
        """Wait until the copy has ended."""
        ...

    def seconds(self) -> float:
        """Return how long the copy took, without the work before it; call this after its end."""
        ...


class DeviceCopier(Protocol):
    """The submission of copies to a device. Copies of one direction end in the order of their submission."""

    def begin_store(self, plan: Plan) -> DeviceCopy:
        """Submit a copy from the cache to slots. Raises if it cannot be made; then nothing is copied."""
        ...

    def begin_load(self, plan: Plan) -> DeviceCopy:
        """Submit a copy from slots to the cache. Raises if it cannot be made; then nothing is copied."""
        ...


class _Job(NamedTuple):
    job_id: int
    is_load: bool
    copy: DeviceCopy


class DeviceTransfers:
    """The copies under way on a device.

    One thread calls this, the engine's. A job id is in use until its result was taken.
    """

    def __init__(self, copier: DeviceCopier) -> None:
        self._copier = copier
        # The jobs of each direction in the order of their submission, stores first: only the first one need be polled.
        self._under_way: tuple[dict[int, _Job], dict[int, _Job]] = ({}, {})
        self._results: list[TransferResult] = []
        self._closed = False

    def submit_store(self, job_id: int, plan: Plan) -> None:
        """Submit a copy from the cache to slots, and return at once."""
        self._submit(job_id, False, plan)

    def submit_load(self, job_id: int, plan: Plan) -> None:
        """Submit a copy from slots to the cache, and return at once."""
        self._submit(job_id, True, plan)

    def finished(self) -> list[TransferResult]:
        """Return the results since the last call."""
        for jobs in self._under_way:
            while jobs and self._has_ended(job := next(iter(jobs.values()))):
                self._end(job)
        results, self._results = self._results, []
        return results

    def wait(self, job_ids: Iterable[int]) -> None:
        """Wait until these jobs have ended, with or without success; unknown jobs count as ended."""
        for job_id in job_ids:
            for jobs in self._under_way:
                if (job := jobs.get(job_id)) is not None:
                    self._end(job)

    def close(self) -> None:
        """Wait for the copies under way. Copies that are submitted later fail."""
        self._closed = True
        for jobs in self._under_way:
            self.wait(list(jobs))

    def _submit(self, job_id: int, is_load: bool, plan: Plan) -> None:
        try:
            if self._closed:
                raise RuntimeError("the tier is closed")
            copy = self._copier.begin_load(plan) if is_load else self._copier.begin_store(plan)
        except Exception:
            log.exception("kvrouter: offload %s %d not submitted: it counts as failed", kind_of(is_load), job_id)
            self._results.append(TransferResult(job_id, False, 0, 0.0))
            return
        self._under_way[is_load][job_id] = _Job(job_id, is_load, copy)

    def _has_ended(self, job: _Job) -> bool:
        try:
            return job.copy.is_done()
        except Exception:
            # `_end` meets the error again, and reports it.
            return True

    def _end(self, job: _Job) -> None:
        """Wait for a copy, which takes no time if it has ended, and keep its result."""
        try:
            job.copy.wait()
            result = TransferResult(job.job_id, True, job.copy.num_bytes, job.copy.seconds())
        except Exception:
            log.exception("kvrouter: offload %s %d failed", kind_of(job.is_load), job.job_id)
            result = TransferResult(job.job_id, False, 0, 0.0)
        del self._under_way[job.is_load][job.job_id]
        self._results.append(result)
