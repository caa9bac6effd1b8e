# SPDX-License-Identifier: Apache-2.0
"""Remembered hashes equal computed ones, and the memory keeps to its budget."""

from __future__ import annotations

import gc
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvrouter.router.model.kvcache import prompt_hasher
from kvrouter.router.model.kvcache.block_hash import HashScheme, HashSpace, extra_keys_for, hash_block, reduce_hash
from kvrouter.router.model.kvcache.multimodal import Items, MultimodalItem, within
from kvrouter.router.model.kvcache.prompt_hasher import PromptHasher, SegmentMemory

SPACE = HashSpace(HashScheme.default(), 4)
PLENTY = 1 << 20


def hashed(
    space: HashSpace, ids: NDArray[np.int64], memory: SegmentMemory, segment_blocks: int = 2, items: Items = ()
) -> list[int]:
    hasher = PromptHasher(space, ids, memory, segment_blocks, items)
    handed: list[int] = []
    while (segment := hasher.extend()).size:
        assert segment.dtype == np.uint64
        handed += segment.tolist()
        assert hasher.hashes.tolist() == handed
    assert len(handed) == hasher.total_blocks
    return handed


def one_by_one(space: HashSpace, ids: NDArray[np.int64], items: Items = ()) -> list[int]:
    parent, hashes = None, []
    for index in range(len(ids) // space.block_size):
        start, end = index * space.block_size, (index + 1) * space.block_size
        keys = extra_keys_for(space, index, within(items, start, end))
        parent = hash_block(space.scheme, parent, ids[start:end], keys)
        hashes.append(reduce_hash(parent))
    return hashes


def spaces() -> st.SearchStrategy[HashSpace]:
    schemes = st.sampled_from([HashScheme.default(), HashScheme.from_seed("xxhash", "0")])
    loras = st.sampled_from([None, ("a", "p"), ("a", "q")])
    return st.builds(HashSpace, schemes, st.integers(1, 3), loras, st.sampled_from([None, "s", "t"]))


def items_within(tokens: int) -> st.SearchStrategy[Items]:
    """Return a strategy for at most two items, of two contents."""
    names = st.sampled_from(["cat", "dog"])
    cuts = st.lists(st.integers(0, tokens), min_size=4, max_size=4, unique=True).map(sorted)
    return st.builds(
        lambda at, one, other, count: (
            MultimodalItem(one, at[0], at[1] - at[0]),
            MultimodalItem(other, at[2], at[3] - at[2]),
        )[:count],
        cuts,
        names,
        names,
        st.integers(0, 2),
    )


@given(
    st.lists(
        st.tuples(
            spaces(),
            st.lists(st.sampled_from([0, 1, 2**32 - 1, 2**32, 2**40]), max_size=14),
            st.integers(1, 4),
            items_within(14),
        ),
        min_size=1,
        max_size=8,
    ),
    st.sampled_from([0, 1500, 4000, PLENTY]),
)
def test_remembered_hashes_equal_computed_ones(
    prompts: list[tuple[HashSpace, list[int], int, Items]], budget_bytes: int
) -> None:
    # Few ids and small spaces make prompts of one memory share prefixes, widths and evicted segments.
    memory = SegmentMemory(budget_bytes)
    for space, ids, segment_blocks, items in prompts * 2:
        array = np.array(ids, np.int64)
        assert hashed(space, array, memory, segment_blocks, items) == one_by_one(space, array, items)
        assert memory.bytes <= budget_bytes


def test_ids_of_two_widths_with_equal_bytes_are_different_segments() -> None:
    memory, space = SegmentMemory(PLENTY), HashSpace(HashScheme.default(), 1)
    wide = np.array([2**32 + 5], np.int64)
    narrow = np.array([5, 1], np.int64)
    assert wide.tobytes() == narrow.astype(np.uint32).tobytes()
    assert len(hashed(space, wide, memory)) == 1
    assert hashed(space, narrow, memory) == one_by_one(space, narrow)


def test_wide_ids_are_not_cut_to_narrow_ones() -> None:
    memory, space = SegmentMemory(PLENTY), HashSpace(HashScheme.default(), 1)
    for ids in ([5], [2**32 + 5], [2**32 - 1], [2**33 - 1], [0], [2**32]):
        array = np.array(ids, np.int64)
        assert hashed(space, array, memory) == one_by_one(space, array)
    assert memory.hits == 0


def test_segments_of_one_fingerprint_are_distinguished_by_their_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_hasher, "xxh3_64_intdigest", lambda _: 0)
    memory = SegmentMemory(PLENTY)
    for ids in (np.arange(16), np.arange(16, 32), np.arange(16)):
        assert hashed(SPACE, ids, memory) == one_by_one(SPACE, ids)
    # The second prompt replaced the root of the first one, and the third prompt the root of the second.
    assert (memory.hits, len(memory)) == (1, 3)


