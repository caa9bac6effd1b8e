# SPDX-License-Identifier: Apache-2.0
"""The fleet's events: each subscriber gets each wanted event once and in order, or hears how many it has missed."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import numpy as np
import pytest

from kvrouter.contract.fleet_event import EventType, FleetEvent
from kvrouter.router.base.common.errors import BadQuestion
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.base.telemetry.metric_registry import MetricRegistry
from kvrouter.router.follow.feed import event_feed
from kvrouter.router.follow.feed.backlog import PIECE_BYTES, Chunk
from kvrouter.router.follow.feed.event_feed import EventFeed
from kvrouter.router.follow.feed.event_ring import EVENT_BYTES, EventRing
from kvrouter.router.follow.feed.fleet_event import EventFilter
from kvrouter.router.follow.feed.watch_metrics import WatchMetrics
from kvrouter.router.serve.api.events import _Subscriber, filter_of
from tests.support.bare_services import bare_feed

W0, W1 = WorkerKey("m", "w0"), WorkerKey("m", "w1", 1)
ALL = EventFilter()


class Reader:
    """Client whose `unread_bytes` the test sets."""

    def __init__(self) -> None:
        self.received = b""
        self.unread_bytes = 0
        self.ended = False

    def send(self, chunk: Chunk) -> None:
        self.received += chunk.data

    def end(self, comment: bytes) -> None:
        self.received += comment
        self.ended = True

    @property
    def blocks(self) -> list[dict[str, str]]:
        """Parsed fields of each block; a comment has the empty name."""
        parsed = (
            dict(line.split(": ", 1) for line in part.splitlines()) for part in self.received.decode().split("\n\n")
        )
        return [block for block in parsed if block]

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(block["data"]) for block in self.blocks if "data" in block]

    @property
    def last_id(self) -> str:
        return [block["id"] for block in self.blocks if "id" in block][-1]


def feed(now: float = 7.0) -> EventFeed:
    return bare_feed(lambda: now)


def store(feed: EventFeed, worker: WorkerKey = W0, *hashes: int) -> None:
    blocks = np.array(hashes or (1, 2), np.uint64)
    feed.of_worker(EventType.STORED, worker, blocks, group_idx=0, medium="GPU", blocks=len(blocks))


def event(number: int) -> FleetEvent:
    return FleetEvent(EventType.GAP, float(number), count=number)


async def test_a_subscriber_gets_what_it_wants_from_now_on_and_hashes_only_where_wanted() -> None:
    source, every, some = feed(), Reader(), Reader()
    store(source)
    source.subscribe(ALL, every, None)
    source.subscribe(EventFilter(workers=frozenset({"w1"}), with_hashes=True), some, None)
    store(source, W0)
    store(source, W1, 3, 2**64 - 1)
    source.close()
    first, second = every.events
    assert first == {
        "type": "stored", "time_s": 7.0, "model": "m", "worker_id": "w0", "dp_rank": 0, "group_idx": 0, "medium": "GPU",
        "blocks": 2,
    }  # fmt: skip
    assert second["worker_id"] == "w1" and "block_hashes" not in second
    assert [event["block_hashes"] for event in some.events] == [["0000000000000003", "f" * 16]]
    assert every.ended and some.ended and "shutting down" in every.received.decode()


async def test_events_are_sent_without_anybody_asking_for_them() -> None:
    source, reader = feed(), Reader()
    source.subscribe(ALL, reader, None)
    store(source)
    async with asyncio.timeout(10):
        while not reader.events:
            await asyncio.sleep(0.005)
    source.close()


async def test_a_quiet_subscriber_is_pinged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_feed, "PING_S", 0.01)
    source, reader = feed(), Reader()
    source.subscribe(ALL, reader, None)
    async with asyncio.timeout(10):
        while b": ping" not in reader.received:
            await asyncio.sleep(0.005)
    source.close()


@pytest.mark.parametrize("seed", range(20))
async def test_a_returning_subscriber_gets_missed_events_once_and_the_number_lost(seed: int) -> None:
    """Law: after any interruptions, the received events and those reported as lost are all events, in order."""
    rng, source = random.Random(seed), feed()
    source._ring = EventRing(EVENT_BYTES * 5)
    numbers: list[int] = []
    lost, published, last_id = 0, 0, None
    for _ in range(40):
        reader = Reader()
        source.subscribe(ALL, reader, last_id)
        for _ in range(rng.randrange(4)):
            published += 1
            source.publish(event(published))
        source._flush()
        source.unsubscribe(ALL, reader)
        for item in reader.events:
            if item["type"] == "lost":
                assert item["count"] > 0
                lost += item["count"]
                numbers += [0] * item["count"]
            else:
                numbers.append(item["count"])
        last_id = reader.last_id
        for _ in range(rng.randrange(9)):
            published += 1
            source.publish(event(published))
    source.subscribe(ALL, reader := Reader(), last_id)
    tail = [item["count"] for item in reader.events if item["type"] == "gap"]
    lost += sum(item["count"] for item in reader.events if item["type"] == "lost")
    received = [number for number in numbers if number] + tail
    assert received == sorted(set(received)) and len(received) + lost == published and received[-1] == published
    assert lost
    source.close()


async def test_hashes_are_kept_from_the_first_client_on_that_wants_them() -> None:
    source, hashes = feed(), np.array([7], np.uint64)
    source.subscribe(ALL, reader := Reader(), None)
    for number in (1, 2):
        source.publish(event(number), hashes)
    source._flush()
    assert [kept.hashes for kept in source._ring.since(0)[0]] == [None, None]
    last_id = reader.last_id
    # A client that comes back and wants hashes now learns that it missed what has none.
    source.publish(event(3), hashes)
    source.subscribe(EventFilter(with_hashes=True), later := Reader(), last_id)
    source.publish(event(4), hashes)
    source._flush()
    assert [(item["type"], item["count"]) for item in later.events] == [("lost", 1), ("gap", 4)]
    assert [item.get("block_hashes") for item in later.events] == [None, [f"{7:016x}"]]
    source.subscribe(EventFilter(with_hashes=True), again := Reader(), later.last_id)
    assert not again.events
    source.close()


@pytest.mark.parametrize(
    "last_id", ["other-1", "life-99", "life--1", "life-x", "", "x" * 10_000, "life-\xff", "life-٣"]
)
async def test_an_unknown_last_id_is_answered_with_a_loss(last_id: str) -> None:
    source, reader = feed(), Reader()
    store(source)
    source.subscribe(ALL, reader, last_id)
    store(source)
    source._flush()
    assert [item["type"] for item in reader.events] == ["lost", "stored"]
    source.close()


async def test_a_client_that_does_not_read_is_cut_and_others_are_not() -> None:
    metrics = WatchMetrics(MetricRegistry())
    source, slow, quick = bare_feed(lambda: 1.0, metrics), Reader(), Reader()
    source.subscribe(ALL, slow, None)
    source.subscribe(ALL, quick, None)
    slow.unread_bytes = event_feed.MAX_UNREAD_BYTES + 1
    store(source)
    source._flush()
    store(source)
    source._flush()
    assert slow.ended and not slow.events and "too slowly" in slow.received.decode()
    assert not quick.ended and len(quick.events) == 2 and source.subscribers == 1
    assert metrics.subscribers_cut.labels().value == 1
    source.close()


async def test_text_that_is_no_utf_8_is_shown_with_marks_and_takes_no_other_event_with_it() -> None:
    source, reader = feed(), Reader()
    source.subscribe(ALL, reader, None)
    source.of_worker(EventType.EPOCH, W0, epoch="a\ud800b")
    store(source)
    source._flush()
    assert [item.get("epoch") for item in reader.events] == ["a?b", None]
    source.subscribe(ALL, again := Reader(), "life-0")
    assert again.events == reader.events
    source.close()


async def test_the_number_of_clients_is_bounded_and_none_is_taken_after_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(event_feed, "MAX_SUBSCRIBERS", 1)
    source = feed()
    assert source.refusal is None
    source.subscribe(ALL, Reader(), None)
    assert source.refusal is not None and "1 clients" in source.refusal
    source.close()
    assert source.refusal == event_feed.STOPPING and not source.subscribers


def test_the_ring_keeps_the_newest_within_its_bytes() -> None:
    ring = EventRing(EVENT_BYTES * 3)
    for number in range(1, 11):
        assert ring.add(event(number)).number == number
    events, missed = ring.since(4)
    assert [entry.number for entry in events] == [8, 9, 10] and missed == 3
    assert ring.since(9) == ([events[-1]], 0) and ring.since(10) == ([], 0)
    ring.add(event(11), np.zeros(EVENT_BYTES, np.uint64))
    assert ring.since(0) == ([], 11)
    for number in (-1, 12):
        with pytest.raises(ValueError, match="not one of"):
            ring.since(number)


def test_filters_are_read_from_the_query() -> None:
    assert filter_of(b"/events") == ALL
    event_filter = filter_of(b"/events?worker=w0&worker=a%2Cb&model=m&type=stored,removed&type=gap&hashes=true")
    assert event_filter.workers == {"w0", "a,b"} and event_filter.models == {"m"} and event_filter.with_hashes
    assert event_filter.types == {EventType.STORED, EventType.REMOVED, EventType.GAP, EventType.LOST}


@pytest.mark.parametrize(
    ("query", "problem"),
    [
        (b"type=stored,born", "'born'|born is no event"),
        (b"type=", "is no event"),
        (b"kind=x", "kind is not known"),
        (b"hashes=maybe", "neither true nor false"),
    ],
)
def test_an_invalid_filter_is_refused(query: bytes, problem: str) -> None:
    with pytest.raises(BadQuestion, match=problem):
        filter_of(b"/events?" + query)


# Bytes that clients do not read


class Connection:
    """Connection of a client that takes `room` bytes and then is full, with the interface of ProxiedAnswer."""

    def __init__(self, room: int = 0) -> None:
        self.room = room
        self.taken = b""
        self.is_whole: bool | None = None
        self.source: _Subscriber | None = None

    @property
    def unread_bytes(self) -> int:
        return max(0, len(self.taken) - self.room)

    def send(self, parts: list[bytes]) -> None:
        self.taken += b"".join(parts)
        if self.unread_bytes > PIECE_BYTES and self.source is not None:
            self.source.pause()

    def finish(self) -> None:
        self.is_whole = True

    def break_off(self) -> None:
        self.is_whole = False


def connected(source: EventFeed, room: int = 0, wanted: EventFilter = ALL) -> tuple[_Subscriber, Connection]:
    connection = Connection(room)
    connection.source = _Subscriber(connection, source.held)  # type: ignore[arg-type]
    source.subscribe(wanted, connection.source, None)
    return connection.source, connection


MANY = range(1, 40_001)


async def test_clients_that_read_nothing_share_what_they_do_not_read() -> None:
    source = feed()
    wanted = EventFilter(with_hashes=True)
    clients = [connected(source, wanted=wanted) for _ in range(20)]
    for _ in range(20):
        store(source, W0, *MANY)
        source._flush()
    unread = [client.unread_bytes for client, _ in clients]
    assert min(unread) == max(unread) > 10 * 1024**2
    # Each connection has a piece or two of its own, and all other bytes exist only once.
    assert all(connection.unread_bytes <= 3 * PIECE_BYTES for _, connection in clients)
    assert source.held.size_bytes <= max(unread)
    source.close()
    assert source.held.size_bytes == 0


@pytest.mark.parametrize("seed", range(5))
async def test_the_slowest_clients_are_cut_first_within_the_budget(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law: clients hold no more than the budget, and no client is cut before one that has more unread bytes.

    This holds for all filters and speeds of clients.
    """
    budget = 4 * 1024**2
    monkeypatch.setattr(event_feed, "MAX_HELD_BYTES", budget)
    rng, source = random.Random(seed), feed()
    # Give each client its own filter, so that no client shares bytes with another.
    wanted = [EventFilter(workers=frozenset({f"w{number}"}), with_hashes=True) for number in range(8)]
    clients = [connected(source, wanted=event_filter) for event_filter in wanted]
    cut: list[int] = []
    for _ in range(60):
        number = rng.randrange(8)
        store(source, WorkerKey("m", f"w{number}"), *range(1, rng.randrange(2, 40_000)))
        unread_before = [client.unread_bytes for client, _ in clients]
        source._flush()
        assert source.held.size_bytes <= budget
        newly_cut = [n for n, (client, _) in enumerate(clients) if client.ended.is_set() and n not in cut]
        for n in newly_cut:
            other_unread = [unread_before[k] for k in range(8) if k not in cut and k not in newly_cut]
            # Client `number` has just got more bytes, by one event at most.
            assert n == number or unread_before[n] >= max(other_unread, default=0)
        cut += newly_cut
    assert cut and len(cut) < 8
    source.close()


@pytest.mark.parametrize("seed", range(20))
async def test_a_slow_reader_gets_whole_events_in_order(seed: int) -> None:
    """Law: a client that takes any number of bytes at a time gets the events in order.

    If a client is cut in the middle of an event, its answer breaks off there.
    """
    rng, source = random.Random(seed), feed()
    subscriber, connection = connected(source, wanted=EventFilter(with_hashes=True))
    sizes = [rng.choice((1, 100, 20_000)) for _ in range(12)]
    for size in sizes:
        store(source, W0, *range(1, size + 1))
        source._flush()
        connection.room += rng.randrange(200_000)
        subscriber.resume()
    if seed % 2:
        while subscriber.unread_bytes:
            connection.room += rng.randrange(300_000)
            subscriber.resume()
    is_behind = subscriber.unread_bytes > connection.unread_bytes
    source.close()
    subscriber.finish()
    reader = Reader()
    reader.received = connection.taken if connection.is_whole else connection.taken[: connection.taken.rfind(b"\n\n")]
    assert [item["blocks"] for item in reader.events] == sizes[: len(reader.events)]
    if not is_behind:
        assert connection.is_whole and len(reader.events) == len(sizes)
    assert source.held.size_bytes == 0
