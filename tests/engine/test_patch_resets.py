# SPDX-License-Identifier: Apache-2.0
"""Clears name their medium and are reported when they happen, without a following engine step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

pytest.importorskip("vllm")

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import core
from vllm.v1.kv_offload.base import Medium, OffloadingEvent, make_offload_key

from kvrouter.events.patch.messages import ReportCleared, ReportStored
from tests.engine.group_sets import GPU_SETS, OFFLOAD_SETS
from tests.engine.patched import Records, StockTopic, WatchedOracle, patched, tap_of

pytestmark = pytest.mark.engine

FULL = next(offload_set for offload_set in OFFLOAD_SETS if offload_set.name == "cpu full, placeholder, 1 a chunk")


@pytest.fixture
def records() -> Iterator[Records]:
    with patched() as records:
        yield records
    assert records.texts == []


@pytest.fixture
def oracle(records: Records, model: Path, seed: int) -> Iterator[WatchedOracle]:
    """Yield an idle engine with blocks on the GPU and on the CPU."""
    with WatchedOracle(FULL.group_set, model, Random(seed), FULL.connector_config()) as oracle:
        oracle.work(80)
        oracle.drain()
        oracle.verify()
        assert oracle.held_on_gpu() and oracle.held_on_cpu()
        yield oracle


def cleared(oracle: WatchedOracle) -> list[tuple[str, str]]:
    """Return (medium, reason) of the clears since the last call, and check that nothing else was reported."""
    events = [event for message in oracle.hear() for event in message.events]
    assert all(isinstance(event, ReportCleared) for event in events)
    return [(event.medium, event.reason) for event in events if isinstance(event, ReportCleared)]


def told(oracle: WatchedOracle) -> list[tuple[str, str | None, type]]:
    """Return (medium, owner, kind) of every event since the last call."""
    events = [event for message in oracle.hear() for event in message.events]
    return [(event.medium, getattr(event, "ownership", None), type(event)) for event in events]


def test_a_gpu_reset_leaves_the_cpu_tier(oracle: WatchedOracle) -> None:
    on_cpu = oracle.held_on_cpu()
    assert oracle.scheduler.reset_prefix_cache()
    assert cleared(oracle) == [("GPU", "prefix cache reset")]
    assert oracle.copies == on_cpu
    oracle.verify()


def test_a_connector_reset_clears_the_cpu_tier_too(oracle: WatchedOracle) -> None:
    assert oracle.scheduler.reset_prefix_cache(reset_connector=True)
    assert cleared(oracle) == [("GPU", "prefix cache reset"), ("CPU", "connector reset")]
    oracle.verify()
    assert not oracle.copies


def test_a_refused_reset_clears_the_cpu_tier_all_the_same(oracle: WatchedOracle) -> None:
    """Reset while a request runs: the GPU's blocks stay and vLLM returns False, but the connector is emptied."""
    oracle.submit(oracle.tree.request())
    oracle.step()
    oracle.hear()
    on_gpu = oracle.held_on_gpu()
    assert oracle.scheduler.reset_prefix_cache(reset_connector=True) is False
    assert cleared(oracle) == [("CPU", "connector reset")]
    assert oracle.copies == on_gpu == oracle.held()
    oracle.drain()
    oracle.verify()


def test_a_refused_gpu_reset_clears_nothing(oracle: WatchedOracle) -> None:
    oracle.submit(oracle.tree.request())
    oracle.step()
    oracle.hear()
    assert oracle.scheduler.reset_prefix_cache() is False
    assert cleared(oracle) == []
    oracle.drain()
    oracle.verify()


@pytest.mark.parametrize("level", [0, 1, 2])
def test_sleep(oracle: WatchedOracle, level: int) -> None:
    """Levels 1 and 2 clear both tiers before the memory goes; level 0 keeps everything."""
    engine: Any = object.__new__(core.EngineCore)
    engine.scheduler = oracle.scheduler
    engine.mm_receiver_cache = None
    done: list[Any] = []
    engine.model_executor = SimpleNamespace(
        sleep=done.append,
        collective_rpc=lambda name: None,
        reset_mm_cache=lambda: None,
        reset_encoder_cache=lambda: None,
    )
    before = oracle.held()
    engine.sleep(level)
    assert done == ([level] if level else [])
    assert cleared(oracle) == ([("GPU", "prefix cache reset"), ("CPU", "connector reset")] if level else [])
    assert oracle.copies == (before if level == 0 else {})
    oracle.scheduler.set_pause_state(PauseState.UNPAUSED)
    oracle.work(30)
    oracle.drain()
    oracle.verify()


