# SPDX-License-Identifier: Apache-2.0
"""The subscriber over real sockets, on both event loops. What is judged how is test_events_sequence.py's subject."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from random import Random
from typing import Any

import pytest
import zmq

from kvrouter.events.transport.permits import Permits
from kvrouter.events.transport.subscription import SubscriberClosed
from kvrouter.events.vllm.publisher import EventPublisher
from kvrouter.events.vllm.settings import SubscriberSettings
from kvrouter.events.vllm.stream_items import (
    Batch,
    Connected,
    Disconnected,
    GapClosed,
    GapLost,
    GapOpened,
    Malformed,
    Proven,
    ReplayFailed,
    ReplayFinished,
    Restarted,
    ResumePoint,
    StreamItem,
    fingerprint,
)
from kvrouter.events.vllm.subscriber import Subscriber

Context = zmq.Context[zmq.Socket[bytes]]

ANY = "tcp://127.0.0.1:0"
END = b"\xff" * 8
# Nothing here waits this long unless it fails.
PATIENCE_S = 15.0
QUIET = SubscriberSettings(idle_check_s=0, settle_s=0.05, reconnect_min_s=0.01, reconnect_max_s=0.05)
IMPATIENT = SubscriberSettings(idle_check_s=0, settle_s=60, answer_timeout_s=0.1)


def seq8(seq: int) -> bytes:
    return seq.to_bytes(8, "big")


class Stream:
    """A started subscriber and what it said so far."""

    def __init__(self, subscriber: Subscriber) -> None:
        self.subscriber = subscriber
        self.items: list[StreamItem] = []

    async def __aenter__(self) -> Stream:
        await self.subscriber.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.subscriber.close()

    async def until(self, enough: Callable[[list[StreamItem]], object]) -> list[StreamItem]:
        """The items up to where `enough` holds of all that came; they are taken."""
        while not enough(self.items):
            self.items += await self.subscriber.next()
        items, self.items = self.items, []
        return items

    async def until_kind(self, kind: type[StreamItem], count: int = 1) -> list[StreamItem]:
        return await self.until(lambda items: sum(isinstance(item, kind) for item in items) >= count)

    async def until_live(self, publisher: EventPublisher) -> int:
        """Publishes until it arrives live; the seq of the last published. PUB drops until it knows of us."""
        while True:
            publisher.publish(b"warm%d" % publisher.next_seq)
            try:
                await asyncio.wait_for(
                    self.until(lambda items: any(isinstance(item, Batch) and not item.replayed for item in items)), 0.1
                )
            except TimeoutError:
                continue
            return publisher.next_seq - 1


def seqs(items: list[StreamItem]) -> list[int]:
    return [item.seq for item in items if isinstance(item, Batch)]


def kinds(items: list[StreamItem]) -> list[str]:
    return [type(item).__name__ for item in items if not isinstance(item, Batch)]


def subscribe(publisher: EventPublisher, context: Context, **options: Any) -> Stream:
    options.setdefault("settings", QUIET)
    return Stream(Subscriber(publisher.endpoint, publisher.replay_endpoint, context=context, **options))


def test_late_join_with_replay_misses_nothing(context: Context, run: Any) -> None:
    async def test() -> None:
        with EventPublisher(ANY, ANY, context=context, topic="kv") as publisher:
            for number in range(5):
                publisher.publish(b"%d" % number)
            publisher.flush(PATIENCE_S)
            async with subscribe(publisher, context, topic=b"kv") as stream:
                items = await stream.until_kind(ReplayFinished)
                assert kinds(items) == ["Connected", "ReplayFinished"]
                assert [(item.seq, item.payload, item.replayed) for item in items if isinstance(item, Batch)] == [
                    (number, b"%d" % number, True) for number in range(5)
                ]
                assert await stream.until_live(publisher) >= 5

    run(test())


def test_late_join_without_replay_starts_where_it_is(context: Context, run: Any) -> None:
    async def test() -> None:
        with EventPublisher(ANY, context=context, first_seq=90) as publisher:
            async with subscribe(publisher, context) as stream:
                last = await stream.until_live(publisher)
                publisher.publish(b"next")
                assert seqs(await stream.until_kind(Batch)) == [last + 1]

    run(test())


def test_gap_is_filled(context: Context, run: Any) -> None:
    async def test() -> None:
        with EventPublisher(ANY, ANY, context=context) as publisher:
            async with subscribe(publisher, context) as stream:
                last = await stream.until_live(publisher)
                publisher.drop_next(3)
                for _ in range(5):
                    publisher.publish(b"x")
                items = await stream.until(lambda items: last + 5 in seqs(items))
                assert seqs(items) == list(range(last + 1, last + 6))
                assert GapOpened(last + 1, last + 4) in items
                assert GapClosed(last + 1, last + 4) in items

    run(test())


def test_gap_that_replay_cannot_fill_is_lost(context: Context, run: Any) -> None:
    async def test() -> None:
        with EventPublisher(ANY, ANY, context=context) as publisher:
            async with subscribe(publisher, context) as stream:
                last = await stream.until_live(publisher)
                publisher.skip_seq(2)
                publisher.publish(b"x")
                items = await stream.until_kind(Batch)
                assert [type(item) for item in items[:3]] == [GapOpened, GapLost, Batch]
                assert seqs(items) == [last + 3]

    run(test())


def test_gap_without_replay_is_lost(context: Context, run: Any) -> None:
    async def test() -> None:
        with EventPublisher(ANY, context=context) as publisher:
            async with subscribe(publisher, context) as stream:
                last = await stream.until_live(publisher)
                publisher.drop_next()
                publisher.publish(b"dropped")
                publisher.publish(b"x")
                items = await stream.until_kind(Batch)
                assert [type(item) for item in items] == [GapLost, Batch]
                assert seqs(items) == [last + 2]

    run(test())


@pytest.mark.parametrize("batches", [0, 3])
def test_restart_on_the_same_address(context: Context, run: Any, batches: int) -> None:
    async def test() -> None:
        publisher = EventPublisher(ANY, ANY, context=context)
        async with subscribe(publisher, context) as stream:
            await stream.until_live(publisher)
            publisher.close()
            await stream.until_kind(Disconnected)
            with EventPublisher(publisher.endpoint, publisher.replay_endpoint, context=context) as successor:
                # With none it stays idle: only the replay endpoint can tell.
                for number in range(batches):
                    successor.publish(b"new%d" % number)
                successor.flush(PATIENCE_S)
                items = await stream.until_kind(ReplayFinished)
                assert kinds(items) == ["Connected", "Restarted", "ReplayFinished"]
                assert seqs(items) == list(range(batches))

    run(test())


def test_reconnect_to_the_same_life_is_proven(context: Context, run: Any) -> None:
    async def test() -> None:
        router, live = context.socket(zmq.ROUTER), context.socket(zmq.PUB)
        with router, live:
            replay_port, live_port = router.bind_to_random_port("tcp://127.0.0.1"), 0
            live_port = live.bind_to_random_port("tcp://127.0.0.1")
            ring = [(seq, b"%d" % seq) for seq in range(4)]
            subscriber = Subscriber(
                f"tcp://127.0.0.1:{live_port}", f"tcp://127.0.0.1:{replay_port}", context=context, settings=QUIET
            )
            async with Stream(subscriber) as stream:
                await answer(router, ring)
                assert seqs(await stream.until_kind(ReplayFinished)) == [0, 1, 2, 3]
                live.unbind(f"tcp://127.0.0.1:{live_port}")
                live.close()
                await stream.until_kind(Disconnected)
                ring.append((4, b"4"))
                with context.socket(zmq.PUB) as again:
                    while True:
                        try:
                            again.bind(f"tcp://127.0.0.1:{live_port}")
                            break
                        except zmq.ZMQError:
                            await asyncio.sleep(0.01)
                    starts = await answer(router, ring)
                    items = await stream.until_kind(ReplayFinished)
                    assert starts == 3
                    assert items[1:] == [
                        Proven(3, "replay"),
                        Batch(4, b"4", fingerprint(b"4"), True),
                        ReplayFinished(4, 4, 1),
                    ]

    run(test())


async def answer(
    router: zmq.Socket[bytes], ring: list[tuple[int, bytes]], *, topic: tuple[bytes, ...] = (b"",), end: bool = True
) -> int:
    """Waits for one replay request and answers it, with a topic frame (vLLM since 0.26) or without; its first seq."""
    while not router.poll(0):
        await asyncio.sleep(0.005)
    client, empty, start = router.recv_multipart()
    assert empty == b""
    first = int.from_bytes(start, "big")
    for seq, payload in ring:
        if seq >= first:
            router.send_multipart([client, b"", *topic, seq8(seq), payload])
    if end:
        router.send_multipart([client, b"", *topic, END, b""])
    return first


@pytest.mark.parametrize("topic", [(), (b"kv",)], ids=["vllm up to 0.25", "vllm since 0.26"])
def test_both_replay_framings(context: Context, run: Any, topic: tuple[bytes, ...]) -> None:
    async def test() -> None:
        with EventPublisher(ANY, context=context) as publisher, context.socket(zmq.ROUTER) as router:
            port = router.bind_to_random_port("tcp://127.0.0.1")
            subscriber = Subscriber(publisher.endpoint, f"tcp://127.0.0.1:{port}", context=context, settings=QUIET)
            async with Stream(subscriber) as stream:
                await answer(router, [(7, b"seven"), (8, b"eight")], topic=topic)
                items = await stream.until_kind(ReplayFinished)
                assert items[1:] == [
                    Batch(7, b"seven", fingerprint(b"seven"), True),
                    Batch(8, b"eight", fingerprint(b"eight"), True),
                    ReplayFinished(7, 8, 2),
                ]

    run(test())


def test_malformed_messages_are_dropped_and_told(context: Context, run: Any) -> None:
    async def test() -> None:
        with context.socket(zmq.PUB) as live, context.socket(zmq.ROUTER) as router:
            port = live.bind_to_random_port("tcp://127.0.0.1")
            replay_port = router.bind_to_random_port("tcp://127.0.0.1")
            subscriber = Subscriber(
                f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{replay_port}", context=context, settings=QUIET
            )
            async with Stream(subscriber) as stream:
                while not router.poll(0):
                    await asyncio.sleep(0.005)
                client, *_ = router.recv_multipart()
                for frames in ([b"x"], [b"", b"a", b"b", b"c"], [b"", b"short", b"p"], [b"no", seq8(1), b"p"]):
                    router.send_multipart([client, *frames])
                router.send_multipart([client, b"", END, b""])
                items = await stream.until_kind(ReplayFinished)
                assert sum(isinstance(item, Malformed) for item in items) == 4
                while True:
                    live.send_multipart([b"", seq8(0), b"first"])
                    try:
                        await asyncio.wait_for(stream.until_kind(Batch), 0.1)
                        break
                    except TimeoutError:
                        continue
                for frames in ([b"x"], [b"", seq8(1)], [b"", b"123", b"p"], [b"", END, b"p"], [b"", *[b"x"] * 5]):
                    live.send_multipart(frames)
                live.send_multipart([b"", seq8(1), b"second"])
                items = await stream.until_kind(Batch)
                assert kinds(items) == ["Malformed"] * 5
                assert seqs(items) == [1]

    run(test())


@pytest.mark.parametrize("bound", [False, True], ids=["nobody listens", "nobody answers"])
def test_a_dead_replay_endpoint_holds_the_stream_only_for_a_while(context: Context, run: Any, bound: bool) -> None:
    async def test() -> None:
        with EventPublisher(ANY, context=context) as publisher, context.socket(zmq.ROUTER) as router:
            port = router.bind_to_random_port("tcp://127.0.0.1")
            if not bound:
                router.close()
            subscriber = Subscriber(publisher.endpoint, f"tcp://127.0.0.1:{port}", context=context, settings=IMPATIENT)
            async with Stream(subscriber) as stream:
                assert kinds(await stream.until_kind(ReplayFailed)) == ["Connected", "ReplayFailed", "Incomplete"]
                await stream.until_live(publisher)

    run(test())


def test_no_more_replays_at_once_than_are_permitted(context: Context, run: Any) -> None:
    async def test() -> None:
        permits = Permits(rng=Random(1), at_once=1, longest_s=PATIENCE_S)
        async with AsyncExitStack() as stack:
            left: dict[zmq.Socket[bytes], Stream] = {}
            for _ in range(3):
                publisher = stack.enter_context(EventPublisher(ANY, context=context))
                router = stack.enter_context(context.socket(zmq.ROUTER))
                replay = f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}"
                subscriber = Subscriber(publisher.endpoint, replay, context=context, settings=QUIET, permits=permits)
                left[router] = await stack.enter_async_context(Stream(subscriber))
            while left:
                while permits.waiting < len(left) - 1 or not any(router.poll(0) for router in left):
                    await asyncio.sleep(0.005)
                (asked,) = (router for router in left if router.poll(0))
                await answer(asked, [(0, b"only")])
                assert seqs(await left.pop(asked).until_kind(ReplayFinished)) == [0]
            assert permits.waiting == 0

    run(test())


def test_an_answer_that_breaks_off_is_asked_again(context: Context, run: Any) -> None:
    async def test() -> None:
        ring = [(seq, b"%d" % seq) for seq in range(4)]
        with EventPublisher(ANY, context=context) as publisher, context.socket(zmq.ROUTER) as router:
            port = router.bind_to_random_port("tcp://127.0.0.1")
            subscriber = Subscriber(publisher.endpoint, f"tcp://127.0.0.1:{port}", context=context, settings=IMPATIENT)
            async with Stream(subscriber) as stream:
                assert await answer(router, ring[:2], end=False) == 0
                assert await answer(router, ring) == 1
                items = await stream.until_kind(ReplayFinished)
                assert (seqs(items), kinds(items)) == ([0, 1, 2, 3], ["Connected", "ReplayFinished"])

    run(test())


def test_resume_proven_and_disproven(context: Context, run: Any) -> None:
    async def test() -> None:
        with EventPublisher(ANY, ANY, context=context) as publisher:
            for number in range(6):
                publisher.publish(b"%d" % number)
            publisher.flush(PATIENCE_S)
            async with subscribe(publisher, context, resume=ResumePoint(3, fingerprint(b"3"))) as stream:
                items = await stream.until_kind(ReplayFinished)
                assert items[:2] == [Connected(replaying=True), Proven(3, "replay")]
                assert seqs(items) == [4, 5]
            async with subscribe(publisher, context, resume=ResumePoint(3, fingerprint(b"another"))) as stream:
                items = await stream.until_kind(ReplayFinished)
                assert isinstance(items[1], Restarted)
                assert seqs(items) == [0, 1, 2, 3, 4, 5]

    run(test())


def test_a_silent_stream_is_asked_for_its_tail(context: Context, run: Any) -> None:
    async def test() -> None:
        settings = SubscriberSettings(idle_check_s=0.05, settle_s=0.05)
        with EventPublisher(ANY, ANY, context=context) as publisher:
            async with subscribe(publisher, context, settings=settings) as stream:
                last = await stream.until_live(publisher)
                publisher.drop_next()
                publisher.publish(b"dropped, and nothing follows")
                items = await stream.until_kind(ReplayFinished)
                assert items == [
                    Batch(last + 1, b"dropped, and nothing follows", items[0].fingerprint, True),  # type: ignore[union-attr]
                    ReplayFinished(last + 1, last + 1, 1),
                ]

    run(test())


def test_a_flood_is_bounded_and_leaves_the_loop_its_turns(context: Context, run: Any) -> None:
    async def test() -> None:
        batches = 3_000
        settings = SubscriberSettings(
            idle_check_s=0, settle_s=60, max_waiting=200, turn_messages=20, max_items=50, receive_hwm=100, max_held=100
        )
        with EventPublisher(ANY, ANY, context=context) as publisher:
            async with subscribe(publisher, context, settings=settings) as stream:
                last = await stream.until_live(publisher)
                for _ in range(batches):
                    publisher.publish(bytes(100))
                subscriber = stream.subscriber
                before = 0
                while subscriber.waiting < settings.max_waiting:
                    await asyncio.sleep(0)
                    # Two sockets a turn, a few other items, and what was held.
                    assert subscriber.waiting - before <= 2 * settings.turn_messages + settings.max_held + 10
                    before = subscriber.waiting
                for _ in range(100):
                    await asyncio.sleep(0)
                assert subscriber.waiting <= settings.max_waiting + 2 * settings.turn_messages + settings.max_held + 10
                got: list[int] = []
                while not got or got[-1] < last + batches:
                    items = await subscriber.next()
                    assert len(items) <= settings.max_items
                    got += seqs(items)
                    assert not any(isinstance(item, GapLost | Restarted) for item in items)
                    assert subscriber.held <= settings.max_held
                assert got == list(range(last + 1, last + batches + 1))

    run(test())


def test_waiting_bytes_are_bounded(context: Context, run: Any) -> None:
    async def test() -> None:
        settings = SubscriberSettings(
            idle_check_s=0, settle_s=60, max_waiting_bytes=1 << 20, turn_bytes=1 << 18, receive_hwm=10
        )
        with EventPublisher(ANY, ANY, context=context) as publisher:
            async with subscribe(publisher, context, settings=settings) as stream:
                last = await stream.until_live(publisher)
                for _ in range(100):
                    publisher.publish(bytes(1 << 17))
                publisher.flush(PATIENCE_S)
                for _ in range(200):
                    await asyncio.sleep(0.001)
                assert 0 < stream.subscriber.waiting <= 16
                items = await stream.until(lambda items: last + 100 in seqs(items))
                assert seqs(items) == list(range(last + 1, last + 101))

    run(test())


def test_within_one_process(context: Context, run: Any) -> None:
    async def test() -> None:
        with EventPublisher("inproc://live", "inproc://replay", context=context) as publisher:
            publisher.publish(b"0")
            publisher.flush(PATIENCE_S)
            async with subscribe(publisher, context) as stream:
                assert seqs(await stream.until_kind(ReplayFinished)) == [0]
                await stream.until_live(publisher)

    run(test())


def test_close_ends_a_waiting_next_and_leaves_nothing(context: Context, run: Any) -> None:
    async def test() -> None:
        with EventPublisher(ANY, ANY, context=context) as publisher:
            tasks = asyncio.all_tasks()
            stream = subscribe(publisher, context)
            await stream.subscriber.start()
            await stream.until_kind(ReplayFinished)
            waiting = asyncio.create_task(stream.subscriber.next())
            await asyncio.sleep(0)
            with pytest.raises(RuntimeError, match="another task"):
                await stream.subscriber.next()
            await stream.subscriber.close()
            with pytest.raises(SubscriberClosed):
                await waiting
            with pytest.raises(SubscriberClosed):
                await stream.subscriber.next()
            await stream.subscriber.close()
            assert asyncio.all_tasks() == tasks
            with pytest.raises(SubscriberClosed):
                await stream.subscriber.start()

    run(test())


def test_close_in_the_middle_of_a_replay(context: Context, run: Any) -> None:
    async def test() -> None:
        with EventPublisher(ANY, ANY, context=context) as publisher:
            for _ in range(2_000):
                publisher.publish(bytes(1_000))
            async with subscribe(publisher, context) as stream:
                await stream.until_kind(Batch)

    run(test())


def test_a_cancelled_next_loses_nothing(context: Context, run: Any) -> None:
    async def test() -> None:
        with EventPublisher(ANY, ANY, context=context) as publisher:
            async with subscribe(publisher, context) as stream:
                last = await stream.until_live(publisher)
                waiting = asyncio.create_task(stream.subscriber.next())
                await asyncio.sleep(0)
                waiting.cancel()
                publisher.publish(b"x")
                assert seqs(await stream.until_kind(Batch)) == [last + 1]

    run(test())


@pytest.mark.parametrize(("live", "replay"), [("nonsense", None), (ANY, "nonsense"), ("tcp://127.0.0.1:1", "tcp://x")])
def test_an_endpoint_that_is_no_address(context: Context, run: Any, live: str, replay: str | None) -> None:
    async def test() -> None:
        subscriber = Subscriber(live, replay, context=context)
        with pytest.raises(zmq.ZMQError):
            await subscriber.start()

    run(test())


def test_sockets_that_cannot_be_opened_reach_the_consumer(run: Any) -> None:
    async def test() -> None:
        context: Context = zmq.Context()
        with EventPublisher(ANY, ANY, context=context) as publisher:
            async with subscribe(publisher, context) as stream:
                await stream.until_live(publisher)
                # SUB, its monitor and what the publisher has; ZMQ counts a little more than that.
                context.set(zmq.MAX_SOCKETS, 1)
                spare = []
                with pytest.raises(zmq.ZMQError):
                    while True:
                        spare.append(context.socket(zmq.PAIR))
                publisher.drop_next()
                publisher.publish(b"dropped")
                publisher.publish(b"x")
                with pytest.raises(zmq.ZMQError):
                    await stream.until_kind(GapClosed)
                for socket in spare:
                    socket.close()
        context.term()

    run(test())
