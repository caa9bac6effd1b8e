# SPDX-License-Identifier: Apache-2.0
"""A real vLLM engine finds the patch by its entry point, and reports at the addresses that follow from its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import zmq

pytest.importorskip("vllm")

from vllm.distributed.kv_events import AllBlocksCleared, BlockStored, KVEventBatch

from kvrouter.engine_patch.setup.features import FEATURES
from kvrouter.events.patch.messages import ReportCleared, reports_endpoint, requests_endpoint
from kvrouter.router.model.kvcache.block_hash import HashScheme, hash_block, reduce_hash
from tests.engine.engine_process import MAX_MODEL_LEN, NUM_BLOCKS, VOCAB_SIZE, EngineProcess
from tests.engine.patched import StockTopic
from tests.support.ports import free_port
from tests.support.report_peer import Copies, Peer, apply, copies_of, eventually, summed

pytestmark = pytest.mark.engine

PROMPTS = 24


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    # No variable is set, because the patch is on once it is installed.
    with EngineProcess(tmp_path_factory.mktemp("engine"), free_port(), free_port()) as process:
        yield process


@pytest.fixture
def peer(engine: EngineProcess) -> Iterator[Peer]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    endpoints = SimpleNamespace(
        requests_endpoint=requests_endpoint(engine.endpoint), reports_endpoint=reports_endpoint(engine.endpoint)
    )
    with Peer(context, cast(Any, endpoints)) as peer:
        peer.next_heartbeat()  # a peer that has received one is subscribed
        yield peer
    context.term()


def hear(peer: Peer, from_seq: int) -> list[Any]:
    """Return the messages from one seq up to the last one that the engine has sent by now."""
    until = peer.hello().next_seq
    messages = []
    while from_seq < until:
        seq, message = peer.next_events()
        if seq >= from_seq:
            assert seq == from_seq
            messages.append(message)
            from_seq += 1
    return messages


def prompt(rng: Random, stems: list[list[int]]) -> tuple[int, ...]:
    kept = rng.choice(stems)[: rng.randint(1, 900)] if stems and rng.random() < 0.7 else []
    tokens = kept + [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(200, 900))]
    stems.append(tokens)
    return tuple(tokens)


def held_by_stock(payloads: list[bytes]) -> Copies:
    """Return the resident copies according to vLLM's own events, which are enough without resets and offloading."""
    decoder = msgspec.msgpack.Decoder(KVEventBatch)
    held: Copies = Counter()
    for payload in payloads:
        for event in decoder.decode(payload).events:
            assert not isinstance(event, AllBlocksCleared)
            for block_hash in event.block_hashes:
                held[event.group_idx, "GPU", None, cast(int, block_hash)] += 1 if isinstance(event, BlockStored) else -1
    return +held


def test_the_catalog_is_there_before_the_first_request(engine: EngineProcess, peer: Peer) -> None:
    hello = peer.hello()
    assert hello.next_seq == 0
    assert hello.features == dict.fromkeys(FEATURES, "on"), engine.log_tail()
    catalog = hello.catalog
    assert catalog is not None
    kinds = Counter((group.kind, group.sliding_window, group.spec_class) for group in catalog.groups)
    assert kinds == {("sliding_window", 128, 1): 5, ("full_attention", None, 0): 1}
    # The CPU backend chooses one block size for all groups.
    (block_size,) = {group.block_size for group in catalog.groups}
    assert (catalog.hash_block_size, catalog.scheduler_block_size, catalog.align) == (block_size,) * 3
    assert (catalog.max_model_len, catalog.num_gpu_blocks) == (MAX_MODEL_LEN, NUM_BLOCKS)
    assert (catalog.retention_interval, catalog.partial_hits, catalog.hash_algo) == (0, False, "sha256")
    assert catalog.none_hash is not None and catalog.hash_example is not None
    scheme = HashScheme.from_bytes("sha256", bytes.fromhex(catalog.none_hash))
    example = catalog.hash_example
    assert reduce_hash(hash_block(scheme, None, example.token_ids, None)) == example.block_hash


def test_messages_snapshot_and_heartbeat_say_what_the_engine_says(engine: EngineProcess, peer: Peer, seed: int) -> None:
    rng = Random(seed)
    stems: list[list[int]] = []
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    stock = StockTopic(engine.endpoint, engine.replay_endpoint)
    try:
        for _ in range(PROMPTS):
            engine.generate(prompt(rng, stems), rng.choice((2, 40)), None)
        last = engine.last_published(context, -1)
        payloads = [frames[3] for frames in stock.replay(last)[:-1]]
    finally:
        stock.close()
        context.destroy(linger=0)
    held = held_by_stock(payloads)
    eventually(lambda: peer.hello().next_seq == last + 1)
    messages = hear(peer, 0)
    assert [message.batch_seq for message in messages] == list(range(last + 1))
    copies: Copies = Counter()
    for message in messages:
        apply(copies, message.events)
    assert copies == held and len(held) > 20
    assert copies_of(peer.snapshot()) == held
    seq, beat = peer.next_heartbeat()
    while seq <= last:
        seq, beat = peer.next_heartbeat()
    reported = {(p.group_idx, p.medium, p.ownership): (p.blocks, p.copies, p.digest) for p in beat.places}
    assert reported == summed(held)


@pytest.mark.parametrize("clear", [("reset_prefix_cache",), ("sleep", 1), ("sleep", 2)], ids=str)
def test_an_idle_engine_that_is_cleared_says_so(
    clear: tuple[Any, ...], engine: EngineProcess, peer: Peer, seed: int
) -> None:
    engine.generate(prompt(Random(seed), []), 2, None)
    eventually(lambda: bool(copies_of(peer.snapshot())))
    seq = peer.hello().next_seq
    engine.call(*clear)
    # The reporter's thread reports the clear a moment later.
    eventually(lambda: peer.hello().next_seq > seq)
    (message,) = hear(peer, seq)
    assert message.events == [ReportCleared("GPU", "prefix cache reset")]
    assert message.batch_seq is None
    assert copies_of(peer.snapshot()) == {}
    if clear[0] == "sleep":
        engine.call("wake_up")
    assert engine.generate(prompt(Random(seed), []), 2, None)["cached"] == 0
