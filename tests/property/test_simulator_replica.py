# SPDX-License-Identifier: Apache-2.0
"""Random requests to a replica: the hit against its definition, the events against the residency, and no lost blocks."""

from __future__ import annotations

from collections import Counter
from typing import Final

from hypothesis import given, settings
from hypothesis import strategies as st

from kvrouter.simulator.cache.cpu_tier import CacheEvent
from kvrouter.simulator.cache.pool import Cleared, Key, Removed, Stored
from kvrouter.simulator.cache.shapes import Geometry, GroupShape
from kvrouter.simulator.engine.replica import Replica, RequestRefused
from tests.support.examples import examples

FULL: Final = "full_attention"
SWA: Final = "sliding_window"
MAMBA: Final = "mamba"


@st.composite
def geometries(draw: st.DrawFn) -> Geometry:
    with_mamba = draw(st.booleans())
    sizes = st.just(4) if with_mamba else st.sampled_from([4, 8])
    shapes = [
        st.builds(GroupShape, st.just(FULL), sizes),
        st.builds(GroupShape, st.just(SWA), sizes, st.integers(2, 20)),
    ]
    if with_mamba:
        shapes.append(st.just(GroupShape(MAMBA, 4)))
    groups = tuple(draw(st.lists(st.one_of(shapes), min_size=1, max_size=4)))
    full_only = all(group.kind == FULL for group in groups)
    keep = draw(st.sampled_from([0, None] if full_only else [0, None, 16, 32]))
    return Geometry("random", groups, keep)


# Few different tokens and few starts, so that prompts share prefixes often.
PROMPTS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 70), st.integers(0, 2), st.integers(0, 20), st.integers(1, 12)),
    min_size=1,
    max_size=14,
)


def prompt_of(start: int, shared: int, branch: int, own: int) -> list[int]:
    return [start * 1000 + i for i in range(shared)] + [branch * 7000 + i for i in range(own)]


def longest(sim: Replica, prompt: list[int]) -> int:
    """Return the greatest aligned length at which every group has what the next token needs: a hit's definition."""
    geometry = sim.geometry
    hashes = sim.text(prompt).hashes

    def held(group_idx: int, block: int) -> bool:
        size = geometry.groups[group_idx].block_size
        return sim.pool.copies(Key(group_idx, hashes[(block + 1) * size // geometry.hash_block_size - 1])) > 0

    def good(group_idx: int, length: int) -> bool:
        shape = geometry.groups[group_idx]
        blocks = length // shape.block_size
        if shape.kind == FULL:
            first = 0
        elif shape.kind == MAMBA:
            first = blocks - 1
        else:
            assert shape.sliding_window is not None
            first = max(0, blocks - -(-(shape.sliding_window - 1) // shape.block_size))
        return all(held(group_idx, block) for block in range(first, blocks))

    step = geometry.scheduler_block_size
    for length in range((len(prompt) - 1) // step * step, 0, -step):
        if all(good(group_idx, length) for group_idx in range(len(geometry.groups))):
            return length
    return 0


@settings(max_examples=examples(150))
@given(geometries(), PROMPTS, st.integers(3, 60), st.sampled_from([3, 5, 16, 1000]))
def test_hits_events_and_holds(
    geometry: Geometry, prompts: list[tuple[int, int, int, int, int]], blocks: int, chunk_tokens: int
) -> None:
    batches: list[list[CacheEvent]] = []
    sim = Replica(geometry, blocks, on_step=batches.append, chunk_tokens=chunk_tokens)
    copies: Counter[Key] = Counter()
    for start, shared, branch, own, max_tokens in prompts:
        prompt = prompt_of(start, shared, branch, own)
        expected = longest(sim, prompt)
        before = (sim.pool.free_order(), sim.pool.resident())
        hit = sim.find(prompt)
        assert (sim.pool.free_order(), sim.pool.resident()) == before
        assert hit.tokens == expected
        assert hit.junction == 0 or hit.tokens < hit.junction < len(prompt)
        try:
            done = sim.run(prompt, max_tokens=max_tokens)
        except RequestRefused:
            assert not batches
            continue
        assert done.reused_tokens == expected
        assert len(done.output) == max_tokens
        assert sim.pool.num_free == blocks - 1
        assert all(batches)
        for event in (event for batch in batches for event in batch):
            assert not isinstance(event, Cleared)
            if isinstance(event, Removed):
                copies[event.key] -= 1
                assert copies[event.key] >= 0
            elif isinstance(event, Stored):
                copies.update(Key(event.group_idx, block_hash) for block_hash in event.hashes)
                assert len(event.hashes) == len(event.extra_keys) <= len(event.tokens) // event.block_size
        batches.clear()
        assert {key: n for key, n in copies.items() if n} == sim.pool.resident()


@settings(max_examples=examples(80))
@given(geometries(), st.integers(1, 120), st.integers(1, 9), st.sampled_from([3, 16, 1000]))
def test_with_room_a_resend_reuses_all_it_may(
    geometry: Geometry, tokens: int, max_tokens: int, chunk_tokens: int
) -> None:
    sim = Replica(geometry, 5000, on_step=lambda _: None, chunk_tokens=chunk_tokens)
    sim.run(list(range(tokens)), max_tokens=max_tokens)
    step = geometry.scheduler_block_size
    assert sim.find(list(range(tokens))).tokens == (tokens - 1) // step * step
