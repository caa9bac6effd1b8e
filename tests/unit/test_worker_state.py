# SPDX-License-Identifier: Apache-2.0
"""View of a worker that its state shows while no task follows it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from kvrouter.contract.worker_status import WorkerStatus
from kvrouter.events.patch.messages import PeerAddress
from kvrouter.events.vllm.stream_items import Connected
from kvrouter.router.app.core.worker_report import worker_status
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.follow.streams.follower import Follower
from kvrouter.router.follow.streams.stream_machine import Event
from kvrouter.router.follow.streams.worker_state import INCIDENT_SHOWN_S
from kvrouter.router.index.store.commit import WorkerImage
from kvrouter.router.model.workers.registration import Registration
from kvrouter.router.model.workers.stream_state import StreamState
from tests.support.bare_services import bare_services


class Stage:
    """Follower on a clock that the test moves, without store and sockets."""

    def __init__(self) -> None:
        self.now = 1_000.0
        self.changes = 0
        services = bare_services(lambda: self.now, view_changed=self._changed)
        self.follower = Follower(Registration(WorkerKey("m", "w"), events="tcp://127.0.0.1:1"), services)
        self.state = self.follower.state

    def _changed(self, worker: WorkerKey) -> None:
        self.changes += 1

    def connect(self) -> None:
        self.state.ingest.apply(Connected(), self.now)
        self.state.on_items(self.now)


@pytest.fixture
def stage() -> Stage:
    return Stage()


def test_a_past_problem_of_a_live_worker_is_shown_for_a_while(stage: Stage) -> None:
    stage.connect()
    state = stage.state
    assert state.view.state is StreamState.LIVE and "no replay endpoint" in state.view.reason
    changes = stage.changes
    stage.now += INCIDENT_SHOWN_S
    state.settle()
    assert "no replay endpoint" in state.view.reason and stage.changes == changes
    stage.now += 0.1
    state.settle()
    assert (state.view.state, state.view.reason) == (StreamState.LIVE, "")
    assert stage.changes == changes + 1


def test_the_reason_of_a_worker_that_is_not_live_stays(stage: Stage) -> None:
    stage.now += 2 * INCIDENT_SHOWN_S
    stage.state.settle()
    assert stage.state.view.state is StreamState.CONNECTING and "no connection" in stage.state.view.reason


def test_a_lasting_reason_is_shown_again_once_an_incident_is_over(stage: Stage) -> None:
    stage.connect()
    stage.state.on_image_problem("its image is being loaded")
    stage.now += 2 * INCIDENT_SHOWN_S
    stage.state.settle()
    assert stage.state.view.reason == "its image is being loaded" and not stage.state.view.credited
    stage.state.on_image_problem("")
    assert "no replay endpoint" in stage.state.view.reason


def test_the_status_of_a_worker_that_lends_has_the_address_and_that_of_any_other_no_such_field(stage: Stage) -> None:
    mirror = cast(Any, SimpleNamespace(lost_credit=lambda worker: None, refused=lambda worker: 0))
    state = stage.state

    def status() -> dict[str, Any]:
        encoded = msgspec.json.encode(worker_status(stage.follower, mirror, None, stage.now))
        assert not msgspec.json.decode(encoded, type=WorkerStatus).peer or b"10.0.0.7" in encoded
        decoded: dict[str, Any] = msgspec.json.decode(encoded)
        return decoded

    assert "peer" not in status()
    state.view = msgspec.structs.replace(state.view, peer=PeerAddress("10.0.0.7", 5710, exchange="a"))
    assert status()["peer"] == {"host": "10.0.0.7", "port": 5710}


async def test_an_older_image_is_in_doubt_until_its_follower_is_judged_again(stage: Stage) -> None:
    stage.connect()
    state = stage.state
    fields = state.state_fields()
    state.step(Event.LEASE_ELSEWHERE)

    def load(commits: int) -> StreamState:
        state.on_image(WorkerImage(state.worker, "e", commits, fields, "0-0", commits, {}))
        return state.view.state

    assert load(9) is StreamState.SUSPECT
    state.on_follower_heard(None)
    assert state.view.state is StreamState.LIVE
    # A reload that loses nothing changes nothing.
    assert load(9) is StreamState.LIVE
    # A replica that lacks the last writes was promoted.
    assert load(8) is StreamState.SUSPECT and "not confirmed yet" in state.view.reason
    state.on_follower_heard(None)
    assert state.view.state is StreamState.LIVE
