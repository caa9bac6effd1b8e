# SPDX-License-Identifier: Apache-2.0
"""Which workers are registered, which stream follows each, and who wants to know of changes. The one place for that in
a process; `fleet.py` alone changes it, and keeps it equal to the registry in Redis.

Belongs to one asyncio loop. Subscribers are called at once, in the order of their subscription, and do not wait.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.follow.streams.worker_stream import WorkerStream
from kvrouter.router.index.matching.matcher import WorkerView
from kvrouter.router.model.engines.engine_metrics import EngineLoad
from kvrouter.router.model.workers.registration import Registration
from kvrouter.router.model.workers.role import HandoverWay, Role


class WorkerRegistry:
    """`streams` has one stream for each registered worker, in the order of their registration; it is read-only."""

    def __init__(self) -> None:
        self._streams: dict[WorkerKey, WorkerStream] = {}
        self.streams: Mapping[WorkerKey, WorkerStream] = MappingProxyType(self._streams)
        # Registered workers that have no stream here, and why.
        self.left_out: Mapping[WorkerKey, str] = {}
        # Entries of the registry in Redis that cannot be read.
        self.problems: list[str] = []
        # Workers by id and rank, usually one for each, as models rarely share ids.
        self._by_id: dict[tuple[str, int], dict[WorkerKey, None]] = {}
        self._members: list[Callable[[WorkerKey | None], None]] = []
        self._views: list[Callable[[WorkerKey, WorkerView | None], None]] = []
        self._loads: list[Callable[[WorkerKey, EngineLoad], None]] = []
        self._lives: list[Callable[[WorkerKey], None]] = []
        # The engine life in each worker's last view.
        self._life: dict[WorkerKey, int] = {}
        self._registrations: tuple[Registration, ...] | None = None
        self._prefill_workers: dict[str, frozenset[WorkerKey]] | None = None
        # Looked into for each worker of each request.
        self._drained: frozenset[WorkerKey] | None = None

    def subscribe(
        self,
        *,
        members: Callable[[WorkerKey | None], None] | None = None,
        view: Callable[[WorkerKey, WorkerView | None], None] | None = None,
        load: Callable[[WorkerKey, EngineLoad], None] | None = None,
        life: Callable[[WorkerKey], None] | None = None,
    ) -> None:
        """Call these functions from now on.

        Args:
            members: Called when a worker came, went, or its registration changed, with that worker, and with None when
                others are left out than before.
            view: Called with each new view of a worker, None when it went.
            load: Called with the load that engines followed here report.
            life: Called before `view` when another process of a worker's engine may have begun, so that judgements of
                the one before end.
        """
        self._members += [] if members is None else [members]
        self._views += [] if view is None else [view]
        self._loads += [] if load is None else [load]
        self._lives += [] if life is None else [life]

    def add(self, stream: WorkerStream) -> None:
        """A worker came; `stream` is to follow it."""
        self._streams[stream.worker] = stream
        self._by_id.setdefault(stream.worker[1:], {})[stream.worker] = None
        self._change_members(stream.worker)

    def update(self, registration: Registration) -> None:
        """It is registered otherwise, in nothing that its stream depends on."""
        self._streams[registration.worker].update(registration)
        self._change_members(registration.worker)

    def remove(self, worker: WorkerKey) -> WorkerStream:
        """A worker went; returns its stream, which is to end now."""
        stream = self._streams.pop(worker)
        alike = self._by_id[worker[1:]]
        del alike[worker]
        if not alike:
            del self._by_id[worker[1:]]
        self._change_members(worker)
        self._tell_view(worker, None)
        return stream

    def leave_out(self, reasons: Mapping[WorkerKey, str]) -> None:
        """Of which registered workers there is no stream here, and why."""
        if reasons != self.left_out:
            self.left_out = reasons
            self._change_members(None)

    def _change_members(self, worker: WorkerKey | None) -> None:
        self._registrations = self._prefill_workers = self._drained = None
        for subscriber in self._members:
            subscriber(worker)

    def view_changed(self, worker: WorkerKey) -> None:
        """Said by its stream, also by one that is not added yet or was removed."""
        if (stream := self._streams.get(worker)) is not None:
            self._tell_view(worker, stream.view)

    def _tell_view(self, worker: WorkerKey, view: WorkerView | None) -> None:
        if view is None:
            self._life.pop(worker, None)
        elif self._life.setdefault(worker, view.life) != view.life:
            self._life[worker] = view.life
            for lives in self._lives:
                lives(worker)
        for subscriber in self._views:
            subscriber(worker, view)

    def engine_said(self, worker: WorkerKey, said: EngineLoad) -> None:
        """Said by its stream."""
        for subscriber in self._loads:
            subscriber(worker, said)

    def registrations(self) -> Sequence[Registration]:
        """The same object until one of them changes."""
        if self._registrations is None:
            self._registrations = tuple(stream.registration for stream in self._streams.values())
        return self._registrations

    def workers_with(self, worker_id: str, dp_rank: int) -> list[WorkerKey]:
        """Of all models, in the order of their registration."""
        return list(self._by_id.get((worker_id, dp_rank), ()))

    def models(self) -> list[str]:
        return sorted({worker.model for worker in self._streams})

    def prefill_workers(self, model: str) -> frozenset[WorkerKey]:
        """Those that only compute prompts, for others."""
        if self._prefill_workers is None:
            found: dict[str, set[WorkerKey]] = {}
            for one in self.registrations():
                if one.role is Role.PREFILL:
                    found.setdefault(one.worker.model, set()).add(one.worker)
            self._prefill_workers = {name: frozenset(workers) for name, workers in found.items()}
        return self._prefill_workers.get(model, frozenset())

    def is_draining(self, worker: WorkerKey) -> bool:
        """Whether an operator has it drained."""
        stream = self._streams.get(worker)
        return stream is not None and stream.registration.draining

    def drains(self, worker: WorkerKey) -> bool:
        """Whether it takes no new requests."""
        if self._drained is None:
            self._drained = frozenset([one.worker for one in self.registrations() if one.drains])
        return worker in self._drained

    def handover(self, worker: WorkerKey) -> HandoverWay:
        """How it is handed a prompt."""
        stream = self._streams.get(worker)
        return HandoverWay.KV_TRANSFER_PARAMS if stream is None else stream.registration.handover

    def given_id(self, worker: WorkerKey) -> str | int:
        """Its id as registered, a number where it was one."""
        stream = self._streams.get(worker)
        return worker.worker_id if stream is None else stream.registration.given_id
