# SPDX-License-Identifier: Apache-2.0
"""The patch's reports equal the engine's blocks, copy for copy, at the right positions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

pytest.importorskip("vllm")

from vllm.v1.kv_cache_interface import FullAttentionSpec

from kvrouter.events.patch.messages import ReportCleared, ReportRemoved, ReportStored
from tests.engine.group_sets import GPU_SETS, OFFLOAD_SETS, GroupSet, OffloadSet
from tests.engine.patched import WatchedOracle, patched, positions_of

pytestmark = pytest.mark.engine

PHASES = 8
ROUNDS = 40


def work_with_resets(oracle: WatchedOracle, rng: Random) -> dict[str, int]:
    """Run a random load with random resets, and return how many resets of each kind cleared a cache.

    Everything is compared after every second phase, and in the end.
    """
    done = {"gpu": 0, "running": 0, "connector": 0}
    for phase in range(PHASES):
        oracle.work(ROUNDS)
        kind = rng.choice(("gpu", "running", "connector", "none"))
        if kind == "gpu":
            if rng.random() < 0.7:
                oracle.drain()
            done[kind] += oracle.scheduler.reset_prefix_cache()
        elif kind == "running" and oracle.scheduler.connector is None:
            oracle.scheduler.reset_prefix_cache(reset_running_requests=True)
            done[kind] += 1
        elif kind == "connector":
            if any(not isinstance(spec, FullAttentionSpec) for spec in oracle.group_set.specs):
                # vLLM 0.32 itself may fail with a KeyError when window blocks of running requests are stored again.
                oracle.drain()
            oracle.scheduler.reset_prefix_cache(reset_connector=True)
            done[kind] += oracle.scheduler.connector is not None
        if phase % 2:
            oracle.drain()
            # A running request holds blocks whose events wait for its step; an idle engine has reported everything.
            oracle.verify()
    oracle.drain()
    oracle.verify()
    return done


@pytest.mark.parametrize("group_set", GPU_SETS, ids=lambda group_set: group_set.name)
def test_gpu_blocks(group_set: GroupSet, model: Path, seed: int, table: Callable[..., None]) -> None:
    rng = Random(f"{seed} {group_set.name}")
    with patched() as records, WatchedOracle(group_set, model, rng) as oracle:
        done = work_with_resets(oracle, rng)
        stored = check_positions(oracle)
        removed = sum(len(e.hashes) // 8 for m in oracle.messages for e in m.events if isinstance(e, ReportRemoved))
        assert stored > 100 and removed > 50
        headings = ("set", "stored", "removed", "resets")
        table("Engine patch, GPU", headings, (group_set.name, str(stored), str(removed), str(sum(done.values()))))
    assert records.texts == []


@pytest.mark.parametrize("offload_set", OFFLOAD_SETS, ids=lambda offload_set: offload_set.name)
def test_gpu_and_cpu_blocks(offload_set: OffloadSet, model: Path, seed: int, table: Callable[..., None]) -> None:
    rng = Random(f"{seed} {offload_set.name}")
    group_set = offload_set.group_set
    with patched() as records, WatchedOracle(group_set, model, rng, offload_set.connector_config()) as oracle:
        done = work_with_resets(oracle, rng)
        stored = check_positions(oracle)
        cpu = [e for m in oracle.messages for e in m.events if not isinstance(e, ReportCleared) and e.medium == "CPU"]
        cpu_stored = sum(len(e.hashes) // 8 for e in cpu if isinstance(e, ReportStored))
        cpu_removed = sum(len(e.hashes) // 8 for e in cpu if isinstance(e, ReportRemoved))
        assert cpu_stored > 100
        for event in cpu:
            if isinstance(event, ReportStored):
                spec = group_set.specs[event.group_idx or 0]
                assert event.block_size in (spec.block_size, oracle.hash_block_size)
                assert event.sliding_window == getattr(spec, "sliding_window", None)
                assert event.kind
        headings = ("set", "stored", "cpu stored", "cpu removed", "connector resets")
        row = (offload_set.name, str(stored), str(cpu_stored), str(cpu_removed), str(done["connector"]))
        table("Engine patch, GPU and CPU", headings, row)
    assert records.texts == []


def check_positions(oracle: WatchedOracle) -> int:
    """Compare the position of each stored block and the parent of each event with the requests'.

    Returns the number of stored blocks.
    """
    ends, parents = oracle.ends(), oracle.parents()
    stored = 0
    for message in oracle.messages:
        for event in message.events:
            if not isinstance(event, ReportStored):
                continue
            positions = list(positions_of(event))
            assert len(positions) == len(event.hashes) // 8
            for block_hash, end in positions:
                assert ends[block_hash] == end
            assert event.parent_hash == parents[positions[0][0], event.block_size]
            stored += len(positions)
    return stored


def test_batches_carry_the_stock_seq(model: Path, seed: int) -> None:
    """Every batch of the engine's topic has its message, in order; a message that was sent at once has no batch seq."""
    rng = Random(seed)
    group_set = next(group_set for group_set in GPU_SETS if group_set.name == "full+window")
    with patched(), WatchedOracle(group_set, model, rng) as oracle:
        oracle.work(60)
        oracle.drain()
        assert oracle.scheduler.reset_prefix_cache()
        oracle.work(20)
        oracle.hear()
        seqs = [message.batch_seq for message in oracle.messages]
        assert [seq for seq in seqs if seq is not None] == list(range(oracle.last_seq + 1))
        assert seqs.count(None) == 1


@pytest.mark.parametrize("name", ["full+window", "full+mamba", "3-way"])
def test_blocks_announced_again_are_not_counted(name: str, model: Path, seed: int) -> None:
    """Announce blocks again with kv_cache_report_mode=full, and count only the resident copies.

    This mode repeats resident blocks on the engine's topic, also null ones.
    """
    rng = Random(seed)
    group_set = next(group_set for group_set in GPU_SETS if group_set.name == name)
    with (
        patched() as records,
        WatchedOracle(group_set, model, rng, extra_args={"kv_cache_report_mode": "full"}) as oracle,
    ):
        for _ in range(4):
            oracle.work(60)
            oracle.drain()
            oracle.verify()
        reported = sum(len(e.hashes) // 8 for m in oracle.messages for e in m.events if isinstance(e, ReportStored))
        assert reported < oracle.traffic.stored  # it did repeat some
    assert records.texts == []
