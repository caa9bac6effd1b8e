# SPDX-License-Identifier: Apache-2.0
# SPDX-License-Identifier: Apache-2.0
"""Requests and snapshots: exact, fair, bounded, and without effect on anybody but the client."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from unittest.mock import ANY

import pytest
import zmq

from kvrouter.engine_patch.reporter.reporter import MAX_MESSAGE_BYTES, Reporter
from kvrouter.engine_patch.reporter.request_handler import MAX_UNSENT
from kvrouter.events.patch.messages import (
    Events,
    Hello,
    HelloRequest,
    PlaceSummary,
    Refused,
    ReportEvent,
    SnapshotPart,
    SnapshotRequest,
)
from tests.support.report_peer import Copies, Peer, apply, copies_of, eventually, fails, removed, said, stored

Context = zmq.Context[zmq.Socket[bytes]]


def filled(reporter: Reporter, peer: Peer, blocks: int) -> None:
    reporter.publish(said(stored(range(blocks))), None)
    eventually(lambda: peer.hello().next_seq > 0)


class Clock:
    """Clock that stands still until it is set."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_hello_describes_the_publisher(context: Context, made: Callable[..., Reporter]) -> None:
    reporter = made(wall_clock=lambda: 9.5, patch_version="1.2", features=lambda: {"clears": "on"}, heartbeat_s=7.0)
    with Peer(context, reporter) as peer:
        assert peer.hello(2**63) == Hello(
            2**63, f"{0:016x}", 9.5, 0, reporter.reports_endpoint, 7.0, patch_version="1.2", features={"clears": "on"}
        )


def test_features_that_cannot_be_read_cost_only_themselves(context: Context, made: Callable[..., Reporter]) -> None:
    with Peer(context, made(features=fails)) as peer:
        assert peer.hello().features == {}


def test_an_empty_snapshot_is_one_last_part(context: Context, made: Callable[..., Reporter]) -> None:
    with Peer(context, made(wall_clock=lambda: 9.5)) as peer:
        (part,) = peer.snapshot(5)
    assert (part.id, part.epoch, part.started_s, part.next_seq, part.index) == (5, f"{0:016x}", 9.5, 0, 0)
    assert (part.hashes, part.copied, part.last, part.places) == (b"", [], True, [])


