# SPDX-License-Identifier: Apache-2.0
"""View of a worker that a stream shows while its task does not run."""

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
from kvrouter.router.follow.streams.stream_machine import Event
from kvrouter.router.follow.streams.worker_record import INCIDENT_SHOWN_S
from kvrouter.router.follow.streams.worker_stream import WorkerStream
from kvrouter.router.index.store.commit import WorkerImage
from kvrouter.router.model.workers.registration import Registration
from kvrouter.router.model.workers.stream_state import StreamState
from tests.support.bare_services import bare_services


class Stage:
    """Stream on a clock that the test moves, without store and sockets."""

    def __init__(self) -> None:
        self.now = 1_000.0
        self.changes = 0
        services = bare_services(lambda: self.now)
        self.stream = WorkerStream(
            Registration(WorkerKey("m", "w"), events="tcp://127.0.0.1:1"),
            services,
            mine=lambda worker: True,
            disowns=lambda token, worker, since_s: False,
            changed=self._changed,
            engine_load=lambda said: None,
        )

    def _changed(self) -> None:
        self.changes += 1

    def connect(self) -> None:
        self.stream.ingest.apply(Connected(), self.now)
        # Any news of the store brings the view up to date.
        self.stream.log_heard(True)


@pytest.fixture
def stage() -> Stage:
    return Stage()


def test_a_past_problem_of_a_live_worker_is_shown_for_a_while(stage: Stage) -> None:
    stage.connect()
    stream = stage.stream
    assert stream.view.state is StreamState.LIVE and "no replay endpoint" in stream.view.reason
    changes = stage.changes
    stage.now += INCIDENT_SHOWN_S
    stream.settle()
    assert "no replay endpoint" in stream.view.reason and stage.changes == changes
    stage.now += 0.1
    stream.settle()
    assert (stream.view.state, stream.view.reason) == (StreamState.LIVE, "")
    assert stage.changes == changes + 1


def test_the_reason_of_a_worker_that_is_not_live_stays(stage: Stage) -> None:
    stage.now += 2 * INCIDENT_SHOWN_S
    stage.stream.settle()
    assert stage.stream.view.state is StreamState.CONNECTING and "no connection" in stage.stream.view.reason


def test_a_lasting_reason_is_shown_again_once_an_incident_is_over(stage: Stage) -> None:
    stage.connect()
    stage.stream.set_image_problem("its image is being loaded")
    stage.now += 2 * INCIDENT_SHOWN_S
    stage.stream.settle()
    assert stage.stream.view.reason == "its image is being loaded" and not stage.stream.view.credited
    stage.stream.set_image_problem("")
    assert "no replay endpoint" in stage.stream.view.reason


def test_the_status_of_a_worker_that_lends_has_the_address_and_that_of_any_other_no_such_field(stage: Stage) -> None:
    mirror = cast(Any, SimpleNamespace(lost_credit=lambda worker: None, refused=lambda worker: 0))
    record = stage.stream.record

    def status() -> dict[str, Any]:
        encoded = msgspec.json.encode(worker_status(stage.stream, mirror, None, stage.now))
        assert not msgspec.json.decode(encoded, type=WorkerStatus).peer or b"10.0.0.7" in encoded
        decoded: dict[str, Any] = msgspec.json.decode(encoded)
        return decoded

    assert "peer" not in status()
    record.view = msgspec.structs.replace(record.view, peer=PeerAddress("10.0.0.7", 5710, exchange="a"))
    assert status()["peer"] == {"host": "10.0.0.7", "port": 5710}


async def test_an_older_image_is_in_doubt_until_its_follower_is_judged_again(stage: Stage) -> None:
    stage.connect()
    stream = stage.stream
    fields = stream.record.state_fields()
    stream.record.step(Event.LEASE_ELSEWHERE)

    def load(commits: int) -> StreamState:
        stream.take_image(WorkerImage(stream.worker, "e", commits, fields, "0-0", commits, {}))
        return stream.view.state

    assert load(9) is StreamState.SUSPECT
    stream.follower_heard(None)
    assert stream.view.state is StreamState.LIVE
    # A reload that loses nothing changes nothing.
    assert load(9) is StreamState.LIVE
    # A replica that lacks the last writes was promoted.
    assert load(8) is StreamState.SUSPECT and "not confirmed yet" in stream.view.reason
    stream.follower_heard(None)
    assert stream.view.state is StreamState.LIVE
