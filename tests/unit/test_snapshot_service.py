# SPDX-License-Identifier: Apache-2.0
"""How the reporter's snapshots are served: in turns, once a moment, and only while the client makes progress. No
sockets."""

from __future__ import annotations

import msgspec
import pytest

from kvrouter.engine_patch.reporter.counters import Counters
from kvrouter.engine_patch.reporter.ledger import Ledger
from kvrouter.engine_patch.reporter.snapshots import Moment, Sent, SnapshotService
from kvrouter.events.patch.messages import SnapshotPart
from tests.support.report_peer import copies_of, stored


class Wire:
    """Takes payloads by address, as long as there is room."""

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
    """The service over a ledger of 10 parts, on a wire."""

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
def test_clients_of_one_moment_share_it_and_take_turns() -> None:
    made = Service()
    assert made.ask(b"a")
    assert made.service.turn(0.0)
    assert made.ask(b"b", 2)
    assert made.frozen == 1
    while made.service.turn(0.0):
        pass
    assert made.wire.sent[:5] == [b"a", b"a", b"b", b"a", b"b"]
    assert [part.index for part in made.wire.parts[b"a"]] == list(range(10)) == [p.index for p in made.wire.parts[b"b"]]
    assert {part.id for part in made.wire.parts[b"b"]} == {2}
    assert made.counters.snapshots_served == 2
    assert len(made.service) == 0


@pytest.mark.usefixtures("small_parts")
def test_another_seq_or_epoch_is_frozen_again() -> None:
    made = Service()
    made.ask(b"a")
    made.ledger.apply(stored([99]))
    made.ask(b"b", next_seq=6)
    made.ask(b"c", epoch="f")
    assert made.frozen == 3
    while made.service.turn(0.0):
        pass
    assert [part.next_seq for part in made.wire.parts[b"b"]] == [6] * 11
    assert len(copies_of(made.wire.parts[b"a"])) == 36


@pytest.mark.usefixtures("small_parts")
def test_a_repeated_request_starts_over() -> None:
    made = Service()
    for address in (b"a", b"b", b"c"):
        assert made.ask(address)
    made.service.turn(0.0)
    assert not made.ask(b"d")
    assert made.ask(b"a", 9)
    while made.service.turn(0.0):
        pass
    assert [(part.id, part.index) for part in made.wire.parts[b"a"]] == [(1, 0), *((9, index) for index in range(10))]


@pytest.mark.usefixtures("small_parts")
def test_only_time_without_progress_counts() -> None:
    made = Service()
    made.ask(b"a")
    for now_s in (9.0, 18.0, 27.0):
        assert made.service.turn(now_s)
    made.wire.full.add(b"a")
    assert not made.service.turn(36.9)
    assert len(made.service) == 1
    assert not made.service.turn(37.1)
    assert (len(made.service), made.counters.snapshots_abandoned) == (0, 1)


@pytest.mark.usefixtures("small_parts")
def test_an_unsent_part_is_sent_again() -> None:
    made = Service()
    made.ask(b"a")
    made.ask(b"b")
    for turn in range(30):
        made.wire.full = {b"a"} if turn % 3 else {b"b"}
        made.service.turn(0.0)
    assert [part.index for part in made.wire.parts[b"a"]] == list(range(10)) == [p.index for p in made.wire.parts[b"b"]]
    made.ask(b"c")
    made.wire.gone.add(b"c")
    assert not made.service.turn(0.0)
    assert (len(made.service), made.counters.snapshots_gone, made.counters.snapshots_served) == (0, 1, 2)
