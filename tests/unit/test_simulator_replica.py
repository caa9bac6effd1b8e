# SPDX-License-Identifier: Apache-2.0
"""A replica's stored, reused and refused blocks, by cases small enough to follow by hand."""

from __future__ import annotations

from typing import Final

import pytest

from kvrouter.simulator.cache.cpu_tier import CacheEvent
from kvrouter.simulator.cache.groups import make_group
from kvrouter.simulator.cache.hashing import extend_hashes, root_hash
from kvrouter.simulator.cache.pool import BlockPool, Cleared, Removed, Stored
from kvrouter.simulator.cache.shapes import (
    SHAPES,
    Geometry,
    GroupShape,
    UnsupportedGeometry,
    gemma3,
    gpt_oss,
    llama,
    make_geometry,
    qwen3_next,
)
from kvrouter.simulator.cache.text import next_token
from kvrouter.simulator.engine.replica import Replica, RequestRefused

FULL: Final = "full_attention"
SWA: Final = "sliding_window"


class Told(list[list[CacheEvent]]):
    """Batches of a replica, in order."""

    def stored(self, group_idx: int) -> list[Stored]:
        return [e for batch in self for e in batch if isinstance(e, Stored) and e.group_idx == group_idx]


def replica(geometry: Geometry, blocks: int = 500, chunk_tokens: int = 8192) -> tuple[Replica, Told]:
    batches = Told()
    return Replica(geometry, blocks, on_step=batches.append, chunk_tokens=chunk_tokens), batches


def text(tokens: int, start: int = 0) -> list[int]:
    return list(range(start, start + tokens))


def forget(sim: Replica, group_idx: int, block_hash: bytes) -> None:
    entry = sim.pool.find([group_idx], block_hash)
    assert entry is not None
    sim.pool.forget(entry[0])


def test_the_hash_chain_is_vllms() -> None:
    # vLLM 0.32.0 printed these hashes (PYTHONHASHSEED unset): NONE_HASH and hash_block_tokens(sha256, ...) of two
    # blocks.
    assert root_hash().hex() == "066b1e8987e027138e98701c46128929378935f9b6cd1549105ae6b4f0d71198"
    hashes: list[bytes] = []
    extend_hashes(hashes, [1, 2, 3, 4, 5, 6, 7, 8, 9], 4, root_hash())
    assert [block_hash.hex() for block_hash in hashes] == [
        "52a7f141c60918f65779927090482b5a24adbe68c8613a211a1eb4e3edd9361a",
        "bee96bce54f5fcaba04c4a3fc2491b30b48e29dbbd38a327d41bc1f76b956dde",
    ]


def test_hashes_grow_with_the_text() -> None:
    whole: list[bytes] = []
    extend_hashes(whole, text(50), 16, root_hash(), "salt")
    grown: list[bytes] = []
    for tokens in (5, 16, 31, 50):
        extend_hashes(grown, text(tokens), 16, root_hash(), "salt")
    assert grown == whole
    assert len(whole) == 3


def test_a_resend_reuses_all_but_the_last_token() -> None:
    sim, _ = replica(llama(16))
    assert sim.run(text(64)).reused_tokens == 0
    assert sim.run(text(64)).reused_tokens == 48
    assert sim.run(text(65)).reused_tokens == 64


def test_a_salt_keeps_tenants_apart() -> None:
    sim, batches = replica(llama(16))
    sim.run(text(40), cache_salt="a")
    assert sim.run(text(40)).reused_tokens == 0
    assert sim.run(text(40), cache_salt="a").reused_tokens == 32
    assert batches.stored(0)[0].extra_keys == (("a",), None)
    assert batches.stored(0)[1].extra_keys == (None, None)


def test_answers_are_cached_except_the_last_token() -> None:
    sim, _ = replica(llama(4))
    answer = sim.run(text(6), max_tokens=7)
    assert len(answer.output) == 7
    assert answer.output[0] == next_token(text(6))
    # 12 tokens were computed, 6 of the prompt and 6 of the 7 answered: three full blocks.
    assert sim.run([*text(6), *answer.output, 1]).reused_tokens == 12


def test_one_batch_a_step_and_none_when_nothing_happened() -> None:
    sim, batches = replica(llama(4), chunk_tokens=8)
    sim.run(text(20), max_tokens=5)
    # The chunks have 8, 8 and 4 tokens; then tokens 21 to 24 fill one more block, with the last of four steps.
    assert [[len(e.hashes) for e in batch if isinstance(e, Stored)] for batch in batches] == [[2], [2], [1], [1]]


