# SPDX-License-Identifier: Apache-2.0
"""vLLM's own event code as the oracle: the same bytes, the same frames, and a subscriber that reads its publisher."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import socket
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("vllm")

import msgspec
import zmq
from vllm.distributed import kv_events

from kvrouter.events.transport.progress import CaughtUp
from kvrouter.events.vllm.codec import BatchDecoder, encode_batch
from kvrouter.events.vllm.publisher import EventPublisher
from kvrouter.events.vllm.settings import SubscriberSettings
from kvrouter.events.vllm.stream_items import Batch, GapClosed, Proven, Restarted, ResumePoint, StreamItem
from kvrouter.events.vllm.subscriber import Subscriber
from kvrouter.events.vllm.wire import WireCleared, WireRemoved, WireStored

pytestmark = pytest.mark.engine

GOLDEN = Path(__file__).parents[1] / "golden"
PATIENCE_S = 20.0


def free_endpoint() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://*:{probe.getsockname()[1]}"


def to(endpoint: str) -> str:
    return endpoint.replace("*", "127.0.0.1")


def step(number: int) -> kv_events.KVEventBatch:
    return kv_events.KVEventBatch(
        ts=time.time(),
        events=[
            kv_events.BlockStored(
                block_hashes=[(1 << 63) + number],
                parent_block_hash=None,
                token_ids=list(range(16)),
                block_size=16,
                lora_id=None,
                medium="GPU",
                lora_name=None,
                group_idx=0,
            )
        ],
    )


def load_golden_maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("events_make", GOLDEN / "events_make.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_golden_file_is_what_vllm_writes() -> None:
    maker = load_golden_maker()
    for case in json.loads((GOLDEN / "events_vllm_0_32.json").read_text()):
        assert maker.payload(case).hex() == case["payload"], case["name"]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [(WireStored, "BlockStored"), (WireRemoved, "BlockRemoved"), (WireCleared, "AllBlocksCleared")],
)
def test_every_field_of_vllm_is_known_in_order(ours: type[msgspec.Struct], theirs: str) -> None:
    fields = getattr(kv_events, theirs).__struct_fields__
    assert ours.__struct_fields__[: len(fields)] == fields


class Frames:
    """A bare subscriber of one publisher and of its replay."""

    def __init__(self, context: zmq.Context[Any], endpoint: str, replay: str) -> None:
        self.live = context.socket(zmq.SUB)
        self.live.subscribe(b"")
        self.live.connect(to(endpoint))
        self.replay = context.socket(zmq.DEALER)
        self.replay.connect(to(replay))
        for zmq_socket in (self.live, self.replay):
            zmq_socket.setsockopt(zmq.RCVTIMEO, int(PATIENCE_S * 1000))
        time.sleep(0.5)

    def read(self, batches: int) -> tuple[list[list[bytes]], list[list[bytes]]]:
        live = [self.live.recv_multipart() for _ in range(batches)]
        self.replay.send_multipart([b"", (1).to_bytes(8, "big")])
        answer = [self.replay.recv_multipart()]
        while answer[-1][2] != b"\xff" * 8:
            answer.append(self.replay.recv_multipart())
        self.live.close(linger=0)
        self.replay.close(linger=0)
        return live, answer


def test_our_publisher_sends_the_frames_of_vllms() -> None:
    batches = [step(number) for number in range(4)]
    payloads = []
    for batch in batches:
        batch.data_parallel_rank = 0
        (event,) = batch.events
        wire = WireStored(**{name: getattr(event, name) for name in event.__struct_fields__})
        payloads.append(encode_batch(batch.ts, [wire], 0))
    context: zmq.Context[Any] = zmq.Context()
    endpoint, replay = free_endpoint(), free_endpoint()
    theirs = kv_events.ZmqEventPublisher(0, endpoint, replay, topic="kv@m")
    try:
        frames = Frames(context, endpoint, replay)
        for batch in batches:
            theirs.publish(batch)
        expected = frames.read(4)
    finally:
        theirs.shutdown()
    with EventPublisher("tcp://127.0.0.1:0", "tcp://127.0.0.1:0", context=context, topic="kv@m") as ours:
        assert ours.replay_endpoint is not None
        frames = Frames(context, ours.endpoint, ours.replay_endpoint)
        for payload in payloads:
            ours.publish(payload)
        actual = frames.read(4)
    context.term()
    assert actual == expected
    assert len(expected[1]) == 4


def test_our_subscriber_reads_vllms_publisher() -> None:
    endpoint, replay = free_endpoint(), free_endpoint()
    settings = SubscriberSettings(idle_check_s=0, settle_s=0.2)

    async def until(subscriber: Subscriber, enough: type[StreamItem], count: int = 1) -> list[StreamItem]:
        items: list[StreamItem] = []
        while sum(isinstance(item, enough) for item in items) < count:
            items += await asyncio.wait_for(subscriber.next(), PATIENCE_S)
        return items

    def hashes(items: list[StreamItem]) -> list[int]:
        decoder = BatchDecoder()
        events = [decoder.decode(item.payload).events[0] for item in items if isinstance(item, Batch)]
        return [int(event.block_hashes[0]) - (1 << 63) for event in events]  # type: ignore[union-attr]

    async def test() -> None:
        context: zmq.Context[Any] = zmq.Context()
        publisher = kv_events.ZmqEventPublisher(0, endpoint, replay)
        for number in range(3):
            publisher.publish(step(number))
        subscriber = Subscriber(to(endpoint), to(replay), context=context, settings=settings)
        await subscriber.start()
        items = await until(subscriber, CaughtUp)
        assert hashes(items) == [0, 1, 2]
        last = [item for item in items if isinstance(item, Batch)][-1]
        await asyncio.sleep(0.5)
        publisher.publish(step(3))
        assert hashes(await until(subscriber, Batch)) == [3]
        # vLLM sends a batch before it puts it into its ring.
        while publisher._buffer[-1][0] != 3:
            await asyncio.sleep(0)
        # Put a batch into the ring only, as when PUB drops it for a slow subscriber.
        next(publisher._seq_gen)
        publisher._buffer.append((4, msgspec.msgpack.encode(step(4))))
        publisher.publish(step(5))
        items = await until(subscriber, CaughtUp)
        assert hashes(items) == [4, 5]
        assert GapClosed(4, 5) in items
        await subscriber.close()

        subscriber = Subscriber(
            to(endpoint),
            to(replay),
            context=context,
            settings=settings,
            resume=ResumePoint(last.seq, last.fingerprint),
        )
        await subscriber.start()
        items = await until(subscriber, CaughtUp)
        assert Proven(last.seq, "replay") in items
        assert hashes(items) == [3, 4, 5]

        publisher.shutdown()
        await asyncio.sleep(0.5)
        successor = kv_events.ZmqEventPublisher(0, endpoint, replay)
        items = await until(subscriber, CaughtUp)
        assert any(isinstance(item, Restarted) for item in items)
        successor.publish(step(9))
        assert hashes(await until(subscriber, Batch)) == [9]
        await subscriber.close()
        successor.shutdown()
        context.term()

    asyncio.run(test())
