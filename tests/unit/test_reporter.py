# SPDX-License-Identifier: Apache-2.0
"""Messages of the reporter, over real sockets: order, heartbeats, catalogs and drops."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Callable

import msgspec
import pytest
import zmq

from kvrouter.engine_patch.reporter.counters import SUMMARY_S, CounterLog, Counters
from kvrouter.engine_patch.reporter.ledger import Scope
from kvrouter.engine_patch.reporter.reporter import Reporter
from kvrouter.events.patch.messages import (
    CatalogMessage,
    Events,
    Heartbeat,
    PlaceSummary,
    ReportCleared,
    ReportEvent,
    ReportStored,
    unpack_hashes,
)
from tests.support.report_peer import (
    CATALOG,
    Copies,
    Peer,
    Plug,
    apply,
    copies_of,
    eventually,
    fails,
    removed,
    said,
    stored,
    summed,
)

Context = zmq.Context[zmq.Socket[bytes]]
Join = Callable[..., tuple[Reporter, Peer, int]]


def hashes_of(message: Events) -> list[list[int]]:
    return [
        [] if isinstance(event, ReportCleared) else unpack_hashes(event.hashes).tolist() for event in message.events
    ]


def test_messages_come_in_order_with_their_seqs(joined: Join) -> None:
    reporter, peer, seq = joined(dp_rank=3, wall_clock=lambda: 1234.5)
    reporter.publish(said(stored([1], kind="mamba"), ReportCleared("CPU", "sleep")), 77)
    reporter.publish(said(removed([1])), None)
    first_seq, first = peer.next_events()
    second_seq, second = peer.next_events()
    assert (first_seq, second_seq) == (seq, seq + 1)
    assert (first.epoch, first.started_s, first.ts, first.dp_rank) == (f"{0:016x}", 1234.5, 1234.5, 3)
    assert (first.batch_seq, second.batch_seq, first.dropped) == (77, None, 0)
    assert isinstance(first.events[0], ReportStored)
    assert first.events[0].kind == "mamba"
    assert first.events[1] == ReportCleared("CPU", "sleep")
    assert hashes_of(second) == [[1]]


def test_a_message_without_events_is_sent_only_for_its_batch_seq(joined: Join) -> None:
    reporter, peer, seq = joined()
    reporter.publish(said(), None)
    reporter.publish(said(), 5)
    at, message = peer.next_events()
    assert (at, message.batch_seq, message.events) == (seq, 5, [])


def test_every_message_wakes_the_sleeping_thread(joined: Join) -> None:
    reporter, peer, _ = joined()
    for number in range(300):
        reporter.publish(said(stored([number])), None)
        assert hashes_of(peer.next_events()[1]) == [[number]]


def test_an_idle_reporter_sends_heartbeats(joined: Join) -> None:
    reporter, peer, seq = joined(heartbeat_s=0.01)
    reporter.publish(said(stored([2**64 - 1, 5, 5])), None)
    peer.next_events()
    beats = [peer.next_heartbeat() for _ in range(3)]
    for at, beat in beats:
        assert at == seq + 1
        assert beat.places == [PlaceSummary(0, "GPU", 2, 3, 4)]
        assert (beat.interval_s, beat.catalog_version, beat.dropped, beat.untracked) == (0.01, 0, 0, [])


def test_heartbeats_do_not_wait_for_a_flood_to_end(joined: Join) -> None:
    ticks = itertools.count()
    # Each look at the clock moves it by a second.
    reporter, peer, seq = joined(clock=lambda: float(next(ticks)), heartbeat_s=1.0)
    plug = Plug(reporter)
    for number in range(200):
        reporter.publish(said(stored([number])), None)
    plug.pull()
    beats, last = 0, seq - 1
    while last < seq + 199:
        at, message = peer.next()
        if isinstance(message, Events):
            last = at
        elif isinstance(message, Heartbeat):
            # A heartbeat sums up exactly the messages that were sent before it.
            assert at == last + 1
            assert sum(place.blocks for place in message.places) == at - seq
            beats += 1
    assert beats >= 100


def test_a_heartbeat_sums_up_all_messages_before_it(joined: Join) -> None:
    reporter, peer, expected = joined(heartbeat_s=0.001)
    copies: Copies = Counter()
    for number in range(500):
        events: list[ReportEvent] = [
            stored([number, number + 1, number % 7], group_idx=number % 3),
            removed([number // 2], group_idx=number % 3),
        ]
        reporter.publish(said(*events), number)
    proofs = 0
    while expected < peer.hello().next_seq or not proofs:
        at, message = peer.next()
        assert at == expected
        if isinstance(message, Events):
            apply(copies, message.events)
            expected += 1
        elif isinstance(message, Heartbeat):
            assert {(p.group_idx, p.medium, None): (p.blocks, p.copies, p.digest) for p in message.places} == summed(
                copies
            )
            proofs += 1


def test_the_catalog_is_sent_once_for_each_change(joined: Join) -> None:
    reporter, peer, seq = joined()
    assert peer.hello().catalog is None
    reporter.declare(CATALOG)
    at, message = peer.next()
    assert at == seq
    assert isinstance(message, CatalogMessage)
    assert (message.version, message.catalog) == (1, CATALOG)
    reporter.declare(msgspec.structs.replace(CATALOG))
    assert peer.hello().catalog_version == 1
    reporter.publish(said(stored([1])), None)
    assert isinstance(peer.next()[1], Events)
    other_catalog = msgspec.structs.replace(CATALOG, lora_paths={"a": "/b"})
    reporter.declare(other_catalog)
    at, message = peer.next()
    assert isinstance(message, CatalogMessage)
    assert (at, message.version, message.catalog) == (seq + 1, 2, other_catalog)
    hello = peer.hello()
    assert (hello.catalog_version, hello.catalog) == (2, other_catalog)


def test_a_full_queue_drops_messages_but_not_what_they_change(joined: Join) -> None:
    reporter, peer, seq = joined(max_queue_size=2)
    plug = Plug(reporter)
    calls: list[int] = []
    for number in range(5):

        def make(number: int = number) -> list[ReportEvent]:
            calls.append(number)
            return [stored([number], runs=[(16, 1)], kind="x", ownership="a"), removed([0], ownership="a")]

        reporter.publish(make, number)
    # The reporter read the dropped messages at once, in this thread, but not the queued ones.
    assert calls == [2, 3, 4]
    plug.pull()
    eventually(lambda: peer.hello().next_seq == seq + 5)
    reporter.publish(said(stored([9])), 9)
    messages = [peer.next_events() for _ in range(3)]
    assert [(at - seq, message.batch_seq, message.dropped) for at, message in messages] == [
        (0, 0, 0),
        (1, 1, 0),
        (5, 9, 3),
    ]
    assert summed(copies_of(peer.snapshot())) == {(0, "GPU", "a"): (4, 4, 10), (0, "GPU", None): (1, 1, 9)}
    assert (reporter.counters.dropped, reporter.counters.failed, reporter.counters.epochs_lost) == (3, 0, 0)
    # The next message has no gap before it.
    reporter.publish(said(), 10)
    assert peer.next_events()[1].dropped == 0


def test_heartbeats_count_what_was_dropped(joined: Join) -> None:
    reporter, peer, _ = joined(max_queue_size=1, heartbeat_s=0.01)
    plug = Plug(reporter)
    for number in range(4):
        reporter.publish(said(stored([number])), number)
    plug.pull()
    while (beat := peer.next_heartbeat()[1]).dropped < 3:
        pass
    assert beat.dropped == 3
    assert beat.places == [PlaceSummary(0, "GPU", 4, 4, 6)]


def test_a_backlog_beyond_its_bound_begins_a_new_epoch(context: Context, made: Callable[..., Reporter]) -> None:
    reporter = made(max_queue_size=1, max_dropped_bytes=4_000)
    reporter.declare(CATALOG)
    with Peer(context, reporter) as peer:
        peer.joined(reporter)
        reporter.publish(said(stored([1])), None)
        peer.next_events()
        plug = Plug(reporter)
        for number in range(40):
            reporter.publish(said(stored(range(100 * number, 100 * number + 100))), None)
        plug.pull()
        eventually(lambda: peer.hello().epoch != f"{0:016x}")
        reporter.publish(said(stored([9])), None)
        messages = []
        while True:
            _, message = peer.next()
            messages.append((message.epoch, type(message)))
            if isinstance(message, Events) and hashes_of(message) == [[9]]:
                break
        # The new life reports its blocks, of which there are none, and its catalog.
        assert (message.epoch, CatalogMessage) in messages
        assert (message.epoch, Heartbeat) in messages
        assert message.epoch == peer.hello().epoch
        # Only the blocks after the loss are resident, and readers get no others.
        copies = copies_of(peer.snapshot())
        assert 1 not in {key[3] for key in copies}
        assert copies[0, "GPU", None, 9] == 1
        # Three messages were sent (joining took two or more), but 40 messages and the plug were not.
        assert (reporter.counters.dropped, reporter.counters.epochs_lost) == (40, 1)
        assert reporter.counters.failed == 0


@pytest.mark.parametrize("full", [False, True])
def test_events_that_cannot_be_read_begin_a_new_epoch(joined: Join, full: bool) -> None:
    reporter, peer, _ = joined(max_queue_size=1 if full else 100)
    plug = Plug(reporter)
    reporter.publish(said(stored([1])), None)
    reporter.publish(fails, None)
    plug.pull()
    eventually(lambda: reporter.counters.epochs_lost == 1)
    reporter.publish(said(removed([1]), stored([2])), None)
    at, message = peer.next_events()
    assert (message.epoch, hashes_of(message)) == (f"{0:016x}", [[1]])
    at, message = peer.next_events()
    assert (at, message.epoch, message.dropped) == (0, f"{1:016x}", 0)
    assert summed(copies_of(peer.snapshot())) == {(0, "GPU", None): (1, 1, 2)}
    assert (reporter.counters.failed, reporter.counters.dropped) == (1, 1)


def test_the_engines_log_shows_the_counters_once_harm_grew(caplog: pytest.LogCaptureFixture) -> None:
    counters = Counters(sent=3, heartbeats=2)
    lines = CounterLog(counters, logging.getLogger("reporter"))
    counters.heartbeats += 1
    lines.write(1.0)
    assert not caplog.messages
    counters.dropped += 40
    lines.write(2.0)
    counters.clients_refused += 1
    lines.write(2.0 + SUMMARY_S / 2)
    (line,) = caplog.messages
    assert all(f"{name}: {value}" in line for name, value in {"sent": 3, "dropped": 40, "heartbeats": 3}.items())
    # A change since then is not forgotten.
    lines.write(2.0 + SUMMARY_S)
    assert "clients_refused: 1" in caplog.messages[1]
    lines.write(2.0 + 2 * SUMMARY_S)
    assert len(caplog.messages) == 2


def test_a_reporter_writes_its_counters_after_a_loss(joined: Join, caplog: pytest.LogCaptureFixture) -> None:
    reporter, _, _ = joined()
    reporter.publish(fails, None)
    eventually(lambda: any("counters of the reporter" in line and "failed: 1" in line for line in caplog.messages))


def test_damaged_events_begin_a_new_epoch(joined: Join) -> None:
    reporter, peer, _ = joined()
    reporter.publish(said(stored([1]), ReportStored(b"123", 0, "GPU")), None)
    eventually(lambda: peer.hello().epoch == f"{1:016x}")
    assert copies_of(peer.snapshot()) == {}


def test_a_message_that_cannot_be_encoded_is_a_gap_but_is_counted(joined: Join) -> None:
    reporter, peer, seq = joined()
    reporter.publish(said(stored([1], kind=object())), None)
    reporter.publish(said(), 1)
    at, message = peer.next_events()
    assert (at, message.dropped, message.epoch) == (seq + 1, 1, f"{0:016x}")
    assert summed(copies_of(peer.snapshot())) == {(0, "GPU", None): (1, 1, 1)}


def test_a_medium_that_outgrows_the_ledger_is_cleared_for_readers(joined: Join) -> None:
    reporter, peer, _ = joined(max_ledger_blocks=3, heartbeat_s=0.01)
    reporter.publish(said(stored([1])), None)
    reporter.publish(said(stored([1, 2, 3], "FS")), None)
    peer.next_events()
    _, message = peer.next_events()
    assert message.events[1] == ReportCleared("FS", "untracked")
    while True:
        _, beat = peer.next_heartbeat()
        if beat.untracked:
            break
    assert beat.untracked == ["FS"]
    assert [place.medium for place in beat.places] == ["GPU"]


def test_withheld_media_are_cleared_for_good(joined: Join) -> None:
    """Withhold media for good: heartbeats give the reason, in later lives of the publisher too."""
    reporter, peer, seq = joined()
    reporter.publish(said(stored([1]), stored([2], "CPU"), stored([3], "FS", ownership="a")), None)
    peer.next_events()
    reporter.withhold(Scope.TIERS, "a tier failed")
    at, message = peer.next_events()
    assert at == seq + 1
    assert message.events == [ReportCleared("CPU", "a tier failed"), ReportCleared("FS", "a tier failed")]
    at, beat = peer.next_heartbeat()
    while not beat.tiers_withheld:
        at, beat = peer.next_heartbeat()
    assert (at, beat.withheld, beat.tiers_withheld) == (seq + 2, "", "a tier failed")
    assert [place.medium for place in beat.places] == ["GPU"]
    reporter.publish(said(stored([4]), stored([5], "CPU")), None)
    assert [event.medium for event in peer.next_events()[1].events] == ["GPU"]
    reporter.withhold(Scope.EVERYTHING, "all failed")
    reporter.withhold(Scope.TIERS, "said already")
    assert peer.next_events()[1].events == [ReportCleared("GPU", "all failed")]
    # Publishing fails, which begins another life.
    reporter.publish(fails, None)
    eventually(lambda: peer.hello().epoch == f"{1:016x}")
    reporter.publish(said(stored([6]), stored([7], "CPU")), 9)
    at, beat = peer.next_heartbeat()
    while beat.epoch != f"{1:016x}":
        at, beat = peer.next_heartbeat()
    assert (beat.places, beat.withheld, beat.tiers_withheld) == ([], "all failed", "a tier failed")
    assert peer.next_events()[1].events == []
    assert peer.hello().withheld == "all failed" and not copies_of(peer.snapshot())


def test_a_subscriber_that_does_not_read_blocks_nobody(context: Context, made: Callable[..., Reporter]) -> None:
    reporter = made(report_hwm=2)
    with Peer(context, reporter, hwm=1), Peer(context, reporter) as reading:
        first = reading.joined(reporter)
        for number in range(2_000):
            reporter.publish(said(stored(range(number, number + 200))), number)
        eventually(lambda: reading.hello().next_seq == first + 2_000)
        assert reporter.counters.dropped == 0


def test_a_message_carries_the_time_of_its_publication(joined: Join) -> None:
    now = [100.0]
    reporter, peer, _ = joined(wall_clock=lambda: now[0])
    plug = Plug(reporter)
    now[0] = 200.0
    reporter.publish(said(stored([1])), None)
    now[0] = 300.0
    plug.pull()
    assert peer.next_events()[1].ts == 200.0
