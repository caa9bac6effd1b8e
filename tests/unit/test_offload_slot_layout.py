# SPDX-License-Identifier: Apache-2.0
"""Places of pages within slots: no two overlap, and none leaves its slot; and plans from vLLM's flat lists."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.engine_patch.offload.memory.slot_layout import GroupPart, SlotLayout, make_plan, num_chunks

pages = st.lists(st.integers(1, 50), min_size=1, max_size=4).map(tuple)
layouts = st.builds(
    lambda groups, k: SlotLayout(groups, k, max(sum(group) for group in groups) * k),
    st.lists(pages, min_size=1, max_size=4).map(tuple),
    st.integers(1, 5),
)


@given(layouts)
def test_the_pages_of_a_chunk_fill_their_part_of_the_slot_without_a_gap_or_an_overlap(layout: SlotLayout) -> None:
    for group, sizes in enumerate(layout.groups):
        ranges = [
            range(start, start + size)
            for ref, size in enumerate(sizes)
            for sub in range(layout.blocks_per_chunk)
            for start in [layout.offset(group, ref, sub)]
        ]
        used = [byte for piece in ranges for byte in piece]
        assert sorted(used) == list(range(sum(sizes) * layout.blocks_per_chunk))
        assert max(used) < layout.slot_bytes


@given(layouts, st.data())
def test_page_offsets_are_offset_for_every_block(layout: SlotLayout, data: st.DataObject) -> None:
    group = data.draw(st.integers(0, len(layout.groups) - 1))
    count, first = data.draw(st.integers(1, 12)), data.draw(st.integers(0, 20))
    k, stride = layout.blocks_per_chunk, layout.slot_bytes + data.draw(st.integers(0, 9))
    # Blocks first to first + count - 1 of a request have their chunk c in slot slots[c]; the expected offsets are
    # counted out one by one.
    chunks = sorted({block // k for block in range(first, first + count)})
    slots = data.draw(st.lists(st.integers(0, 99), min_size=len(chunks), max_size=len(chunks), unique=True))
    part = GroupPart(group, np.arange(count), first, np.array(slots, np.int64))

    page_offsets = [offsets.tolist() for offsets in layout.page_offsets(part, stride)]

    expected = [
        [
            slots[chunks.index(block // k)] * stride + layout.offset(group, ref, block % k)
            for block in range(first, first + count)
        ]
        for ref in range(len(layout.groups[group]))
    ]
    assert page_offsets == expected
    assert num_chunks(count, first, k) == len(chunks)


def test_blocks_of_a_chunk_lie_side_by_side_ref_by_ref() -> None:
    layout = SlotLayout(((10, 3),), 2, 26)
    assert [layout.offset(0, ref, sub) for ref in (0, 1) for sub in (0, 1)] == [0, 10, 20, 23]


def test_a_sub_block_that_a_chunk_does_not_have_is_refused() -> None:
    layout = SlotLayout(((10,),), 2, 20)
    for sub in (-1, 2):
        with pytest.raises(IndexError, match=rf"sub-block {sub} does not exist: a chunk has 0 to 1"):
            layout.offset(0, 0, sub)


def test_a_chunk_that_fits_exactly_is_taken_one_byte_less_is_refused_with_both_numbers() -> None:
    SlotLayout(((10, 3), (5,)), 4, 52)
    with pytest.raises(ValueError, match=r"group 0 takes 52 bytes .* has 51: lower blocks_per_chunk"):
        SlotLayout(((10, 3), (5,)), 4, 51)
    with pytest.raises(ValueError, match=r"group 1 takes 20 bytes .* has 19"):
        SlotLayout(((1,), (5,)), 4, 19)


@pytest.mark.parametrize(("groups", "k"), [(((4,),), 0), (((4, 0),), 1)])
def test_numbers_that_mean_nothing_are_refused(groups: tuple[tuple[int, ...], ...], k: int) -> None:
    with pytest.raises(ValueError, match=r"0"):
        SlotLayout(groups, k, 100)


def test_a_part_with_another_number_of_slots_than_chunks_is_refused() -> None:
    layout = SlotLayout(((8,),), 4, 32)
    # Blocks 3 to 7 of a request touch the chunks 0 and 1.
    for slots in ([1], [1, 2, 3]):
        part = GroupPart(0, np.arange(5), 3, np.array(slots))
        with pytest.raises(
            ValueError, match=rf"5 blocks .* from block 3 on touch 2 chunks of 4, .* {len(slots)} slots"
        ):
            next(layout.page_offsets(part, 32))


def test_a_plan_takes_each_groups_blocks_and_slots_in_order() -> None:
    plan = make_plan([7, 8, 9, 5], [3, 0, 1], [3, 0, 6], np.array([20, 21, 30], np.int32), 4)

    assert [(part.group, part.block_ids.tolist(), part.first_block, part.slots.tolist()) for part in plan] == [
        (0, [7, 8, 9], 3, [20, 21]),
        (2, [5], 6, [30]),
    ]
    assert all(part.block_ids.dtype == np.int64 and part.slots.dtype == np.int64 for part in plan)


@pytest.mark.parametrize(
    ("blocks", "sizes", "firsts", "slots"),
    [
        ([1, 2, 3], [2], [0], [0]),
        ([1], [2], [0], [0]),
        ([1, 2], [2], [0], [0, 1]),
        ([1, 2], [2], [3], [0]),
        ([1, 2], [2], [0, 1], [0]),
    ],
)
def test_lists_that_do_not_fit_are_refused(
    blocks: list[int], sizes: list[int], firsts: list[int], slots: list[int]
) -> None:
    with pytest.raises(ValueError, match=r"\d"):
        make_plan(blocks, sizes, firsts, slots, 4)
