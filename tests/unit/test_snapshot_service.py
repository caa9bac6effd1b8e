# SPDX-License-Identifier: Apache-2.0
"""Service of the reporter's snapshots: in turns, one freeze a moment, and only while the client makes progress.

The tests use no sockets.
"""

from __future__ import annotations

import msgspec
import pytest

from kvrouter.engine_patch.reporter.counters import Counters
from kvrouter.engine_patch.reporter.ledger import Ledger
from kvrouter.engine_patch.reporter.snapshots import Moment, Sent, SnapshotService
from kvrouter.events.patch.messages import SnapshotPart
from tests.support.report_peer import copies_of, stored


class Wire:
    """Wire that takes payloads by address, as long as there is room."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.parts: dict[bytes, list[SnapshotPart]] = {}
        self.full: set[bytes] = set()
        self.gone: set[bytes] = set()

    def __call__(self, address: bytes, payload: bytes) -> Sent:
        if address in self.gone:
            return Sent.GONE
        if address in self.full:
            return Sent.FULL
        self.sent.append(address)
        self.parts.setdefault(address, []).append(msgspec.msgpack.decode(payload, type=SnapshotPart))
        return Sent.YES


class Service:
    """Snapshot service over a ledger of 10 parts, on a wire."""

    def __init__(self) -> None:
        self.wire = Wire()
        self.counters = Counters()
        self.service = SnapshotService(self.wire, max_clients=3, timeout_s=10.0, counters=self.counters)
        self.frozen = 0
        self.ledger = Ledger(1_000)
        self.ledger.apply(stored(range(36)))

    def ask(self, address: bytes, request_id: int = 1, next_seq: int = 5, epoch: str = "e") -> bool:
        def freeze() -> Moment:
            self.frozen += 1
            return Moment(epoch, 0.0, next_seq, self.ledger.freeze())

        return self.service.request(address, request_id, epoch, next_seq, freeze, 0.0)


@pytest.mark.usefixtures("small_parts")
def test_clients_of_one_moment_share_a_snapshot_and_take_turns() -> None:
    stage = Service()
    assert stage.ask(b"a")
    assert stage.service.turn(0.0)
    assert stage.ask(b"b", 2)
    assert stage.frozen == 1
    while stage.service.turn(0.0):
        pass
    assert stage.wire.sent[:5] == [b"a", b"a", b"b", b"a", b"b"]
    assert (
        [part.index for part in stage.wire.parts[b"a"]] == list(range(10)) == [p.index for p in stage.wire.parts[b"b"]]
    )
    assert {part.id for part in stage.wire.parts[b"b"]} == {2}
    assert (stage.counters.snapshots_served, len(stage.service)) == (2, 0)


@pytest.mark.usefixtures("small_parts")
def test_another_seq_or_epoch_is_frozen_again() -> None:
    stage = Service()
    stage.ask(b"a")
    stage.ledger.apply(stored([99]))
    stage.ask(b"b", next_seq=6)
    stage.ask(b"c", epoch="f")
    assert stage.frozen == 3
    while stage.service.turn(0.0):
        pass
    assert [part.next_seq for part in stage.wire.parts[b"b"]] == [6] * 11
    assert len(copies_of(stage.wire.parts[b"a"])) == 36


@pytest.mark.usefixtures("small_parts")
def test_a_repeated_request_starts_over() -> None:
    stage = Service()
    for address in (b"a", b"b", b"c"):
        assert stage.ask(address)
    stage.service.turn(0.0)
    assert not stage.ask(b"d")
    assert stage.ask(b"a", 9)
    while stage.service.turn(0.0):
        pass
    assert [(part.id, part.index) for part in stage.wire.parts[b"a"]] == [(1, 0), *((9, index) for index in range(10))]


@pytest.mark.usefixtures("small_parts")
def test_only_time_without_progress_counts() -> None:
    stage = Service()
    stage.ask(b"a")
    for now_s in (9.0, 18.0, 27.0):
        assert stage.service.turn(now_s)
    stage.wire.full.add(b"a")
    assert not stage.service.turn(36.9)
    assert len(stage.service) == 1
    assert not stage.service.turn(37.1)
    assert (len(stage.service), stage.counters.snapshots_abandoned) == (0, 1)


@pytest.mark.usefixtures("small_parts")
def test_an_unsent_part_is_sent_again() -> None:
    stage = Service()
    stage.ask(b"a")
    stage.ask(b"b")
    for turn in range(30):
        stage.wire.full = {b"a"} if turn % 3 else {b"b"}
        stage.service.turn(0.0)
    assert (
        [part.index for part in stage.wire.parts[b"a"]] == list(range(10)) == [p.index for p in stage.wire.parts[b"b"]]
    )
    stage.ask(b"c")
    stage.wire.gone.add(b"c")
    assert not stage.service.turn(0.0)
    assert (len(stage.service), stage.counters.snapshots_gone, stage.counters.snapshots_served) == (0, 1, 2)
