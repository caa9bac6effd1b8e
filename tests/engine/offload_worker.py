# SPDX-License-Identifier: Apache-2.0
"""The worker sides of offloading connectors, without memory: they only report transfer jobs as done.

vLLM's own worker needs CUDA. The scheduler learns from it only when jobs finish, and these workers keep to its timing:
a load ends in its own step or later, a store no earlier than the step after, a flushed job at once.
"""

from __future__ import annotations

from random import Random
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiKVConnectorMetadata,
    MultiKVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.simple_kv_offload.metadata import SimpleCPUOffloadMetadata, SimpleCPUOffloadWorkerMetadata

# Share of the waiting jobs that finish in a step.
_FINISHING = 0.8


class OffloadWorker:
    """The worker side of an OffloadingConnector.

    `waited` counts the loads that ended within their step, as vLLM 0.33 can request.
    """

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self.waited = 0
        # The request of each load job; None if the request runs already.
        self._loads: dict[int, str | None] = {}
        self._stores: set[int] = set()

    def run(self, metadata: OffloadingConnectorMetadata | None) -> KVConnectorOutput:
        """Take this step's jobs, and report which jobs of this and earlier steps ended in it."""
        flushed: set[int] = set()
        fresh: set[int] = set()
        if metadata is not None:
            waited = {job_id for job_id, job in metadata.load_jobs.items() if getattr(job, "sync", False)}
            self.waited += len(waited)
            self._loads.update(
                {job_id: None if job_id in waited else job.req_id for job_id, job in metadata.load_jobs.items()}
            )
            fresh = set(metadata.store_jobs)
            flushed = (metadata.jobs_to_flush or set()) & (self._stores | fresh | self._loads.keys()) | waited
        done = flushed | {job_id for job_id in [*self._loads, *sorted(self._stores)] if self._rng.random() < _FINISHING}
        self._stores = (self._stores | fresh) - done
        ended = [self._loads.pop(job_id) for job_id in sorted(done) if job_id in self._loads]
        received = {request_id for request_id in ended if request_id is not None}
        report = OffloadingWorkerMetadata()
        for job_id in done:
            report.mark_completed(job_id)
        return KVConnectorOutput(finished_recving=received or None, kv_connector_worker_meta=report)


class SimpleOffloadWorker:
    """The worker side of a SimpleCPUOffloadConnector.

    Events of one direction end in their order, as on a CUDA stream.
    """

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._loads: dict[int, list[str]] = {}
        self._stores: list[int] = []

    def run(self, metadata: SimpleCPUOffloadMetadata | None) -> KVConnectorOutput:
        """Take this step's events, and report which events of this and earlier steps ended in it."""
        flush = False
        waiting = len(self._stores)
        if metadata is not None:
            flush = metadata.need_flush
            if metadata.load_event >= 0:
                self._loads[metadata.load_event] = metadata.load_event_to_reqs[metadata.load_event]
            if metadata.store_event >= 0:
                self._stores.append(metadata.store_event)
        loaded, stored = set[str](), {}
        for event in list(self._loads):
            if not flush and self._rng.random() >= _FINISHING:
                break
            loaded |= set(self._loads.pop(event))
        for event in self._stores[: len(self._stores) if flush else waiting]:
            if not flush and self._rng.random() >= _FINISHING:
                break
            self._stores.remove(event)
            stored[event] = 1
        return KVConnectorOutput(
            finished_recving=loaded or None, kv_connector_worker_meta=SimpleCPUOffloadWorkerMetadata(stored)
        )


class MultiOffloadWorker:
    """The worker side of a MultiConnector: an OffloadingConnector and a SimpleCPUOffloadConnector, in this order."""

    def __init__(self, rng: Random) -> None:
        self._workers: tuple[OffloadWorker | SimpleOffloadWorker, ...] = (OffloadWorker(rng), SimpleOffloadWorker(rng))

    def run(self, metadata: MultiKVConnectorMetadata | None) -> KVConnectorOutput:
        parts: Any = (None, None) if metadata is None else metadata.metadata
        done = [worker.run(part) for worker, part in zip(self._workers, parts, strict=True)]
        received = set[str]().union(*(output.finished_recving or () for output in done))
        return KVConnectorOutput(
            finished_recving=received or None,
            kv_connector_worker_meta=MultiKVConnectorWorkerMetadata(
                tuple(output.kv_connector_worker_meta for output in done)
            ),
        )