def test_the_engines_topic_tells_it_later_and_ours_not_again(oracle: WatchedOracle) -> None:
    """Receive vLLM's own AllBlocksCleared with the next step: its batch is counted, but its clear is not repeated."""
    assert oracle.scheduler.reset_prefix_cache()
    oracle.hear()
    assert [type(event).__name__ for event in oracle.scheduler.kv_cache_manager.block_pool.kv_event_queue] == [
        "AllBlocksCleared"
    ]
    batches = oracle.last_seq
    oracle.work(10)
    fresh = oracle.hear()
    assert oracle.last_seq > batches
    assert fresh[0].batch_seq == batches + 1
    assert not [event for message in fresh for event in message.events if isinstance(event, ReportCleared)]
    oracle.drain()
    oracle.verify()


def test_what_was_stored_and_not_reported_before_a_reset_is_not_reported_after_it(
    records: Records, model: Path, seed: int
) -> None:
    """Reset between the scheduling of a step and its end, when the pool holds events that are in no batch yet."""
    group_set = next(group_set for group_set in GPU_SETS if group_set.name == "full+window")
    with WatchedOracle(group_set, model, Random(seed)) as oracle:
        oracle.work(40)
        oracle.drain()
        oracle.submit(oracle.tree.request())
        oracle.scheduler.schedule()
        pool = oracle.scheduler.kv_cache_manager.block_pool
        assert pool.kv_event_queue
        assert oracle.scheduler.reset_prefix_cache(reset_running_requests=True)
        assert oracle.hear()[-1].events == [ReportCleared("GPU", "prefix cache reset")]
        oracle.drain()
        oracle.verify()


def test_held_events_reach_the_engines_topic_in_their_order(oracle: WatchedOracle) -> None:
    """Reset the connector, which takes the manager's events early; the engine's topic has them with its next batch."""
    offload = oracle.scheduler.connector.connector_scheduler
    manager = offload.manager
    key = make_offload_key(bytes(range(32)), 0)
    early = OffloadingEvent([key], Medium.CPU, True)
    other = OffloadingEvent([key], Medium.STORAGE, False, ownership="disk")
    late = OffloadingEvent([key], Medium.CPU, False)
    manager.events += [early, other]
    oracle.scheduler.reset_connector_cache()
    # On our topic, the emptied tier's event is void, and the other tier's event is reported at once.
    assert told(oracle) == [("STORAGE", "disk", ReportStored), ("CPU", None, ReportCleared)]
    manager.events.append(late)
    oracle.step()  # an empty step takes events like any other step
    assert told(oracle) == [("CPU", None, ReportStored)]
    topic = StockTopic(oracle.endpoint, oracle.replay_endpoint)
    try:
        frames = topic.replay(oracle.last_seq)
    finally:
        topic.close()
    stock = [(event["type"], event["medium"]) for event in msgspec.msgpack.decode(frames[-2][3])[1]]
    assert stock == [("BlockRemoved", "CPU"), ("BlockStored", "STORAGE"), ("BlockStored", "CPU")]


def test_two_pools_of_one_queue(oracle: WatchedOracle) -> None:
    """Clear a host pool that shares the device pool's queue (HiSparse), and report each clear once, by its medium."""
    from vllm.v1.hisparse.block_pool import SharedEventQueueBlockPool

    device = oracle.scheduler.kv_cache_manager.block_pool
    host = SharedEventQueueBlockPool(
        num_gpu_blocks=4,
        enable_caching=True,
        hash_block_size=16,
        enable_kv_cache_events=True,
        medium="CPU",
        event_owner=device,
    )
    tap_of(oracle)._watch_reset(host, "CPU")
    assert device.reset_prefix_cache() and host.reset_prefix_cache()
    assert cleared(oracle) == [("GPU", "prefix cache reset"), ("CPU", "prefix cache reset")]
    oracle.work(5)
    assert not [e for message in oracle.hear() for e in message.events if isinstance(e, ReportCleared)]


def test_nothing_wrapped_outlives_its_engine(oracle: WatchedOracle) -> None:
    """Check that the block pool's class is stock: classes are patched only at the two places that all engines share."""
    pool = type(oracle.scheduler.kv_cache_manager.block_pool)
    methods: list[Callable[..., Any]] = [pool.reset_prefix_cache, pool.cache_full_blocks, pool.cache_partial_block]
    assert all(method.__module__ == "vllm.v1.core.block_pool" for method in methods)
