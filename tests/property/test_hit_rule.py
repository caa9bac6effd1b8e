# SPDX-License-Identifier: Apache-2.0
"""The hit rule against its definition: the longest aligned boundary that is good for every group.

EAGLE, partial hits and the offload rule have no short definition; they are compared with vLLM itself (`make
test-engine`).
"""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrouter.router.base.common.compiled import UNCOMPILED
from kvrouter.router.base.common.ids import CPU, GPU, STORAGE, Place
from kvrouter.router.model.kvcache.catalog import Group
from kvrouter.router.model.kvcache.offload_connectors import DISK_OWNER, OFFLOADING, SIMPLE_CPU
from kvrouter.router.model.workers.registration import CatalogSpec
from tests.support.examples import examples
from tests.support.judging import judge

# With Mamba or chunked groups vLLM requires one block size; full and sliding-window groups may differ.
UNIFORM_KINDS = (
    "full_attention",
    "mla_attention",
    "sliding_window",
    "sliding_window_mla",
    "mamba",
    "chunked_local_attention",
)


def make_group(draw: random.Random, index: int, kind: str, block: int) -> Group:
    window = draw.choice([1, 2, block, block + 1, 3 * block, 40]) if kind.startswith("sliding") else None
    chunk = draw.choice([2, 3]) * block if kind.startswith("chunked") else None
    return Group(index, kind, block, window, chunk)


def make_groups(draw: random.Random) -> tuple[Group, ...]:
    if draw.random() < 0.3:
        kinds = [draw.choice(["full_attention", "sliding_window"]) for _ in range(draw.randint(2, 4))]
        return tuple(make_group(draw, i, kind, draw.choice([4, 8])) for i, kind in enumerate(kinds))
    block = draw.choice([4, 8])
    kinds = [draw.choice(UNIFORM_KINDS) for _ in range(draw.randint(1, 5))]
    return tuple(make_group(draw, i, kind, block) for i, kind in enumerate(kinds))


