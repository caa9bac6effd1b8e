# SPDX-License-Identifier: Apache-2.0
"""The CPU tier, and moves to it and from it, by cases small enough to follow by hand."""

from __future__ import annotations

import pytest

from kvrouter.events.vllm.wire import WireRemoved, WireStored
from kvrouter.simulator.cache.cpu_tier import CacheEvent, CpuTier, EvictedChunk, OffloadedChunk, Uses
from kvrouter.simulator.cache.job import Handover
from kvrouter.simulator.cache.pool import Key, Stored
from kvrouter.simulator.cache.shapes import Geometry, gpt_oss, llama
from kvrouter.simulator.engine.replica import Replica, Stuck
from kvrouter.simulator.engine.timing import Timing
from kvrouter.simulator.engine.virtual_time import ReplicaFleet, VirtualReplica
from kvrouter.simulator.http.event_stream import to_wire


def key(n: int, group_idx: int = 0) -> Key:
    return Key(group_idx, bytes([n]))


def store(tier: CpuTier, *numbers: int) -> list[Key] | None:
    new = tier.begin_store({key(n): n for n in numbers}, Uses())
    tier.end_store(new or ())
    return new


def test_a_chunk_that_is_being_written_is_not_read() -> None:
    tier = CpuTier(4)
    assert tier.begin_store({key(1): 16}, Uses()) == [key(1)]
    assert tier.lookup(key(1)) is None
    assert tier.lookup(key(2)) is False
    tier.end_store([key(1)])
    assert tier.lookup(key(1)) is True
    assert tier.take_events() == [OffloadedChunk(key(1))]
    assert tier.begin_store({key(1): 16}, Uses()) == []


def test_the_oldest_idle_chunks_go_and_offered_ones_stay() -> None:
    tier = CpuTier(3)
    store(tier, 1, 2, 3)
    tier.take_events()
    assert store(tier, 1, 4) == [key(4)]
    assert tier.take_events() == [EvictedChunk(0, (key(2).block_hash,)), OffloadedChunk(key(4))]
    tier.begin_load([key(3)])
    assert store(tier, 5) == [key(5)]
    assert tier.resident() == {key(3), key(4), key(5)}


def test_without_room_nothing_is_stored() -> None:
    tier = CpuTier(2)
    store(tier, 1, 2)
    tier.begin_load([key(1), key(2)])
    assert store(tier, 3) is None
    tier.end_load([key(1)])
    assert store(tier, 3, 4) is None
    assert tier.resident() == {key(1), key(2)}


def test_the_beginning_of_a_used_text_is_kept_longest() -> None:
    tier = CpuTier(4)
    uses = Uses()
    tier.end_store(tier.begin_store({key(1): 16, key(2): 32, key(1, 1): 16}, uses) or ())
    store(tier, 9)
    tier.used(uses)
    evictions = []
    for n in range(20, 24):
        tier.take_events()
        store(tier, n)
        evictions += [event for event in tier.take_events() if isinstance(event, EvictedChunk)]
    assert evictions == [
        EvictedChunk(0, (key(9).block_hash,)),
        EvictedChunk(0, (key(2).block_hash,)),
        EvictedChunk(1, (key(1).block_hash,)),
        EvictedChunk(0, (key(1).block_hash,)),
    ]


def replica(geometry: Geometry, blocks: int, chunks: int) -> tuple[Replica, list[list[CacheEvent]]]:
    batches: list[list[CacheEvent]] = []
    return Replica(geometry, blocks, on_step=batches.append, chunk_tokens=64, cpu_chunks=chunks), batches


def test_a_prompt_comes_back_from_the_cpu() -> None:
    sim, batches = replica(llama(16), 8, 20)
    prompt = list(range(100))
    sim.run(prompt)
    sim.run(list(range(1000, 1100)))
    assert sim.find(prompt).tokens == 0
    assert sim.reach(sim.text(prompt)) == (0, 96)
    batches.clear()
    assert sim.run(prompt).reused_tokens == 96
    stored = [event for batch in batches for event in batch if isinstance(event, Stored)]
    # The blocks that a load has written are findable on the GPU, and reported.
    assert stored[0].hashes == tuple(sim.text(prompt).hashes)
    assert sim.pool.num_free == 7


def test_answers_are_not_offloaded() -> None:
    sim, batches = replica(llama(16), 20, 20)
    sim.run(list(range(40)), max_tokens=60)
    assert len([event for batch in batches for event in batch if isinstance(event, OffloadedChunk)]) == 2


def test_only_the_tail_of_a_window_is_offloaded() -> None:
    sim, batches = replica(gpt_oss(16, 32), 60, 60)
    sim.run(list(range(200)))
    keys = [event.key for batch in batches for event in batch if isinstance(event, OffloadedChunk)]
    assert len([k for k in keys if k.group_idx == 1]) == 12
    assert len([k for k in keys if k.group_idx == 0]) == 2


