# SPDX-License-Identifier: Apache-2.0
"""Bound on the bytes that a connection brings before they are read, against a model of ZMQ's buffers."""

from __future__ import annotations

import asyncio
import random
import socket
import threading
import time

import pytest
import zmq

from kvrouter.events.transport import flood_watch
from kvrouter.events.transport.curve import CurveClient
from kvrouter.events.transport.flood_watch import (
    MAX_GROWTH_BYTES,
    MIB,
    RISE_BYTES,
    SLACK_BYTES,
    SMALL_BYTES,
    FloodWatch,
    Inflow,
    InflowLimits,
    received_bytes,
)
from kvrouter.events.transport.link import MAX_FRAMES, Link
from kvrouter.events.transport.settings import LinkSettings

LIMITS = InflowLimits(max_message_bytes=64 * MIB, max_unread_bytes=256 * MIB)
# Bytes of framing and encryption of a frame.
OVERHEAD = 42


def test_an_honest_connection_is_never_a_flood() -> None:
    """Law: an honest connection is never a flood, whenever the watch looks at it.

    Its messages are within the limit, and its unread messages within theirs. Pings and any growth of the process are no
    problem.
    """
    rng = random.Random(1)
    for _ in range(200):
        inflow = Inflow(LIMITS, delivered_bytes := rng.randrange(10**10))
        received, resident = rng.randrange(300), rng.randrange(10**9)
        waiting: list[int] = []
        for _ in range(50):
            size = rng.choice((20, 100_000, 60 * MIB))
            part = rng.randrange(size)
            # Look in the middle of a message, while no other message waits.
            is_read = not waiting
            if inflow.count(received + part, delivered_bytes, resident, is_read=is_read):
                assert inflow.problem(resident, has_message=bool(waiting)) == ""
            received += size + OVERHEAD + rng.randrange(100)
            waiting.append(size)
            if sum(waiting) > 100 * MIB or rng.random() < 0.7:
                delivered_bytes += sum(waiting)
                waiting.clear()
                resident += rng.randrange(500 * MIB)
                inflow.count(received, delivered_bytes, resident, is_read=True)


def test_an_endless_message_is_a_flood() -> None:
    rng = random.Random(2)
    for _ in range(200):
        delivered = rng.randrange(10**10)
        inflow = Inflow(LIMITS, delivered)
        received = rng.randrange(300)
        for _ in range(rng.randrange(5)):
            size = rng.randrange(MIB)
            received, delivered = received + size + OVERHEAD, delivered + size
            inflow.count(received, delivered, 0, is_read=True)
        brought = 0
        while brought <= LIMITS.max_message_bytes + SLACK_BYTES:
            assert not inflow.problem(0, has_message=False)
            brought += rng.randrange(20 * MIB)
            inflow.count(received + brought, delivered, 0, is_read=True)
        assert "without the end of a message" in inflow.problem(0, has_message=False)


def test_many_small_frames_are_found_by_the_memory_of_the_process() -> None:
    inflow = Inflow(LIMITS)
    for resident in (0, 10**9):
        # The process took this memory while almost no bytes came, so it is not this connection's.
        assert not inflow.count(SMALL_BYTES, 0, resident, is_read=True)
    assert inflow.count(SMALL_BYTES + 1, 0, 10**9 + MAX_GROWTH_BYTES, is_read=True)
    assert inflow.problem(10**9 + MAX_GROWTH_BYTES, has_message=False) == ""
    assert "of many frames does not end" in inflow.problem(10**9 + MAX_GROWTH_BYTES + 1, has_message=False)
    # A whole message waits, so the reader is slow and the connection is no flood.
    assert inflow.problem(10**9 + MAX_GROWTH_BYTES + 1, has_message=True) == ""


