# SPDX-License-Identifier: Apache-2.0
"""The subscriber over real sockets, on both event loops: joining, gaps, restarts, replays.

Each decision by itself is the subject of test_batch_cursor.py.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from random import Random

import pytest
import zmq

from kvrouter.events.transport.permits import Permits
from kvrouter.events.transport.progress import CaughtUp, FellBehind
from kvrouter.events.vllm.publisher import EventPublisher
from kvrouter.events.vllm.settings import SubscriberSettings
from kvrouter.events.vllm.stream_items import (
    Batch,
    Connected,
    Disconnected,
    GapClosed,
    GapLost,
    GapOpened,
    Proven,
    Restarted,
    ResumePoint,
    fingerprint,
)
from kvrouter.events.vllm.subscriber import Subscriber
from tests.support.event_stream import ANY, IMPATIENT, PATIENCE_S, QUIET, Stream, answer, kinds, seqs, subscribe
from tests.support.wire import Wire

Context = zmq.Context[zmq.Socket[bytes]]


def port_of(endpoint: str | None) -> int:
    assert endpoint is not None
    return int(endpoint.rpartition(":")[2])


async def test_a_late_reader_with_replay_misses_nothing(context: Context) -> None:
    with EventPublisher(ANY, ANY, context=context, topic="kv") as publisher:
        for number in range(5):
            publisher.publish(b"%d" % number)
        publisher.flush(PATIENCE_S)
        async with subscribe(publisher, context, topic=b"kv") as stream:
            items = await stream.until_kind(CaughtUp)
            assert kinds(items) == ["FellBehind", "Connected", "CaughtUp"]
            assert [(item.seq, item.payload, item.replayed) for item in items if isinstance(item, Batch)] == [
                (number, b"%d" % number, True) for number in range(5)
            ]
            assert await stream.until_live(publisher) >= 5


async def test_a_late_reader_without_replay_starts_at_the_next_batch(context: Context) -> None:
    with EventPublisher(ANY, context=context, first_seq=90) as publisher:
        async with subscribe(publisher, context) as stream:
            last = await stream.until_live(publisher)
            publisher.publish(b"next")
            assert seqs(await stream.until_kind(Batch)) == [last + 1]


async def test_a_gap_is_filled(context: Context) -> None:
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


async def test_a_gap_that_replay_cannot_fill_is_lost(context: Context) -> None:
    with EventPublisher(ANY, ANY, context=context) as publisher:
        async with subscribe(publisher, context) as stream:
            last = await stream.until_live(publisher)
            publisher.skip_seq(2)
            publisher.publish(b"x")
            items = await stream.until_kind(Batch)
            assert [type(item) for item in items[:4]] == [GapOpened, FellBehind, GapLost, Batch]
            assert seqs(items) == [last + 3]


async def test_a_gap_without_replay_is_lost(context: Context) -> None:
    with EventPublisher(ANY, context=context) as publisher:
        async with subscribe(publisher, context) as stream:
            last = await stream.until_live(publisher)
            publisher.drop_next()
            publisher.publish(b"dropped")
            publisher.publish(b"x")
            items = await stream.until_kind(Batch)
            assert [type(item) for item in items] == [GapLost, Batch]
            assert seqs(items) == [last + 2]


@pytest.mark.parametrize("batches", [0, 3])
async def test_a_restart_on_the_same_address_is_detected(context: Context, batches: int) -> None:
    publisher = EventPublisher(ANY, ANY, context=context)
    async with subscribe(publisher, context) as stream:
        await stream.until_live(publisher)
        publisher.close()
        await stream.until_kind(Disconnected)
        with EventPublisher(publisher.endpoint, publisher.replay_endpoint, context=context) as successor:
            # With no batches, the stream stays idle, so only the replay endpoint can show the restart.
            for number in range(batches):
                successor.publish(b"new%d" % number)
            successor.flush(PATIENCE_S)
            items = await stream.until_kind(CaughtUp)
            assert kinds(items) == ["FellBehind", "Connected", "Restarted", "CaughtUp"]
            assert seqs(items) == list(range(batches))


async def test_reconnect_to_the_same_life_is_proven(context: Context) -> None:
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
            assert seqs(await stream.until_kind(CaughtUp)) == [0, 1, 2, 3]
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
                items = await stream.until_kind(CaughtUp)
                assert starts == 3
                assert items[2:] == [
                    Proven(3, "replay"),
                    Batch(4, b"4", fingerprint(b"4"), True),
                    CaughtUp(),
                ]


@pytest.mark.parametrize("topic", [(), (b"kv",)], ids=["vllm up to 0.25", "vllm since 0.26"])
async def test_replays_with_and_without_a_topic_are_read(context: Context, topic: tuple[bytes, ...]) -> None:
    with EventPublisher(ANY, context=context) as publisher, context.socket(zmq.ROUTER) as router:
        port = router.bind_to_random_port("tcp://127.0.0.1")
        subscriber = Subscriber(publisher.endpoint, f"tcp://127.0.0.1:{port}", context=context, settings=QUIET)
        async with Stream(subscriber) as stream:
            await answer(router, [(7, b"seven"), (8, b"eight")], topic=topic)
            items = await stream.until_kind(CaughtUp)
            assert items[2:] == [
                Batch(7, b"seven", fingerprint(b"seven"), True),
                Batch(8, b"eight", fingerprint(b"eight"), True),
                CaughtUp(),
            ]


@pytest.mark.parametrize("bound", [False, True], ids=["nobody listens", "nobody answers"])
async def test_a_dead_replay_endpoint_holds_the_stream_only_for_a_while(context: Context, bound: bool) -> None:
    with EventPublisher(ANY, context=context) as publisher, context.socket(zmq.ROUTER) as router:
        port = router.bind_to_random_port("tcp://127.0.0.1")
        if not bound:
            router.close()
        subscriber = Subscriber(publisher.endpoint, f"tcp://127.0.0.1:{port}", context=context, settings=IMPATIENT)
        async with Stream(subscriber) as stream:
            assert kinds(await stream.until_kind(CaughtUp)) == [
                "FellBehind",
                "Connected",
                "ReplayFailed",
                "Incomplete",
                "CaughtUp",
            ]
            await stream.until_live(publisher)


async def test_no_more_replays_at_once_than_are_permitted(context: Context) -> None:
    permits = Permits(rng=Random(1), at_once=1, longest_s=PATIENCE_S)
    async with AsyncExitStack() as stack:
        unanswered: dict[zmq.Socket[bytes], Stream] = {}
        for _ in range(3):
            publisher = stack.enter_context(EventPublisher(ANY, context=context))
            router = stack.enter_context(context.socket(zmq.ROUTER))
            replay = f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}"
            subscriber = Subscriber(publisher.endpoint, replay, context=context, settings=QUIET, permits=permits)
            unanswered[router] = await stack.enter_async_context(Stream(subscriber))
        while unanswered:
            while permits.waiting < len(unanswered) - 1 or not any(router.poll(0) for router in unanswered):
                await asyncio.sleep(0.005)
            (target,) = (router for router in unanswered if router.poll(0))
            await answer(target, [(0, b"only")])
            assert seqs(await unanswered.pop(target).until_kind(CaughtUp)) == [0]
        assert permits.waiting == 0


async def test_an_answer_that_stops_is_requested_again(context: Context) -> None:
    ring = [(seq, b"%d" % seq) for seq in range(4)]
    with EventPublisher(ANY, context=context) as publisher, context.socket(zmq.ROUTER) as router:
        port = router.bind_to_random_port("tcp://127.0.0.1")
        subscriber = Subscriber(publisher.endpoint, f"tcp://127.0.0.1:{port}", context=context, settings=IMPATIENT)
        async with Stream(subscriber) as stream:
            assert await answer(router, ring[:2], end=False) == 0
            assert await answer(router, ring) == 1
            items = await stream.until_kind(CaughtUp)
            assert (seqs(items), kinds(items)) == ([0, 1, 2, 3], ["FellBehind", "Connected", "CaughtUp"])


async def test_a_resume_is_proven_or_disproven_by_replay(context: Context) -> None:
    with EventPublisher(ANY, ANY, context=context) as publisher:
        for number in range(6):
            publisher.publish(b"%d" % number)
        publisher.flush(PATIENCE_S)
        async with subscribe(publisher, context, resume=ResumePoint(3, fingerprint(b"3"))) as stream:
            items = await stream.until_kind(CaughtUp)
            assert items[:3] == [FellBehind(), Connected(), Proven(3, "replay")]
            assert seqs(items) == [4, 5]
        async with subscribe(publisher, context, resume=ResumePoint(3, fingerprint(b"another"))) as stream:
            items = await stream.until_kind(CaughtUp)
            assert isinstance(items[2], Restarted)
            assert seqs(items) == [0, 1, 2, 3, 4, 5]


async def test_the_last_batches_of_a_silent_stream_are_requested(context: Context) -> None:
    settings = SubscriberSettings(idle_check_s=0.05, settle_s=0.05)
    with EventPublisher(ANY, ANY, context=context) as publisher:
        async with subscribe(publisher, context, settings=settings) as stream:
            last = await stream.until_live(publisher)
            publisher.drop_next()
            publisher.publish(b"dropped, and nothing follows")
            items = await stream.until_kind(CaughtUp)
            # As the socket brought nothing for so long, it is opened again.
            assert [item for item in items if not isinstance(item, Disconnected)] == [
                FellBehind(),
                Batch(last + 1, b"dropped, and nothing follows", items[1].fingerprint, True),  # type: ignore[union-attr]
                CaughtUp(),
            ]


@pytest.mark.parametrize("is_known", [True, False], ids=["another life", "a life that had sent nothing"])
async def test_a_connection_to_a_machine_that_died_without_a_word_is_left(context: Context, is_known: bool) -> None:
    settings = SubscriberSettings(idle_check_s=0.2, settle_s=0.05)
    async with asyncio.timeout(PATIENCE_S), AsyncExitStack() as stack:
        former, successor = (stack.enter_context(EventPublisher(ANY, ANY, context=context)) for _ in range(2))
        live, replay = Wire(), Wire()
        for wire in (live, replay):
            await wire.open()
            stack.push_async_callback(wire.close)
        live.target, replay.target = port_of(former.endpoint), port_of(former.replay_endpoint)
        subscriber = Subscriber(live.endpoint, replay.endpoint, context=context, settings=settings)
        stream = await stack.enter_async_context(Stream(subscriber))
        if is_known:
            await stream.until_live(former)
        else:
            await stream.until_kind(CaughtUp)
        # From now on nothing comes over the open connection, and what is opened leads to the successor.
        live.target, replay.target = port_of(successor.endpoint), port_of(successor.replay_endpoint)
        if is_known:
            await stream.until_kind(Restarted)
        await stream.until_live(successor)


async def test_inproc_endpoints_are_read(context: Context) -> None:
    with EventPublisher("inproc://live", "inproc://replay", context=context) as publisher:
        publisher.publish(b"0")
        publisher.flush(PATIENCE_S)
        async with subscribe(publisher, context) as stream:
            assert seqs(await stream.until_kind(CaughtUp)) == [0]
            await stream.until_live(publisher)