def test_events_chain_by_parent() -> None:
    sim, batches = replica(llama(4), chunk_tokens=8)
    sim.run(text(20))
    first, second, third = batches.stored(0)
    assert first.parent is None
    assert second.parent == first.hashes[-1]
    assert (third.parent, third.tokens) == (second.hashes[-1], (16, 17, 18, 19))


def test_sparse_window_events_omit_hashes_and_span_all_tokens() -> None:
    sim, batches = replica(gpt_oss(16, 32))
    sim.run(text(200))
    (window,), (full,) = batches.stored(0), batches.stored(1)
    # A window of 32 needs ceil(31 / 16) = 2 blocks before token 199's last boundary, 192.
    assert window.hashes == full.hashes[10:12]
    assert window.tokens == full.tokens == tuple(range(192))
    assert len(full.hashes) == 12


def test_an_event_may_have_no_hash_at_all() -> None:
    sim, batches = replica(gpt_oss(16, 32), chunk_tokens=64)
    sim.run(text(200))
    assert [len(event.hashes) for event in batches.stored(0)] == [0, 0, 2]


def test_dense_retention_keeps_every_window_block() -> None:
    sim, batches = replica(gpt_oss(16, 32, None))
    sim.run(text(200))
    assert len(batches.stored(0)[0].hashes) == 12


def test_an_interval_keeps_one_tail_a_segment() -> None:
    geometry = gpt_oss(16, 17, 64)
    group = make_group(0, geometry, BlockPool(2))
    # need = 1 block: the last of each 64 tokens, and the one before the replay boundary 159 -> 144.
    assert group.mask(0, 10, [159]) == [False, False, False, True, False, False, False, True, True, False]
    assert group.mask(3, 5, [159]) == [True, False]


@pytest.mark.parametrize(("window", "need"), [(16, 1), (17, 1), (18, 2), (33, 2), (34, 3)])
def test_a_window_needs_the_blocks_of_its_other_tokens(window: int, need: int) -> None:
    mask = make_group(0, gpt_oss(16, window), BlockPool(2)).mask(0, 10, [159])
    assert mask == [False] * (9 - need) + [True] * need + [False]


def test_the_shared_prefix_is_reusable_from_the_third_sibling_on() -> None:
    sim, _ = replica(gpt_oss(16, 32))
    shared = text(160)
    assert sim.run([*shared, *text(40, 1000)]).reused_tokens == 0
    # The second sibling finds the full-attention blocks but no window before token 160, so it leaves a checkpoint
    # there.
    assert sim.find([*shared, *text(40, 2000)]).junction == 160
    assert sim.run([*shared, *text(40, 2000)]).reused_tokens == 0
    assert sim.run([*shared, *text(40, 3000)]).reused_tokens == 160


def test_a_window_group_lets_go_of_what_it_passed() -> None:
    # 400 tokens in one window group need 25 blocks; with chunks of 32 and a window of 32, the group never holds more
    # than 6.
    geometry = Geometry("window", (GroupShape(SWA, 16, 32),))
    sim, _ = replica(geometry, 7, chunk_tokens=32)
    assert sim.run(text(400), max_tokens=20).reused_tokens == 0
    assert sim.pool.num_free == 6


def test_a_mamba_hit_needs_the_state_at_its_end_only() -> None:
    sim, batches = replica(qwen3_next(16, 1))
    sim.run(text(100))
    # Chunks end at 96, the last boundary before the prompt's end: one state stands there, and nulls before it.
    assert [len(event.hashes) for event in batches.stored(0)] == [1]
    assert batches.stored(0)[0].hashes[0] == batches.stored(1)[0].hashes[5]
    assert sim.run(text(100)).reused_tokens == 96
    assert sim.find(text(90)).tokens == 0
    assert sim.find(text(90)).junction == 80


def test_mamba_chunks_stop_at_the_junction() -> None:
    sim, batches = replica(qwen3_next(16, 1))
    sim.run(text(100))
    batches.clear()
    sim.run([*text(80), *text(30, 1000)])
    assert [len(event.tokens) for event in batches.stored(1)] == [80, 16]
    assert sim.find([*text(80), 7, 8, 9]).tokens == 80


def test_a_hit_found_by_one_group_alone_is_no_hit() -> None:
    geometry = gpt_oss(16, 32)
    sim, _ = replica(geometry)
    sim.run(text(100))
    for resident in list(sim.pool.resident()):
        if resident.group_idx == 0:
            forget(sim, 0, resident.block_hash)
    assert sim.find(text(100)).tokens == 0
    assert sim.find(text(100)).junction == 96