def test_a_shared_prefix_is_hashed_once() -> None:
    memory = SegmentMemory(PLENTY)
    hashed(SPACE, np.arange(32), memory)
    assert (memory.hits, memory.misses, len(memory)) == (0, 4, 4)
    hashed(SPACE, np.concatenate([np.arange(16), np.arange(100, 120)]), memory)
    assert (memory.hits, memory.misses, len(memory)) == (2, 7, 7)


def test_hashing_is_lazy() -> None:
    memory = SegmentMemory(PLENTY)
    hasher = PromptHasher(SPACE, np.arange(1000), memory, 3)
    assert (hasher.total_blocks, hasher.hashes.size, memory.misses) == (250, 0, 0)
    hasher.extend()
    assert (hasher.hashes.size, memory.misses) == (3, 1)


@pytest.mark.parametrize("num_tokens", [0, 1, 3])
def test_a_prompt_without_a_full_block_has_no_hashes(num_tokens: int) -> None:
    hasher = PromptHasher(SPACE, np.arange(num_tokens), SegmentMemory(PLENTY))
    assert hasher.total_blocks == hasher.extend().size == hasher.hashes.size == 0


def test_handed_out_hashes_cannot_spoil_the_memory() -> None:
    memory = SegmentMemory(PLENTY)
    for _ in range(2):
        hasher = PromptHasher(SPACE, np.arange(8), memory)
        with pytest.raises(ValueError, match="read-only"):
            hasher.extend()[0] = 0
        with pytest.raises(ValueError, match="read-only"):
            hasher.hashes[0] = 0


def test_bad_prompts_and_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="token ids"):
        PromptHasher(SPACE, np.array([-1]), SegmentMemory(PLENTY))
    with pytest.raises(ValueError, match="segment_blocks"):
        PromptHasher(SPACE, np.arange(4), SegmentMemory(PLENTY), 0)
    with pytest.raises(ValueError, match="budget_bytes"):
        SegmentMemory(-1)


def put(memory: SegmentMemory, name: int, space: HashSpace = SPACE) -> None:
    memory.put(space, None, 1, bytes([name]) * 16, np.array([name], np.uint64), bytes(32))


def holds(memory: SegmentMemory, name: int) -> bool:
    return memory.get(SPACE, None, 1, bytes([name]) * 16) is not None


def test_the_least_recently_used_segment_goes_first() -> None:
    single = SegmentMemory(PLENTY)
    put(single, 0)
    memory = SegmentMemory(3 * single.bytes)
    for name in (0, 1, 2):
        put(memory, name)
    assert holds(memory, 0)
    put(memory, 3)
    assert [holds(memory, name) for name in range(4)] == [True, False, True, True]
    assert memory.bytes == 3 * single.bytes


def test_a_segment_larger_than_the_budget_evicts_nothing() -> None:
    single = SegmentMemory(PLENTY)
    put(single, 0)
    memory = SegmentMemory(single.bytes)
    put(memory, 0)
    put(memory, 1, HashSpace(SPACE.scheme, 4, None, "a long salt" * 100))
    assert holds(memory, 0)


def test_replacing_a_segment_counts_it_once() -> None:
    memory = SegmentMemory(PLENTY)
    put(memory, 0)
    bytes_before = memory.bytes
    put(memory, 0)
    assert (memory.bytes, len(memory)) == (bytes_before, 1)


def test_the_budget_covers_what_is_really_allocated() -> None:
    # In the worst case, every prompt has its own space and one small segment.
    memory = SegmentMemory(PLENTY)

    def fill(tenants: range) -> None:
        for name in tenants:
            space = HashSpace(HashScheme.from_bytes("sha256", bytes(32)), 4, None, f"tenant {name}")
            items = (MultimodalItem(f"{name:064x}", 1, 2), MultimodalItem(f"{name + 1:064x}", 4, 2))[: name % 3]
            hashed(space, np.arange(name, name + 8), memory, items=items)

    # Objects that the process makes once, at the first use of each kind, do not count.
    fill(range(3))
    tracemalloc.start()
    try:
        before, counted = tracemalloc.get_traced_memory()[0], memory.bytes
        fill(range(3, 603))
        gc.collect()
        allocated = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    # Other threads of the process allocate too.
    assert 0.5 * (memory.bytes - counted) < allocated <= 1.01 * (memory.bytes - counted)