def make_residency(draw: random.Random, groups: tuple[Group, ...], num_tokens: int) -> dict[Place, set[int]]:
    hash_block = math.gcd(*(group.block_size for group in groups))
    density = draw.choice([0.5, 0.85, 0.97, 1.0])
    resident = {}
    for group in groups:
        scale = group.block_size // hash_block
        ends = range(scale - 1, num_tokens // hash_block, scale)
        resident[Place(group.group_idx, GPU)] = {i for i in ends if draw.random() < density}
    return resident


def good(group: Group, boundary: int, held: set[int], hash_block: int) -> bool:
    """Return whether the engine can continue from `boundary` as far as this group is concerned."""
    block = group.block_size
    if boundary % block:
        return False

    def has(i: int) -> bool:
        return (i + 1) * block // hash_block - 1 in held

    last = boundary // block
    if group.kind in ("full_attention", "mla_attention"):
        return all(has(i) for i in range(last))
    if group.kind == "mamba":
        return boundary == 0 or has(last - 1)
    if group.kind.startswith("chunked"):
        assert group.attention_chunk_size is not None
        first = boundary // group.attention_chunk_size * group.attention_chunk_size // block
        return all(has(i) for i in range(first, last))
    assert group.sliding_window is not None
    # The block before the boundary must be resident even when the window is one token wide, because vLLM's scan begins
    # at a block that it holds.
    need = max(1, -(-(group.sliding_window - 1) // block))
    return all(has(i) for i in range(max(0, last - need), last))


def expected(groups: tuple[Group, ...], resident: dict[Place, set[int]], num_tokens: int) -> int:
    """Return the greatest aligned boundary that is good for every group."""
    hash_block = math.gcd(*(group.block_size for group in groups))
    align = math.lcm(*(group.block_size for group in groups))
    for boundary in range((num_tokens - 1) // align * align, -1, -align):
        if all(good(g, boundary, resident[Place(g.group_idx, GPU)], hash_block) for g in groups):
            return boundary
    return 0


@settings(max_examples=examples(500))
@given(seed=st.integers(0, 2**32))
def test_hit_is_the_longest_boundary_good_for_every_group(seed: int) -> None:
    draw = random.Random(seed)
    groups = make_groups(draw)
    num_tokens = draw.randint(1, 160)
    resident = make_residency(draw, groups, num_tokens)
    hit = judge(groups, resident, num_tokens)
    assert hit.on_gpu == expected(groups, resident, num_tokens), (groups, resident, num_tokens)
    assert list(hit.by_tier) == sorted(hit.by_tier)


@settings(max_examples=examples(150))
@given(seed=st.integers(0, 2**32))
def test_more_blocks_never_shorten_a_hit(seed: int) -> None:
    draw = random.Random(seed)
    groups = make_groups(draw)
    num_tokens = draw.randint(1, 160)
    resident = make_residency(draw, groups, num_tokens)
    more = {place: held | set(range(0, 200, draw.randint(1, 4))) for place, held in resident.items()}
    assert judge(groups, more, num_tokens).on_gpu >= judge(groups, resident, num_tokens).on_gpu


@settings(max_examples=examples(150))
@given(seed=st.integers(0, 2**32))
def test_every_group_alone_covers_at_least_the_hit(seed: int) -> None:
    draw = random.Random(seed)
    groups = make_groups(draw)
    num_tokens = draw.randint(1, 160)
    hit = judge(groups, make_residency(draw, groups, num_tokens), num_tokens)
    assert len(hit.groups) == len(groups)
    assert all(cover.covered >= hit.on_gpu for cover in hit.groups)
    best = (num_tokens - 1) // math.lcm(*(g.block_size for g in groups)) * math.lcm(*(g.block_size for g in groups))
    assert (hit.limited_by is None) == (hit.on_gpu == best)


@settings(max_examples=examples(200))
@given(seed=st.integers(0, 2**32))
def test_hashes_past_what_is_resident_need_not_be_queried(seed: int) -> None:
    """Hash only part of a prompt whose later blocks no worker holds, and compare the hit with that of all hashes."""
    draw = random.Random(seed)
    groups = make_groups(draw)
    resident = make_residency(draw, groups, draw.randint(1, 100))
    resident |= {Place(g.group_idx, CPU): set(range(draw.randint(0, 12))) for g in groups}
    whole = judge(groups, resident, 400)
    part = judge(groups, resident, 400, hashed_tokens=160)
    assert part.by_tier == whole.by_tier


@pytest.mark.parametrize("kind", ["full_attention", "sliding_window", "mamba"])
def test_a_claimed_length_costs_no_time(kind: str) -> None:
    groups = (Group(0, kind, 16, 64 if kind == "sliding_window" else None), FULL_TWIN)
    resident = {Place(0, GPU): range(4), Place(1, GPU): range(4), Place(0, CPU): range(6), Place(1, CPU): range(6)}
    hit = judge(groups, resident, 2**60, hashed_tokens=160)
    assert hit.by_tier[:2] == (64, 96)


FULL_TWIN = Group(1, "full_attention", 16)
FULL = Group(0, "full_attention", 16)
WINDOW = Group(1, "sliding_window", 16, 64)
STATE = Group(2, "mamba", 16)


def test_window_evicted_means_no_hit_however_long_the_full_attention_run_is() -> None:
    hit = judge((FULL, WINDOW), {Place(0, GPU): range(12), Place(1, GPU): ()}, 200)
    assert hit.on_gpu == 0
    assert hit.limited_by is not None and hit.limited_by.group_idx == 1
    assert {cover.group_idx: cover.covered for cover in hit.groups} == {0: 192, 1: 0}


@pytest.mark.parametrize(
    ("held", "tokens"), [((8, 9, 10, 11), 192), ((7, 9, 10, 11), 0), ((7, 8, 9, 10), 176), ((0, 1), 32)]
)
def test_a_window_is_whole_or_worthless(held: tuple[int, ...], tokens: int) -> None:
    assert judge((FULL, WINDOW), {Place(0, GPU): range(12), Place(1, GPU): held}, 193).on_gpu == tokens


def test_a_later_state_cannot_restore_an_earlier_position() -> None:
    resident = {Place(0, GPU): range(6), Place(2, GPU): (8, 11)}
    assert judge((FULL, STATE), resident, 200).on_gpu == 0
    resident[Place(2, GPU)] = (3, 8)
    assert judge((FULL, STATE), resident, 200).on_gpu == 64


def test_the_last_token_is_always_computed() -> None:
    assert judge((FULL,), {Place(0, GPU): range(12)}, 192).on_gpu == 176
    assert judge((FULL,), {Place(0, GPU): range(12)}, 193).on_gpu == 192
    assert judge((FULL,), {Place(0, GPU): range(12)}, 1).on_gpu == 0


def test_equal_specs_must_hold_a_block_in_all_groups() -> None:
    twin = Group(1, "full_attention", 16)
    assert judge((FULL, twin), {Place(0, GPU): range(12), Place(1, GPU): range(5)}, 200).on_gpu == 80


def test_a_group_out_of_prefix_caching_has_no_say() -> None:
    scratch = Group(1, "sliding_window", 16, 64, prefix_cacheable=False)
    assert judge((FULL, scratch), {Place(0, GPU): range(12), Place(1, GPU): ()}, 200).on_gpu == 192


def test_eagle_drops_the_last_block() -> None:
    eagle = Group(0, "full_attention", 16, eagle=True)
    assert judge((eagle,), {Place(0, GPU): range(12)}, 200).on_gpu == 176


def test_offloaded_chunks_extend_the_hit_tier_by_tier() -> None:
    resident = {Place(0, GPU): range(4), Place(0, CPU): range(2, 8), Place(0, STORAGE, DISK_OWNER): (8, 9)}
    hit = judge((FULL,), resident, 200)
    assert hit.by_tier == (64, 128, 160)


def test_a_disk_tier_that_never_tells_removals_earns_nothing() -> None:
    resident = {Place(0, GPU): range(4), Place(0, CPU): range(2, 8), Place(0, STORAGE): (8, 9)}
    hit = judge((FULL,), resident, 200)
    assert hit.by_tier == (64, 128, 128)
    assert hit.limited_by is not None and "earn no credit" in hit.limited_by.why


SIMPLE = CatalogSpec(offload_connector=SIMPLE_CPU, offload_partial_hits=True)


def test_the_last_token_is_computed_also_where_the_cpu_tier_has_its_block() -> None:
    """OffloadingConnector offers a prompt of whole chunks up to its end, SimpleCPUOffloadConnector does not."""
    held = {Place(0, CPU): range(12)}
    assert judge((FULL,), held, 192).by_tier[1] == 192
    assert judge((FULL,), held, 192, SIMPLE).by_tier[1] == 176


def test_a_window_must_be_on_one_tier_behind_the_local_hit() -> None:
    held = {Place(0, GPU): range(6), Place(1, GPU): (2, 3, 4, 5), Place(0, CPU): range(12), Place(1, CPU): (6, 7, 8)}
    hit = judge((FULL, WINDOW), held, 200, SIMPLE)
    assert hit.by_tier[:2] == (96, 144)
    held[Place(1, CPU)] = (7, 8, 9)
    assert judge((FULL, WINDOW), held, 200, SIMPLE).by_tier[1] == 96


def test_both_media_of_a_connector_that_has_one_earn_nothing() -> None:
    held = {Place(0, CPU): range(12), Place(0, STORAGE): range(12)}
    hit = judge((FULL,), held, 200, SIMPLE)
    assert hit.by_tier[1:] == (0, 0)
    assert judge((FULL,), {Place(0, STORAGE): range(12)}, 200, SIMPLE).tokens == 192


@settings(max_examples=examples(400))
@given(seed=st.integers(0, 2**32))
def test_a_suffix_hit_is_the_hit_of_the_rest_as_a_prompt_of_its_own(seed: int) -> None:
    draw = random.Random(seed)
    groups = make_groups(draw)
    num_tokens = draw.randint(1, 320)
    gpu = make_residency(draw, groups, draw.randint(0, num_tokens))
    cpu = make_residency(draw, groups, num_tokens)
    resident = gpu | {Place(place.group_idx, CPU): held for place, held in cpu.items()}
    hit = judge(groups, resident, num_tokens, SIMPLE)
    hash_block = math.gcd(*(group.block_size for group in groups))
    rest = {
        place: {i - hit.on_gpu // hash_block for i in held if i * hash_block >= hit.on_gpu}
        for place, held in cpu.items()
    }
    misplaced = any(g.attention_chunk_size and hit.on_gpu % g.attention_chunk_size for g in groups)
    rest_hit = 0 if misplaced else judge(groups, rest, num_tokens - hit.on_gpu).on_gpu
    assert hit.by_tier[1] == hit.on_gpu + rest_hit, (groups, resident, num_tokens)


def test_media_that_may_hold_anything_earn_nothing() -> None:
    hit = judge((FULL,), {Place(0, "FS"): range(12), Place(0, "OBJ"): range(12)}, 200)
    assert hit.by_tier == (0, 0, 0)


def test_part_of_a_chunk_earns_nothing() -> None:
    spec = CatalogSpec(offload_blocks_per_chunk=4, offload_connector=OFFLOADING)
    assert judge((FULL,), {Place(0, CPU): range(8)}, 100, spec).by_tier[1] == 64
    assert judge((FULL,), {Place(0, CPU): range(7)}, 200, spec).by_tier[1] == 64


@pytest.mark.parametrize(("held", "cpu"), [(range(8), 128), ((0,), 16), ((2, 3, 4), 80), ((3,), 32), ((3, 5, 7), 32)])
def test_an_unknown_chunk_size_earns_nothing_until_the_chunks_show_it(held: tuple[int, ...], cpu: int) -> None:
    resident = {Place(0, GPU): range(2 if cpu != 128 and 0 not in held else 0), Place(0, CPU): held}
    assert judge((FULL,), resident, 200, blocks_per_chunk=None).by_tier[1] == cpu


def test_more_than_32_places_take_a_second_bank() -> None:
    groups = tuple(Group(i, "full_attention", 16, spec_class=i) for i in range(40))
    resident = {Place(i, GPU): range(12) for i in range(40)}
    assert judge(groups, resident, 200).on_gpu == 192
    resident[Place(39, GPU)] = range(3)
    assert judge(groups, resident, 200).on_gpu == 48


SAMPLE = 60


def sample() -> list[tuple[int, ...]]:
    """Return the hits of a fixed sample with every feature, to compare the compiled rule with the uncompiled one."""
    hits = []
    for seed in range(SAMPLE):
        draw = random.Random(seed)
        groups = make_groups(draw)
        num_tokens = draw.randint(1, 160)
        resident = make_residency(draw, groups, num_tokens)
        resident |= {Place(g.group_idx, CPU): set(range(draw.randint(0, 30))) for g in groups}
        for spec in (None, SIMPLE):
            hit = judge(groups, resident, num_tokens, spec)
            hits.append(hit.by_tier)
    return hits


def test_the_rule_gives_the_same_uncompiled() -> None:
    root = Path(__file__).resolve().parents[2]
    environ = {**os.environ, UNCOMPILED: "1", "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-W", "error", __file__], env=environ, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    uncompiled = [tuple(hit) for hit in json.loads(done.stdout)]
    assert uncompiled == sample()
    assert any(hit[0] for hit in uncompiled) and any(hit[1] > hit[0] for hit in uncompiled)


if __name__ == "__main__":
    print(json.dumps(sample()))
