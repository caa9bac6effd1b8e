# SPDX-License-Identifier: Apache-2.0
"""Registered workers, and notifications of subscribers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.follow.fleet.worker_registry import WorkerRegistry
from kvrouter.router.follow.streams.follower import Follower
from kvrouter.router.model.engines.engine_metrics import EngineLoad
from kvrouter.router.model.workers.registration import Registration
from kvrouter.router.model.workers.role import HandoverWay, Role
from kvrouter.router.model.workers.stream_state import StreamState

ONE, TWO = WorkerKey("m", "one"), WorkerKey("n", "two", 1)


class Worker:
    """Follower and its state in one, with the parts that the registry uses."""

    def __init__(self, registration: Registration) -> None:
        self.registration = registration
        self.worker = registration.worker
        self.state = self
        self.view: Any = SimpleNamespace(of=registration.worker.worker_id, life=0)

    def update(self, registration: Registration) -> None:
        self.registration = registration


def follower(worker: WorkerKey, **changes: Any) -> Follower:
    return cast(Follower, Worker(Registration(worker, **changes)))


class Subscriber:
    """Subscriber that records each notification, and the registry's workers at that moment."""

    def __init__(self, registry: WorkerRegistry) -> None:
        self.registry = registry
        self.heard: list[Any] = []
        self.changed: list[WorkerKey | None] = []

    def members(self, worker: WorkerKey | None) -> None:
        self.changed.append(worker)
        self.heard.append(sorted(self.registry.followers))

    def view(self, worker: WorkerKey, view: Any) -> None:
        self.heard.append((worker, view))

    def life(self, worker: WorkerKey) -> None:
        self.heard.append(("life", worker))

    def load(self, worker: WorkerKey, said: EngineLoad) -> None:
        self.heard.append((worker, said))

    def take(self) -> list[Any]:
        heard, self.heard = self.heard, []
        return heard


@pytest.fixture
def registry() -> WorkerRegistry:
    return WorkerRegistry()


@pytest.fixture
def subscriber(registry: WorkerRegistry) -> Subscriber:
    subscriber = Subscriber(registry)
    registry.subscribe(members=subscriber.members, view=subscriber.view, load=subscriber.load)
    return subscriber


def test_members_are_notified_after_each_change(registry: WorkerRegistry, subscriber: Subscriber) -> None:
    registry.add(follower(ONE))
    registry.add(two := follower(TWO))
    assert subscriber.take() == [[ONE], [ONE, TWO]]
    registry.update(msgspec.structs.replace(two.state.registration, draining=True))
    assert subscriber.take() == [[ONE, TWO]]
    assert registry.drains(TWO) and not registry.drains(ONE)
    assert subscriber.changed == [ONE, TWO, TWO]
    registry.leave_out({ONE: "no room"})
    assert subscriber.changed[3:] == [None]


def test_workers_are_found_by_id_and_rank(registry: WorkerRegistry) -> None:
    other_model = WorkerKey("another", ONE.worker_id, ONE.dp_rank)
    for worker in (ONE, TWO, other_model):
        registry.add(follower(worker))
    assert registry.workers_with(ONE.worker_id, ONE.dp_rank) == [ONE, other_model]
    registry.remove(ONE)
    assert registry.workers_with(ONE.worker_id, ONE.dp_rank) == [other_model]
    registry.remove(other_model)
    assert registry.workers_with(ONE.worker_id, ONE.dp_rank) == []
    assert registry.workers_with(TWO.worker_id, TWO.dp_rank) == [TWO]


def test_a_removed_worker_has_no_view_and_its_stream_is_handed_out(
    registry: WorkerRegistry, subscriber: Subscriber
) -> None:
    registry.add(registered := follower(ONE))
    subscriber.take()
    assert registry.remove(ONE) is registered
    assert subscriber.take() == [[], (ONE, None)]


def test_views_are_reported_while_the_worker_is_registered(registry: WorkerRegistry, subscriber: Subscriber) -> None:
    registry.view_changed(ONE)
    assert subscriber.take() == []
    registry.add(follower(ONE))
    subscriber.take()
    registry.view_changed(ONE)
    assert subscriber.take() == [(ONE, SimpleNamespace(of="one", life=0))]
    registry.remove(ONE)
    subscriber.take()
    registry.view_changed(ONE)
    assert subscriber.take() == []


def test_another_life_is_reported_before_its_view_and_once(registry: WorkerRegistry, subscriber: Subscriber) -> None:
    registry.subscribe(life=subscriber.life)
    registry.add(registered := follower(ONE))
    registry.view_changed(ONE)
    subscriber.take()
    cast(Any, registered).view.life = 1
    registry.view_changed(ONE)
    registry.view_changed(ONE)
    assert [what for what, _ in subscriber.take()] == ["life", ONE, ONE]
    registry.remove(ONE)
    registry.add(follower(ONE))
    subscriber.take()
    registry.view_changed(ONE)
    assert [what for what, _ in subscriber.take()] == [ONE], (
        "a worker that is registered again begins a life without news"
    )


def test_a_subscriber_hears_only_its_subscriptions(registry: WorkerRegistry) -> None:
    to_members, to_load = Subscriber(registry), Subscriber(registry)
    registry.subscribe(members=to_members.members)
    registry.subscribe(load=to_load.load)
    load = EngineLoad(1, 2, 0.5)
    registry.add(follower(ONE))
    registry.view_changed(ONE)
    registry.take_engine_load(ONE, load)
    assert (to_members.take(), to_load.take()) == ([[ONE]], [(ONE, load)])


def test_workers_left_out_are_reported_when_they_change(registry: WorkerRegistry, subscriber: Subscriber) -> None:
    registry.leave_out({})
    assert subscriber.take() == []
    registry.leave_out({ONE: "no room"})
    registry.leave_out({ONE: "no room"})
    assert subscriber.take() == [[]]
    assert registry.left_out == {ONE: "no room"}


def test_streams_are_changed_by_nobody_else(registry: WorkerRegistry) -> None:
    registry.add(follower(ONE))
    with pytest.raises(TypeError):
        registry.followers[TWO] = follower(TWO)  # type: ignore[index]


def test_lookups_follow_each_change_of_the_registrations(registry: WorkerRegistry) -> None:
    registry.add(one := follower(ONE, role=Role.PREFILL))
    first = registry.registrations()
    assert first == (one.state.registration,) and registry.registrations() is first
    assert (registry.prefill_workers("m"), registry.prefill_workers("n")) == ({ONE}, frozenset())
    registry.update(msgspec.structs.replace(one.state.registration, role=Role.BOTH, handover=HandoverWay.HEADER))
    registry.add(follower(TWO, numbered=True))
    assert registry.prefill_workers("m") == frozenset()
    assert registry.models() == ["m", "n"]
    assert registry.handover(ONE) is HandoverWay.HEADER
    assert [registration.worker for registration in registry.registrations()] == [ONE, TWO]


def test_an_unknown_worker_has_default_answers(registry: WorkerRegistry) -> None:
    assert registry.given_id(ONE) == "one"
    assert registry.handover(ONE) is HandoverWay.KV_TRANSFER_PARAMS
    assert not registry.drains(ONE)


def test_workers_that_are_down_are_left_out_of_their_models(registry: WorkerRegistry) -> None:
    up, down = follower(ONE), follower(TWO)
    cast(Any, up).view = SimpleNamespace(state=StreamState.LIVE, life=0)
    cast(Any, down).view = SimpleNamespace(state=StreamState.DOWN, life=0)
    registry.add(up)
    registry.add(down)
    assert registry.states_by_model() == {ONE.model: [up]}
