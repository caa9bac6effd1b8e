# SPDX-License-Identifier: Apache-2.0
"""Floods, malformed messages, and the start and end of the subscriber, over real sockets."""

from __future__ import annotations

import asyncio

import pytest
import zmq

from kvrouter.events.transport.progress import CaughtUp
from kvrouter.events.transport.subscription import SubscriberClosed
from kvrouter.events.vllm.publisher import EventPublisher
from kvrouter.events.vllm.settings import SubscriberSettings
from kvrouter.events.vllm.stream_items import Batch, GapClosed, GapLost, Malformed, Restarted
from kvrouter.events.vllm.subscriber import Subscriber
from tests.support.event_stream import ANY, END, PATIENCE_S, QUIET, Stream, kinds, seq8, seqs, subscribe

Context = zmq.Context[zmq.Socket[bytes]]


async def test_malformed_messages_are_dropped_and_reported(context: Context) -> None:
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
            items = await stream.until_kind(CaughtUp)
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


async def test_a_flood_is_bounded_and_leaves_the_loop_its_turns(context: Context) -> None:
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
            waiting_before = 0
            while subscriber.waiting < settings.max_waiting:
                await asyncio.sleep(0)
                # A turn adds the messages of two sockets, a few other items, and the held batches.
                assert subscriber.waiting - waiting_before <= 2 * settings.turn_messages + settings.max_held + 10
                waiting_before = subscriber.waiting
            for _ in range(100):
                await asyncio.sleep(0)
            assert subscriber.waiting <= settings.max_waiting + 2 * settings.turn_messages + settings.max_held + 10
            received: list[int] = []
            while not received or received[-1] < last + batches:
                items = await subscriber.next()
                assert len(items) <= settings.max_items
                received += seqs(items)
                assert not any(isinstance(item, GapLost | Restarted) for item in items)
                assert subscriber.held <= settings.max_held
            assert received == list(range(last + 1, last + batches + 1))


async def test_waiting_bytes_are_bounded(context: Context) -> None:
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


async def test_close_ends_a_waiting_next_and_leaves_nothing(context: Context) -> None:
    with EventPublisher(ANY, ANY, context=context) as publisher:
        tasks = asyncio.all_tasks()
        stream = subscribe(publisher, context)
        await stream.subscriber.start()
        await stream.until_kind(CaughtUp)
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


async def test_close_during_a_replay_leaves_nothing_open(context: Context) -> None:
    with EventPublisher(ANY, ANY, context=context) as publisher:
        for _ in range(2_000):
            publisher.publish(bytes(1_000))
        async with subscribe(publisher, context) as stream:
            await stream.until_kind(Batch)


async def test_a_cancelled_next_loses_nothing(context: Context) -> None:
    with EventPublisher(ANY, ANY, context=context) as publisher:
        async with subscribe(publisher, context) as stream:
            last = await stream.until_live(publisher)
            waiting = asyncio.create_task(stream.subscriber.next())
            await asyncio.sleep(0)
            waiting.cancel()
            publisher.publish(b"x")
            assert seqs(await stream.until_kind(Batch)) == [last + 1]


@pytest.mark.parametrize(("live", "replay"), [("nonsense", None), (ANY, "nonsense"), ("tcp://127.0.0.1:1", "tcp://x")])
async def test_an_endpoint_that_is_no_address_is_an_error(context: Context, live: str, replay: str | None) -> None:
    subscriber = Subscriber(live, replay, context=context)
    with pytest.raises(zmq.ZMQError):
        await subscriber.start()


async def test_sockets_that_cannot_be_opened_reach_the_consumer() -> None:
    context: Context = zmq.Context()
    with EventPublisher(ANY, ANY, context=context) as publisher:
        async with subscribe(publisher, context) as stream:
            await stream.until_live(publisher)
            # The open sockets are SUB, its monitor and the publisher's; ZMQ counts a few more than these.
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
