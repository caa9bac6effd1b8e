# SPDX-License-Identifier: Apache-2.0
"""SGLang's own publisher in this process, over real sockets: its stream can be followed from any point.

Nothing is lost, no life of the engine is taken for another one, and hits stay exact.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import msgspec
import pytest
import zmq
from sglang.srt.disaggregation.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    StorageMedium,
    ZmqEventPublisher,
)

from kvrouter.events.transport.progress import CaughtUp
from kvrouter.events.vllm.codec import BatchDecoder
from kvrouter.events.vllm.stream_items import Batch, Connected, Proven, Restarted
from kvrouter.events.vllm.subscriber import Subscriber
from kvrouter.router.base.common.ids import CPU, STORAGE
from kvrouter.router.model.workers.stream_state import StreamState
from tests.sglang.stock_predictor import StockPredictor, full_attention
from tests.sglang.tree_layouts import LAYOUTS
from tests.sglang.tree_oracle import TreeOracle
from tests.support.event_stream import PATIENCE_S, QUIET, Context, Stream, kinds, seqs
from tests.support.ports import free_port, until_free

LAYOUT = next(layout for layout in LAYOUTS if layout.name == "full-16")
TOPIC = "kv-events"
STEPS, PROBES = 60, 40


class Engine:
    """A radix cache and its publisher, as SGLang's scheduler has them; both live as long as the engine's process."""

    def __init__(self, port: int, replay_port: int | None, seed: str, rank: int = 0) -> None:
        """Start the publisher at the configured ports, to which it adds its rank."""
        self.oracle = TreeOracle(LAYOUT, Random(seed))
        replay = None if replay_port is None else f"tcp://*:{replay_port}"
        self._ports = [base + rank for base in (port, replay_port) if base is not None]
        self.publisher = ZmqEventPublisher(rank, f"tcp://*:{port}", replay, topic=TOPIC)
        self.oracle.publish = self.publish
        self.batches = 0
        # SGLang's cache has an event when it is made, which the scheduler publishes after the first step.
        self.oracle.end_step()

    def publish(self, events: list[Any]) -> None:
        self.batches += 1
        self.publisher.publish(KVEventBatch(ts=float(self.batches), events=events))

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.oracle.step()

    @property
    def last_seq(self) -> int:
        return self.batches - 1

    def close(self) -> None:
        self.publisher.shutdown()
        # ZMQ's own thread closes the sockets, a moment later.
        for port in self._ports:
            until_free(port)


class Follower:
    """A subscriber, and the predictor that gets its items."""

    def __init__(self, context: Context, port: int, replay_port: int | None, predictor: StockPredictor) -> None:
        replay = None if replay_port is None else f"tcp://127.0.0.1:{replay_port}"
        subscriber = Subscriber(
            f"tcp://127.0.0.1:{port}",
            replay,
            context=context,
            settings=QUIET,
            resume=predictor.ingest.resume_point,
        )
        self.stream, self.predictor = Stream(subscriber), predictor
        self.said: list[Any] = []

    async def until(self, enough: Callable[[list[Any]], object]) -> None:
        """Pass items to the predictor until `enough` is true of all items so far."""
        while not enough(self.said):
            items = await self.stream.subscriber.next()
            for item in items:
                self.predictor.take(item)
            self.said += items

    async def until_seq(self, seq: int) -> None:
        """Wait until the predictor holds this seq and no replay is under way."""
        ingest = self.predictor.ingest
        await self.until(lambda _: (ingest.held.seq, ingest.state) == (seq, StreamState.LIVE))

    async def until_followed(self, engine: Engine, seq: int) -> None:
        """Step the engine until its batches arrive live, from `seq` on; PUB drops batches until it knows of us."""
        while True:
            engine.steps(1)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.until_seq(engine.last_seq), 0.1)
                if engine.last_seq >= seq:
                    return


def wrong_hits(engine: Engine, predictor: StockPredictor) -> list[tuple[int, int]]:
    """Return the predicted and the real hit of each prompt for which they differ."""
    wrong, hits = [], 0
    for _ in range(PROBES):
        prompt = engine.oracle.prompt()
        predicted, reused = predictor.hit(prompt).on_gpu, engine.oracle.reused(prompt)
        hits += reused > 0
        if predicted != reused:
            wrong.append((predicted, reused))
    assert hits > PROBES // 4, "too few hits to show anything"
    return wrong


@pytest.fixture
def context() -> Iterator[Context]:
    context: Context = zmq.Context()
    yield context
    context.destroy(linger=0)


def run(test: Any) -> None:
    asyncio.run(asyncio.wait_for(test, 4 * PATIENCE_S))


def new_predictor() -> StockPredictor:
    return StockPredictor(full_attention(LAYOUT.page))


def test_a_stream_joined_late_is_replayed_and_followed(context: Context, seed: int) -> None:
    async def test() -> None:
        port, replay_port = free_port(), free_port()
        engine = Engine(port, replay_port, str(seed))
        try:
            engine.steps(STEPS)
            follower = Follower(context, port, replay_port, new_predictor())
            async with follower.stream:
                await follower.until(lambda items: any(isinstance(item, CaughtUp) for item in items))
                # The publisher sends topic, seq and payload, four frames with the empty one; older ones send three.
                replayed = [item for item in follower.said if isinstance(item, Batch)]
                assert replayed and all(item.replayed for item in replayed) and "Malformed" not in kinds(follower.said)
                await follower.until_seq(engine.last_seq)
                assert wrong_hits(engine, follower.predictor) == []
                engine.steps(STEPS)
                await follower.until_seq(engine.last_seq)
                assert wrong_hits(engine, follower.predictor) == []
                assert seqs(follower.said) == list(range(engine.batches))
        finally:
            engine.close()

    run(test())


def test_what_was_missed_between_two_connections_is_replayed(context: Context, seed: int) -> None:
    async def test() -> None:
        port, replay_port = free_port(), free_port()
        engine = Engine(port, replay_port, str(seed))
        predictor = new_predictor()
        try:
            engine.steps(STEPS)
            first = Follower(context, port, replay_port, predictor)
            async with first.stream:
                await first.until_seq(engine.last_seq)
            last_seq = engine.last_seq
            predictor.ingest.pause("closed")
            engine.steps(STEPS)
            second = Follower(context, port, replay_port, predictor)
            async with second.stream:
                await second.until_seq(engine.last_seq)
                assert any(isinstance(item, Proven) for item in second.said)
                assert seqs(second.said) == list(range(last_seq + 1, engine.batches))
                assert predictor.ingest.state is StreamState.LIVE
                assert wrong_hits(engine, predictor) == []
        finally:
            engine.close()

    run(test())


@pytest.mark.parametrize("replays", [True, False])
def test_another_life_voids_what_was_held(context: Context, seed: int, replays: bool) -> None:
    """Restart the engine, whose stream begins with AllBlocksCleared at seq 0, as a cache is reset when it is made."""

    async def test() -> None:
        port, replay_port = free_port(), free_port() if replays else None
        engine = Engine(port, replay_port, str(seed))
        predictor = new_predictor()
        follower = Follower(context, port, replay_port, predictor)
        async with follower.stream:
            try:
                await follower.until(lambda items: any(isinstance(item, Connected) for item in items))
                await follower.until_followed(engine, STEPS // 4)
                assert predictor.ingest.held.blocks.blocks
            finally:
                engine.close()
            second = Engine(port, replay_port, f"{seed} again")
            try:
                await follower.until_followed(second, 0)
                assert any(isinstance(item, Restarted) for item in follower.said)
                for prompt in (second.oracle.prompt() for _ in range(PROBES)):
                    assert predictor.hit(prompt).on_gpu <= second.oracle.reused(prompt)
                if replays:
                    assert wrong_hits(second, predictor) == []
                    first = [item.payload for item in follower.said if isinstance(item, Batch) and item.seq == 0][-1]
                    assert type(BatchDecoder().decode(first).events[0]).__name__ == AllBlocksCleared.__name__
            finally:
                second.close()

    run(test())


def test_ranks_publish_on_ports_counted_up(context: Context, seed: int) -> None:
    """Follow two ranks of DP attention, each with its own cache, at the base port plus the rank."""

    async def test() -> None:
        # Free ports are given out one after another.
        port, beside, replay_port, _ = (free_port() for _ in range(4))
        assert beside == port + 1
        ranks = [Engine(port, replay_port, f"{seed} {rank}", rank) for rank in (0, 1)]
        try:
            for rank, engine in enumerate(ranks):
                engine.steps(STEPS)
                follower = Follower(context, port + rank, replay_port + rank, new_predictor())
                async with follower.stream:
                    await follower.until_seq(engine.last_seq)
                    assert follower.predictor.ingest.profile.ranks.published == rank
                    assert wrong_hits(engine, follower.predictor) == []
        finally:
            for engine in ranks:
                engine.close()

    run(test())


def test_media_of_the_tiers_have_the_indexs_names() -> None:
    predictor = new_predictor()
    predictor.take(Connected())
    tokens = list(range(LAYOUT.page))
    media = {StorageMedium.GPU: "GPU", StorageMedium.CPU: CPU, StorageMedium.DISK: STORAGE}
    media[StorageMedium.EXTERNAL] = "EXTERNAL"
    for seq, medium in enumerate(media):
        event = BlockStored([seq - 2], None, tokens, LAYOUT.page, None, medium=medium)
        predictor.take_payload(seq, msgspec.msgpack.encode(KVEventBatch(ts=1.0, events=[event])))
    places = {place.medium for place in predictor.ingest.held.blocks.places}
    assert places == set(media.values())
    for seq, medium in enumerate(media):
        event = BlockRemoved([seq - 2], medium=medium)
        predictor.take_payload(seq + len(media), msgspec.msgpack.encode(KVEventBatch(ts=1.0, events=[event])))
    assert not predictor.ingest.held.blocks.blocks