def test_messages_that_come_faster_than_they_are_read_are_a_flood_beyond_their_bound() -> None:
    inflow = Inflow(LIMITS)
    inflow.count(LIMITS.max_unread_bytes, 0, 0, is_read=False)
    assert inflow.problem(0, has_message=True) == ""
    inflow.count(LIMITS.max_unread_bytes + 1, 0, 0, is_read=False)
    assert "faster than they could be read" in inflow.problem(0, has_message=True)


class Looked:
    def __init__(self) -> None:
        self.looks: list[int] = []

    def look(self, resident_bytes: int) -> None:
        self.looks.append(resident_bytes)


async def test_connections_are_looked_at_as_soon_as_memory_rises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flood_watch, "LOOK_S", 0.001)
    monkeypatch.setattr(flood_watch, "FULL_LOOK_S", 3_600.0)
    memory = [5 * RISE_BYTES]
    watch, link = FloodWatch(lambda: memory[0]), Looked()
    watch.add(link)

    async def until(count: int) -> None:
        async with asyncio.timeout(20):
            while len(link.looks) < count:
                await asyncio.sleep(0.001)

    # The first look covers all connections.
    await until(1)
    memory[0] -= 2 * RISE_BYTES
    for _ in range(20):
        await asyncio.sleep(0.001)
    assert len(link.looks) == 1
    memory[0] += RISE_BYTES
    await until(2)
    assert link.looks == [5 * RISE_BYTES, 4 * RISE_BYTES]
    watch.discard(link)
    watch.discard(link)
    assert watch._timer is None


async def test_looks_come_when_the_pauses_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flood_watch, "FULL_LOOK_S", 0.0)
    asked: list[float] = []

    def pause_s(period_s: float) -> float:
        asked.append(period_s)
        return 0.001 if len(asked) < 4 else 3_600.0

    watch, link = FloodWatch(lambda: 0, pause_s), Looked()
    watch.add(link)
    async with asyncio.timeout(20):
        while len(link.looks) < 3:
            await asyncio.sleep(0.001)
    watch.discard(link)
    assert asked == [flood_watch.LOOK_S] * 4


def test_the_memory_of_the_process_is_that_of_the_kernel() -> None:
    pages = int(flood_watch.STATM.read_text().split()[1])
    assert flood_watch.resident_bytes() == pytest.approx(pages * flood_watch.PAGE_BYTES, rel=0.1)


def test_the_kernel_counts_what_tcp_received_and_nothing_else() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as sender:
        receiver, _ = listener.accept()
        with receiver:
            sender.sendall(bytes(12_345))
            while (received_bytes(receiver) or 0) < 12_345:
                pass
            receiver.recv(5)
            assert received_bytes(receiver) == 12_345
    assert received_bytes(sender) is None
    first, second = socket.socketpair()
    with first, second:
        assert received_bytes(first) is None