def test_events_of_the_cpu_tell_hash_and_group() -> None:
    wire = to_wire(OffloadedChunk(key(1, 1)), gpt_oss())
    assert isinstance(wire, WireStored)
    assert (wire.medium, wire.group_idx, wire.block_hashes, wire.token_ids, wire.block_size) == (
        "CPU",
        1,
        [key(1).block_hash],
        [],
        0,
    )
    removal = to_wire(EvictedChunk(0, (b"a", b"b")), gpt_oss())
    assert isinstance(removal, WireRemoved)
    assert (removal.medium, removal.group_idx, removal.block_hashes) == ("CPU", 0, [b"a", b"b"])


# A prefilled token takes 1 ms, a loaded token 0.1 ms, a step 10 ms, and a load 5 ms.
TIMING = Timing(1000, 0.010, 0.0, 10_000, 0.005)


def virtual(blocks: int, chunks: int) -> tuple[ReplicaFleet, Replica]:
    sim, _ = replica(llama(16), blocks, chunks)
    return ReplicaFleet([VirtualReplica(sim, TIMING)]), sim


def times(fleet: ReplicaFleet) -> list[tuple[float, str]]:
    return [(round(moment.time_s, 6), moment.kind) for moment in fleet.advance()]


def test_a_load_takes_its_time_and_no_computing() -> None:
    fleet, sim = virtual(8, 20)
    fleet.submit(0, sim.text(list(range(60))), 1, 0.0)
    fleet.submit(0, sim.text(list(range(500, 600))), 1, 0.0)
    list(fleet.advance())
    assert sim.find(list(range(60))).tokens == 0
    job = fleet.submit(0, sim.text(list(range(60))), 1, 10.0)
    # 48 tokens come back in 9.8 ms, and 12 are computed in a step of 22 ms.
    assert times(fleet) == [(10.0318, "first_token"), (10.0318, "done")]
    assert (job.reused, job.loaded) == (0, 48)


def test_others_are_computed_while_one_loads() -> None:
    fleet, sim = virtual(12, 20)
    fleet.submit(0, sim.text(list(range(60))), 1, 0.0)
    list(fleet.advance())
    fleet.submit(0, sim.text(list(range(500, 660))), 1, 0.0)
    list(fleet.advance())
    first = fleet.submit(0, sim.text(list(range(60))), 1, 10.0)
    second = fleet.submit(0, sim.text(list(range(900, 930))), 1, 10.001)
    finished = [(moment.job is first, round(moment.time_s, 4)) for moment in fleet.advance() if moment.kind == "done"]
    # The second request begins at once; the first joins after that step, long after its load has ended.
    assert finished == [(False, 10.041), (True, 10.063)]
    assert second.loaded == 0


def test_an_aborted_load_gives_its_blocks_back_when_it_ends() -> None:
    sim, _ = replica(llama(16), 9, 20)
    prompt = list(range(100))
    sim.run(prompt)
    sim.run(list(range(1000, 1100)))
    job = sim.submit(sim.text(prompt), 1)
    step = sim.begin_step()
    (load,) = step.loads
    sim.end_step(step)
    sim.abort(job)
    assert sim.pool.num_free == 2
    step = sim.begin_step()
    sim.end_step(step, [load.number])
    assert sim.pool.num_free == 8


def test_a_pool_in_which_no_request_can_continue_is_an_error() -> None:
    batches: list[list[CacheEvent]] = []
    sim = Replica(gpt_oss(16, 32, None), 34, on_step=batches.append, chunk_tokens=16, cpu_chunks=200)
    fleet = ReplicaFleet([VirtualReplica(sim, TIMING)])
    for n in range(2):
        fleet.submit(0, sim.text(list(range(1000 * n, 1000 * n + 160))), 1, n)
        list(fleet.advance())
        sim.reset_prefix_cache()
    # Both prompts come back from the CPU at once, with much to compute behind them, in a pool for one and a half
    # prompts.
    for n in range(2):
        fleet.submit(0, sim.text(list(range(1000 * n, 1000 * n + 165)) + [7] * 60), 100, 10.0)
    with pytest.raises(Stuck, match="more blocks"):
        list(fleet.advance())


def test_a_received_prompt_is_not_computed() -> None:
    sim, _ = replica(llama(16), 20, 1)
    text = sim.text(list(range(64)))
    job = sim.prepare(text, 2, handover=Handover.TAKES)
    sim.scheduler.add(job)
    while not job.finished:
        step = sim.begin_step()
        # Only the last token is computed, and then the sampled one.
        assert step.prefill_tokens <= 1
        sim.end_step(step, [transfer.number for transfer in (*step.loads, *step.stores)])
    assert job.cached == 64
    assert sim.find(list(range(65))).tokens == 64


@pytest.mark.parametrize("chunks", [-1, 0])
def test_a_tier_without_room_is_refused(chunks: int) -> None:
    with pytest.raises(ValueError, match="at least"):
        CpuTier(chunks)