def test_eviction_takes_the_end_of_a_finished_prompt_first() -> None:
    sim, _ = replica(llama(16), 6)
    sim.run(text(80))
    sim.run(text(32, 1000))
    assert sim.find(text(81)).tokens == 48


def test_a_window_run_starts_at_an_aligned_boundary_only() -> None:
    sim, _ = replica(Geometry("mixed", (GroupShape(SWA, 4, 9), GroupShape(FULL, 8)), None))
    sim.run(text(41))
    assert sim.find(text(41)).tokens == 40
    # Without the block that ends at 40, blocks 28..36 cover a window, but 36 is no boundary of the wider blocks.
    forget(sim, 0, sim.text(text(41)).hashes[9])
    assert sim.find(text(41)).tokens == 32


def test_the_kept_tail_ends_where_all_groups_have_a_boundary() -> None:
    group = make_group(0, Geometry("mixed", (GroupShape(SWA, 4, 5), GroupShape(FULL, 8))), BlockPool(2))
    # A prompt resumes at 15 at most, so at 8: it needs the second of the blocks 0..4, 4..8, 8..12.
    assert group.mask(0, 3, [15]) == [False, True, False]


def test_equal_groups_are_looked_up_jointly() -> None:
    assert gemma3().classes == ((5,), (0, 1, 2, 3, 4))
    sim, _ = replica(gemma3(16, 32))
    sim.run(text(100))
    assert sim.find(text(100)).tokens == 96
    resident = next(k for k in sim.pool.resident() if k.group_idx == 3)
    forget(sim, 3, resident.block_hash)
    assert sim.find(text(100)).tokens == 0


def test_a_full_attention_block_wider_than_the_hash_has_a_second_key() -> None:
    geometry = Geometry("mixed", (GroupShape(SWA, 16, 32), GroupShape(FULL, 32)))
    sim, batches = replica(geometry)
    sim.run(text(50), max_tokens=20)
    # The prompt's last hash boundary, 48, lies inside the block 32..64, and is announced alone once that block is full.
    last = batches.stored(1)[-1]
    assert (last.block_size, last.tokens) == (16, tuple(range(32, 48)))
    assert sim.pool.copies(next(k for k in sim.pool.resident() if k.block_hash == last.hashes[0])) == 1


def test_removed_copies_follow_the_blocks_taken() -> None:
    sim, batches = replica(llama(16), 6)
    sim.run(text(80))
    batches.clear()
    sim.run(text(40, 1000))
    assert [type(event) for event in batches[0]] == [Removed, Removed, Removed, Stored]


def test_a_reset_is_published_with_the_next_step() -> None:
    sim, batches = replica(llama(16))
    sim.run(text(40))
    batches.clear()
    assert sim.reset_prefix_cache()
    assert batches == []
    assert sim.run(text(40)).reused_tokens == 0
    assert batches[0][0] == Cleared()
    assert isinstance(batches[0][1], Stored)


@pytest.mark.parametrize(("prompt", "max_tokens"), [([], 1), ([1], 0), (text(200), 1), (text(60), 60)])
def test_a_request_that_cannot_finish_is_refused(prompt: list[int], max_tokens: int) -> None:
    sim, batches = replica(llama(16), 7)
    with pytest.raises(RequestRefused):
        sim.run(prompt, max_tokens=max_tokens)
    assert batches == []
    assert sim.pool.num_free == 6


def test_the_fullest_fit_runs() -> None:
    sim, _ = replica(llama(16), 7)
    # The last sampled token needs no slot, so there are 97 tokens in 6 blocks of 16.
    assert len(sim.run(text(60), max_tokens=37).output) == 37


@pytest.mark.parametrize(
    "make",
    [
        lambda: Geometry("none", ()),
        lambda: GroupShape(SWA, 16),
        lambda: GroupShape(FULL, 16, 32),
        lambda: GroupShape(FULL, 0),
        lambda: GroupShape(SWA, 16, 0),
        lambda: Geometry("mixed mamba", (GroupShape("mamba", 32), GroupShape(FULL, 16))),
        lambda: gpt_oss(16, 32, 24),
        lambda: gpt_oss(16, 32, -16),
        lambda: llama(16, 16),
        lambda: make_geometry("bert"),
        lambda: make_geometry("llama", window=32),
    ],
)
def test_an_unsupported_shape_is_refused(make: object) -> None:
    assert callable(make)
    with pytest.raises(UnsupportedGeometry):
        make()


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_serves_a_prompt(name: str) -> None:
    sim, _ = replica(make_geometry(name, block_size=16))
    sim.run(text(100))
    assert sim.run(text(100)).reused_tokens == 96