class Followed:
    """Link to a publisher, with the floods that it reported."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, curve: CurveClient | None) -> None:
        self.floods: list[str] = []
        self.changed = asyncio.Event()
        self.link = Link(
            context,
            endpoint,
            LinkSettings(max_message_bytes=4 * MIB, max_unread_bytes=32 * MIB, reconnect_max_s=0.01),
            loop=asyncio.get_running_loop(),
            on_readable=self.changed.set,
            receive_hwm=1_000,
            topic=b"",
            curve=curve,
            on_flood=self.floods.append,
        )

    def __enter__(self) -> Followed:
        return self

    def __exit__(self, *_: object) -> None:
        self.link.close()

    async def next(self) -> list[bytes]:
        """Return the next message."""
        while True:
            frames = self.link.receive()
            if frames is not None:
                return frames
            self.link.take_news()
            self.changed.clear()
            if not self.link.readable():
                await self.changed.wait()


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "curve"])
@pytest.mark.parametrize(
    ("frames", "reason"),
    # The watch may look before or after the end of the large message arrives, and each case has its own reason.
    [([1] * (MAX_FRAMES + 1), f"more than {MAX_FRAMES} frames"), ([2 * MIB] * MAX_FRAMES, "a message|of messages")],
    ids=["frames", "bytes"],
)
async def test_a_message_over_the_bounds_costs_its_connection_and_the_next_is_read(
    encrypted: bool, frames: list[int], reason: str
) -> None:
    with zmq.Context[zmq.Socket[bytes]]() as context, context.socket(zmq.XPUB) as publisher:
        publisher.setsockopt(zmq.LINGER, 0)
        publisher.setsockopt(zmq.XPUB_VERBOSE, 1)
        curve = None
        if encrypted:
            public, secret = zmq.curve_keypair()
            publisher.setsockopt(zmq.CURVE_SERVER, 1)
            publisher.setsockopt(zmq.CURVE_SECRETKEY, secret)
            curve = CurveClient(public.decode())
        port = publisher.bind_to_random_port("tcp://127.0.0.1")
        with Followed(context, f"tcp://127.0.0.1:{port}", curve) as followed:

            async def subscribed() -> None:
                while not (publisher.poll(0) and publisher.recv().startswith(b"\1")):
                    followed.link.take_news()
                    await asyncio.sleep(0.001)

            async with asyncio.timeout(60):
                await subscribed()
                honest = [b"", bytes(8), bytes(3 * MIB)]
                publisher.send_multipart(honest)
                assert await followed.next() == honest
                publisher.send_multipart([bytes(size) for size in frames])
                reading = asyncio.ensure_future(followed.next())
                await subscribed()
                assert len(followed.floods) == 1 and "the connection was closed" in followed.floods[0]
                assert any(part in followed.floods[0] for part in reason.split("|"))
                publisher.send_multipart(honest)
                assert await reading == honest


def look_until(link: Link, calls: list[bool]) -> None:
    """Look until a callback runs.

    The event loop does not run meanwhile, so only the look can call back.
    """
    for _ in range(10_000):
        link.look(0)
        if calls:
            return
        time.sleep(0.001)


async def test_a_look_that_reads_news_wakes_the_reader() -> None:
    """Liveness: a look that reads the monitor before the loop does must wake the reader.

    A quiet publisher sends nothing else that would wake it.
    """
    with zmq.Context[zmq.Socket[bytes]]() as context, context.socket(zmq.XPUB) as publisher:
        publisher.setsockopt(zmq.LINGER, 0)
        port = publisher.bind_to_random_port("tcp://127.0.0.1")
        calls: list[bool] = []
        link = Link(
            context,
            f"tcp://127.0.0.1:{port}",
            LinkSettings(),
            loop=asyncio.get_running_loop(),
            on_readable=lambda: calls.append(True),
            receive_hwm=10,
            topic=b"",
        )
        try:
            assert publisher.poll(10_000) and publisher.recv() == b"\1"
            look_until(link, calls)
            assert calls and link.take_news() == [True]
        finally:
            link.close()


async def test_messages_that_nobody_reads_are_bounded_by_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flood_watch, "FULL_LOOK_S", 0.0)
    with zmq.Context[zmq.Socket[bytes]]() as context, context.socket(zmq.PUB) as publisher:
        publisher.setsockopt(zmq.LINGER, 0)
        publisher.setsockopt(zmq.XPUB_NODROP, 1)
        publisher.setsockopt(zmq.SNDHWM, 4)
        port = publisher.bind_to_random_port("tcp://127.0.0.1")
        ended = threading.Event()

        def publish() -> None:
            while not ended.is_set():
                if publisher.poll(10, zmq.POLLOUT):
                    try:
                        publisher.send_multipart([b"", bytes(8), bytes(MIB)], zmq.NOBLOCK)
                    except zmq.Again:
                        continue

        followed = Followed(context, f"tcp://127.0.0.1:{port}", None)
        thread = threading.Thread(target=publish)
        thread.start()
        try:
            async with asyncio.timeout(60):
                while not followed.floods:
                    await asyncio.sleep(0.005)
        finally:
            ended.set()
            thread.join()
            followed.link.close()
        assert "faster than they could be read" in followed.floods[0]
