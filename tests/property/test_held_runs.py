# SPDX-License-Identifier: Apache-2.0
"""The places of a prompt's blocks in `/query` are exactly where the blocks were put, and listing them changes no hit."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.router.base.common.ids import CPU, GPU, STORAGE, Place
from kvrouter.router.model.kvcache.catalog import Group, build_catalog
from kvrouter.router.model.kvcache.offload_connectors import DISK_OWNER, OFFLOADING
from kvrouter.router.model.workers.registration import CatalogSpec
from tests.support.judging import judge

HASH_BLOCK = 16
MAX_HASHES = 40


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[Group], dict[Place, set[int]], int, int]:
    """Draw groups, the block numbers that each place holds, the prompt's length, and the blocks of a chunk."""
    groups = [Group(0, "full_attention", HASH_BLOCK)]
    for number in range(1, draw(st.integers(1, 20))):
        size = HASH_BLOCK * draw(st.sampled_from([1, 2]))
        groups.append(Group(number, "sliding_window", size, sliding_window=draw(st.integers(1, 200))))
    media = [(GPU, None), (CPU, None), (STORAGE, DISK_OWNER)]
    places = draw(st.sets(st.tuples(st.sampled_from(groups), st.sampled_from(media)), max_size=36))
    held = {
        Place(group.group_idx, *medium): draw(st.sets(st.integers(0, MAX_HASHES), min_size=1, max_size=12))
        for group, medium in sorted(places, key=repr)
    }
    return groups, held, draw(st.integers(1, MAX_HASHES * HASH_BLOCK)), draw(st.sampled_from([1, 2]))


@given(worlds())
def test_it_is_what_was_put_there_and_changes_no_hit(
    world: tuple[list[Group], dict[Place, set[int]], int, int],
) -> None:
    groups, held, num_tokens, per_chunk = world
    spec = CatalogSpec(offload_connector=OFFLOADING)
    catalog = build_catalog(groups, "configured", spec, per_chunk)
    sizes = {
        place: {group.group_idx: group.block_size for group in groups}[place.group_idx]
        * (1 if place.medium == GPU else per_chunk)
        for place in held
    }
    # A block is identified by the hash at its last boundary.
    hashes = {
        place: {(block + 1) * sizes[place] // HASH_BLOCK - 1 for block in blocks} for place, blocks in held.items()
    }
    hit = judge(groups, hashes, num_tokens, catalog=catalog, held=True)
    assert {Place(held_place.group_idx, held_place.medium, held_place.owner) for held_place in hit.held} == set(held)
    for held_place in hit.held:
        place = Place(held_place.group_idx, held_place.medium, held_place.owner)
        assert held_place.block_size == sizes[place]
        tokens = set[int]()
        before = -1
        for first, end in held_place.runs:
            assert before < first < end <= num_tokens
            before = end
            tokens.update(range(first, end))
        wanted = set[int]()
        for block in held[place]:
            if (block + 1) * sizes[place] <= num_tokens:
                wanted.update(range(block * sizes[place], (block + 1) * sizes[place]))
        assert tokens == wanted
    assert msgspec.structs.replace(hit, held=()) == judge(groups, hashes, num_tokens, catalog=catalog)
