# SPDX-License-Identifier: Apache-2.0
"""The registered workers, their followers, and the subscribers to changes.

A process has one registry, on one asyncio loop. Only `fleet.py` changes it, and keeps it equal to the registry in Redis.
Subscribers are called at once, in the order of their subscription, and must not wait.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.follow.streams.follower import Follower
from kvrouter.router.follow.streams.worker_state import WorkerState
from kvrouter.router.index.matching.matcher import WorkerView
from kvrouter.router.model.engines.engine_metrics import EngineLoad
from kvrouter.router.model.workers.registration import Registration
from kvrouter.router.model.workers.role import HandoverWay, Role
from kvrouter.router.model.workers.stream_state import StreamState


class WorkerRegistry:
    """The registered workers of a process.

    Invariant: `followers` has one follower for each registered worker that is not left out, in the order of registration.
    """

    def __init__(self) -> None:
        self._followers: dict[WorkerKey, Follower] = {}
        # A read-only view of `_followers`.
        self.followers: Mapping[WorkerKey, Follower] = MappingProxyType(self._followers)
        # The registered workers that have no follower here, with the reasons.
        self.left_out: Mapping[WorkerKey, str] = {}
        # Why entries of the registry in Redis cannot be read, a sentence for each.
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
        # Cached, because it is read for each worker of each request.
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
            members: Called with a worker that was added, removed or registered differently, and with None when
                `left_out` changed.
            view: Called with each new view of a worker, and with None when the worker was removed.
            load: Called with each load report of an engine that is followed here.
            life: Called before `view` when another process of a worker's engine may have begun, so that judgements of
                the process before end.
        """
        self._members += [] if members is None else [members]
        self._views += [] if view is None else [view]
        self._loads += [] if load is None else [load]
        self._lives += [] if life is None else [life]

    def add(self, follower: Follower) -> None:
        """Add a worker with its follower."""
        self._followers[follower.worker] = follower
        self._by_id.setdefault(follower.worker[1:], {})[follower.worker] = None
        self._change_members(follower.worker)

    def update(self, registration: Registration) -> None:
        """Take over a worker's registration that differs in nothing on which the follower depends."""
        self._followers[registration.worker].update(registration)
        self._change_members(registration.worker)

    def remove(self, worker: WorkerKey) -> Follower:
        """Remove a worker, and return its follower, which the caller must stop."""
        follower = self._followers.pop(worker)
        same_name = self._by_id[worker[1:]]
        del same_name[worker]
        if not same_name:
            del self._by_id[worker[1:]]
        self._change_members(worker)
        self._tell_view(worker, None)
        return follower

    def leave_out(self, reasons: Mapping[WorkerKey, str]) -> None:
        """Set which registered workers have no follower here, and why."""
        if reasons != self.left_out:
            self.left_out = reasons
            self._change_members(None)

    def _change_members(self, worker: WorkerKey | None) -> None:
        self._registrations = self._prefill_workers = self._drained = None
        for subscriber in self._members:
            subscriber(worker)

    def view_changed(self, worker: WorkerKey) -> None:
        """Pass on the view of a worker, unless the worker is not added yet or was removed."""
        if (follower := self._followers.get(worker)) is not None:
            self._tell_view(worker, follower.state.view)

    def _tell_view(self, worker: WorkerKey, view: WorkerView | None) -> None:
        """Call the subscribers to lives, if the life changed, and to views."""
        if view is None:
            self._life.pop(worker, None)
        elif self._life.setdefault(worker, view.life) != view.life:
            self._life[worker] = view.life
            for lives in self._lives:
                lives(worker)
        for subscriber in self._views:
            subscriber(worker, view)

    def take_engine_load(self, worker: WorkerKey, load: EngineLoad) -> None:
        """Pass on a load report of a worker's engine."""
        for subscriber in self._loads:
            subscriber(worker, load)

    def registrations(self) -> Sequence[Registration]:
        """Return all registrations, as the same object until one of them changes."""
        if self._registrations is None:
            self._registrations = tuple(follower.state.registration for follower in self._followers.values())
        return self._registrations

    def workers_with(self, worker_id: str, dp_rank: int) -> list[WorkerKey]:
        """Return the workers of all models with this id and rank, in the order of their registration."""
        return list(self._by_id.get((worker_id, dp_rank), ()))

    def models(self) -> list[str]:
        """Return the models of all workers, sorted."""
        return sorted({worker.model for worker in self._followers})

    def states_by_model(self) -> dict[str, list[WorkerState]]:
        """Return the workers of each model that are not down."""
        states: dict[str, list[WorkerState]] = {}
        for worker, follower in self._followers.items():
            if follower.state.view.state is not StreamState.DOWN:
                states.setdefault(worker.model, []).append(follower.state)
        return states

    def prefill_workers(self, model: str) -> frozenset[WorkerKey]:
        """Return the workers of a model that only compute prompts, for other workers."""
        if self._prefill_workers is None:
            by_model: dict[str, set[WorkerKey]] = {}
            for registration in self.registrations():
                if registration.role is Role.PREFILL:
                    by_model.setdefault(registration.worker.model, set()).add(registration.worker)
            self._prefill_workers = {name: frozenset(workers) for name, workers in by_model.items()}
        return self._prefill_workers.get(model, frozenset())

    def engine_start_s(self, worker: WorkerKey) -> float | None:
        """Return when the process of a worker's engine started, or None if that is not known."""
        follower = self._followers.get(worker)
        return None if follower is None else follower.state.engine_start_s

    def is_down(self, worker: WorkerKey) -> bool | None:
        """Return whether a worker's engine is gone, or None if the worker is not registered."""
        follower = self._followers.get(worker)
        return None if follower is None else follower.state.view.state is StreamState.DOWN

    def is_draining(self, worker: WorkerKey) -> bool:
        """Return whether an operator drains the worker."""
        follower = self._followers.get(worker)
        return follower is not None and follower.state.registration.draining

    def drains(self, worker: WorkerKey) -> bool:
        """Return whether the worker takes no new requests, because an operator or its source drains it."""
        if self._drained is None:
            self._drained = frozenset(
                [registration.worker for registration in self.registrations() if registration.drains]
            )
        return worker in self._drained

    def handover(self, worker: WorkerKey) -> HandoverWay:
        """Return how the worker is handed a prompt that another worker computed."""
        follower = self._followers.get(worker)
        return HandoverWay.KV_TRANSFER_PARAMS if follower is None else follower.state.registration.handover

    def given_id(self, worker: WorkerKey) -> str | int:
        """Return the worker's id as registered, as a number if it was one."""
        follower = self._followers.get(worker)
        return worker.worker_id if follower is None else follower.state.registration.given_id