@pytest.mark.usefixtures("small_parts")
def test_parts_add_up_to_the_ledger(context: Context, made: Callable[..., Reporter]) -> None:
    reporter = made()
    events: list[ReportEvent] = [
        stored([*range(9), 3, 3, 8]),
        stored([2**64 - 1], "CPU", 1, ownership="a"),
        stored([7], "CPU", None, locality="REMOTE"),
        removed([0]),
    ]
    expected: Copies = Counter()
    apply(expected, events)
    with Peer(context, reporter) as peer:
        reporter.publish(said(*events), None)
        eventually(lambda: peer.hello().next_seq == 1)
        parts = peer.snapshot()
    assert [part.index for part in parts] == list(range(len(parts)))
    assert {part.next_seq for part in parts} == {1}
    assert [len(part.hashes) // 8 for part in parts] == [4, 4, 1, 1, 0]
    assert copies_of(parts) == expected
    assert sorted(pair for part in parts for pair in part.copied) == [(3, 3), (8, 2)]
    assert parts[-1].places == [
        PlaceSummary(0, "GPU", 8, 11, sum(range(9))),
        PlaceSummary(1, "CPU", 1, 1, 2**64 - 1, "a"),
        PlaceSummary(None, "CPU", 1, 1, 7, None, "REMOTE"),
    ]
    assert parts[-2].locality == "REMOTE"
    eventually(lambda: reporter.counters.snapshots_served == 1)


@pytest.mark.usefixtures("small_parts")
def test_a_snapshot_and_what_follows_it_is_everything(context: Context, made: Callable[..., Reporter]) -> None:
    reporter = made()
    truth: Copies = Counter()

    def change(number: int) -> list[ReportEvent]:
        return [stored([number, number + 1, number % 9]), removed([number // 2])]

    with Peer(context, reporter) as peer:
        joined = peer.joined(reporter)
        for number in range(1_000):
            events = change(number)
            apply(truth, events)
            reporter.publish(said(*events), None)
            if number == 300:
                # The snapshot is answered somewhere among the messages, part by part.
                peer.send(SnapshotRequest(1))
        parts = peer.rest_of_snapshot()
        copies, expected = copies_of(parts), parts[-1].next_seq
        assert joined <= expected <= joined + 1_000
        while expected < joined + 1_000:
            seq, message = peer.next()
            if isinstance(message, Events) and seq >= expected:
                assert seq == expected
                apply(copies, message.events)
                expected += 1
    assert copies == truth


@pytest.mark.usefixtures("small_parts")
def test_a_client_that_does_not_read_delays_only_itself(context: Context, made: Callable[..., Reporter]) -> None:
    clock = Clock()
    reporter = made(
        requests="inproc://requests", clock=clock, max_snapshots=2, reply_hwm=2, snapshot_timeout_s=10.0, retry_s=0.25
    )
    with Peer(context, reporter, hwm=1) as stuck, Peer(context, reporter) as reading, Peer(context, reporter) as third:
        filled(reporter, reading, 400)
        stuck.send(SnapshotRequest(1))
        # The client reads one part, and then no more.
        assert isinstance(stuck.reply(), SnapshotPart)
        # Other clients are served, and messages go on.
        assert len(copies_of(reading.snapshot())) == 400
        reporter.publish(said(stored([1_000])), None)
        assert len(copies_of(reading.snapshot())) == 401
        # The stuck client takes one of only two places.
        with Peer(context, reporter, hwm=1) as second_reader:
            second_reader.send(SnapshotRequest(2))
            assert isinstance(second_reader.reply(), SnapshotPart)
            third.send(SnapshotRequest(3))
            assert third.reply() == Refused(3, ANY, 0.25)
        eventually(lambda: reporter.counters.snapshots_gone == 1)
        assert reporter.counters.snapshots_abandoned == 0
        clock.now_s += 10.5
        third.send(SnapshotRequest(4))
        eventually(lambda: reporter.counters.snapshots_abandoned == 1)
        assert len(copies_of(third.rest_of_snapshot())) == 401
        # The parts that waited for the stuck client are still there, but no more come.
        assert isinstance(stuck.reply(), SnapshotPart)
        assert reporter.counters.snapshots_refused == 1


@pytest.mark.usefixtures("small_parts")
def test_a_slow_reader_that_continues_gets_all_of_it(context: Context, made: Callable[..., Reporter]) -> None:
    reporter = made(requests="inproc://requests", reply_hwm=1)
    with Peer(context, reporter, hwm=1) as slow, Peer(context, reporter) as reading:
        filled(reporter, reading, 60)
        slow.send(SnapshotRequest(1))
        first = slow.reply()
        assert isinstance(first, SnapshotPart)
        reading.snapshot()
        # The snapshot was frozen when it was requested.
        reporter.publish(said(removed(range(60))), None)
        eventually(lambda: reading.hello().next_seq == 2)
        parts = [first, *slow.rest_of_snapshot()]
    assert set(copies_of(parts)) == {(0, "GPU", None, number) for number in range(60)}
    assert {part.next_seq for part in parts} == {1}


@pytest.mark.usefixtures("small_parts")
def test_a_new_epoch_ends_snapshots_of_the_old_one(context: Context, made: Callable[..., Reporter]) -> None:
    reporter = made(requests="inproc://requests", reply_hwm=4)
    with Peer(context, reporter, hwm=1) as slow, Peer(context, reporter) as reading:
        filled(reporter, reading, 400)
        slow.send(SnapshotRequest(1))
        assert isinstance(slow.reply(), SnapshotPart)
        reporter.publish(fails, None)
        eventually(lambda: reading.hello().epoch == f"{1:016x}")
        # The refusal follows as soon as there is room, and the next request is answered.
        while isinstance(reply := slow.reply(), SnapshotPart):
            assert not reply.last
        assert reply == Refused(1, ANY, 1.0)
        slow.send(SnapshotRequest(2))
        reply = slow.reply()
        assert isinstance(reply, SnapshotPart)
        assert (reply.epoch, reply.last, reply.places) == (f"{1:016x}", True, [])


def test_many_hellos_in_a_row_are_all_answered(context: Context, made: Callable[..., Reporter]) -> None:
    reporter = made(reply_hwm=2)
    with Peer(context, reporter) as peer:
        for number in range(500):
            peer.hello(number)


@pytest.mark.usefixtures("small_parts")
def test_a_reply_waits_for_room_but_not_forever(context: Context, made: Callable[..., Reporter]) -> None:
    clock = Clock()
    reporter = made(requests="inproc://requests", reply_hwm=2, clock=clock, snapshot_timeout_s=10.0)
    with Peer(context, reporter, hwm=1) as slow, Peer(context, reporter) as reading:
        filled(reporter, reading, 400)
        slow.send(SnapshotRequest(1))
        assert isinstance(slow.reply(), SnapshotPart)
        slow.send(HelloRequest(2))
        # This hello is answered after the slow client's request, so the reporter has read that request.
        reading.hello()
        replies = [slow.reply() for _ in range(101)]
        (hello,) = (reply for reply in replies if isinstance(reply, Hello))
        assert hello.id == 2
        # The client requests once more, and now it never reads.
        slow.send(SnapshotRequest(3))
        assert isinstance(slow.reply(), SnapshotPart)

        def unsent() -> int:
            """Return the number of unsent replies after one more request."""
            slow.send(HelloRequest(4))
            reading.hello()
            return reporter.counters.replies_unsent

        eventually(lambda: unsent() == 10)
        clock.now_s += 10.5
        reading.hello()
        eventually(lambda: reporter.counters.replies_unsent == 10 + MAX_UNSENT)
        assert reporter.counters.snapshots_abandoned == 1


@pytest.mark.parametrize(
    ("payload", "request_id"),
    [
        ({"type": "later", "id": 7}, 7),
        ({"type": "hello", "id": 8, "new": [1]}, None),
        ({"type": "x" * 1_000, "id": 0}, 0),
        ({"type": "hello", "id": "a"}, -1),
        ({"id": 3}, -1),
        ([], -1),
        (b"", -1),
        (7, -1),
    ],
)
def test_unreadable_requests_are_refused_where_their_id_is_legible(
    context: Context, made: Callable[..., Reporter], payload: object, request_id: int | None
) -> None:
    reporter = made()
    with Peer(context, reporter) as peer:
        peer.send(payload)
        if request_id is None:
            # Unknown fields are skipped.
            assert isinstance(peer.reply(), Hello)
        elif request_id >= 0:
            reply = peer.reply()
            assert isinstance(reply, Refused) and reply == Refused(request_id, ANY)
            assert len(reply.reason) < 200
        peer.hello()
        assert reporter.counters.bad_requests == (0 if request_id is None else 1)


@pytest.mark.parametrize(
    "frames", [[b"x"], [b"x", b"y"], [b"", b"\xc1"], [b"", b"", b""], [b""], [b"", b"\x91" * 3_000]]
)
def test_garbage_is_counted_and_ignored(context: Context, made: Callable[..., Reporter], frames: list[bytes]) -> None:
    reporter = made()
    with Peer(context, reporter) as peer:
        peer.ask.send_multipart(frames)
        peer.hello()
    assert reporter.counters.bad_requests == 1


def test_a_client_that_sends_too_much_is_cut_off(context: Context, made: Callable[..., Reporter]) -> None:
    reporter = made()
    with Peer(context, reporter) as huge, Peer(context, reporter) as peer:
        monitor = huge.ask.get_monitor_socket(zmq.Event.DISCONNECTED)
        monitor.setsockopt(zmq.RCVTIMEO, 10_000)
        huge.ask.send_multipart([b"", b"x" * (MAX_MESSAGE_BYTES + 1)])
        monitor.recv_multipart()
        huge.ask.disable_monitor()
        monitor.close()
        peer.hello()
    assert reporter.counters.bad_requests == 0
