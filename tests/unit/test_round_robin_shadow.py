# SPDX-License-Identifier: Apache-2.0
"""What the workers would hold if prompts were sent to them in turn."""

from __future__ import annotations

import pytest

from kvrouter.contract.worker_status import EngineCache
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.model.kvcache.catalog import Group, build_catalog
from kvrouter.router.model.workers.registration import CatalogSpec
from kvrouter.router.observe.history.round_robin_shadow import RoundRobinShadow
from kvrouter.router.observe.history.shadow_cache import ShadowCache, WorkerCache, shadow_cache

ONE, TWO = WorkerKey("m", "w0", 0), WorkerKey("m", "w1", 0)
PIECE = 128
UNKNOWN = EngineCache()
FULL = Group(0, "full_attention", 16)
# Its window covers 4 pieces.
WINDOW = Group(1, "sliding_window", 16, sliding_window=4 * PIECE + 1)
STATE = Group(2, "mamba", 16)


def cache(worker: WorkerKey, *groups: Group, engine: EngineCache = UNKNOWN) -> WorkerCache:
    return WorkerCache(worker, engine, build_catalog(groups or (FULL,), "declared", CatalogSpec()))


def pieces(number: int) -> EngineCache:
    """Return a cache that holds this number of pieces of full attention."""
    return EngineCache(blocks=number * PIECE // 16)


def names(first: int, count: int) -> list[int]:
    return list(range(first, first + count))


def test_a_prompt_is_reused_when_its_worker_has_its_turn_again() -> None:
    shadow, workers = RoundRobinShadow(), [cache(ONE), cache(TWO)]
    prompt = names(0, 4)
    reused = [shadow.sent("m", workers, prompt, 4 * PIECE + 10) for _ in range(4)]
    assert reused == [0, 0, 4 * PIECE, 4 * PIECE]


def test_the_last_token_is_always_computed() -> None:
    shadow = RoundRobinShadow()
    assert [shadow.sent("m", [cache(ONE)], [1], PIECE) for _ in range(2)] == [0, PIECE - 1]


def test_full_attention_reuses_the_common_beginning() -> None:
    shadow, workers = RoundRobinShadow(), [cache(ONE)]
    shadow.sent("m", workers, [1, 2, 3], 3 * PIECE)
    assert shadow.sent("m", workers, [1, 2, 9], 3 * PIECE + 5) == 2 * PIECE
    assert shadow.sent("m", workers, [8, 2, 3], 3 * PIECE + 5) == 0


@pytest.mark.parametrize("other", [WINDOW, STATE])
def test_a_window_or_a_state_is_resumed_at_a_prompts_end_and_where_two_prompts_parted(other: Group) -> None:
    shadow, workers = RoundRobinShadow(), [cache(ONE, FULL, other)]
    prompt = names(0, 9)
    assert shadow.sent("m", workers, prompt, 9 * PIECE + 5) == 0
    assert shadow.sent("m", workers, [*prompt, 10], 10 * PIECE + 5) == 9 * PIECE
    # Nothing is kept in the middle of a prompt, until a second one has parted from the first one there.
    assert shadow.sent("m", workers, [*prompt[:6], 20], 7 * PIECE + 5) == 0
    assert shadow.sent("m", workers, [*prompt[:6], 30], 7 * PIECE + 5) == 6 * PIECE


def test_a_prompt_within_its_window_is_resumed_at_any_piece() -> None:
    shadow, workers = RoundRobinShadow(), [cache(ONE, FULL, WINDOW)]
    shadow.sent("m", workers, names(0, 4), 4 * PIECE + 5)
    assert shadow.sent("m", workers, [0, 1, 9], 3 * PIECE + 5) == 2 * PIECE


def test_a_cache_gives_up_what_was_used_longest_ago_and_a_prompts_end_first() -> None:
    shadow, workers = RoundRobinShadow(), [cache(ONE, engine=pieces(4))]
    shadow.sent("m", workers, names(0, 3), 3 * PIECE)
    shadow.sent("m", workers, names(10, 2), 2 * PIECE)
    assert len(shadow) == 4
    assert shadow.sent("m", workers, names(0, 3), 3 * PIECE + 1) == 2 * PIECE


def test_groups_share_the_blocks_of_a_cache() -> None:
    assert shadow_cache(EngineCache(blocks=100), cache(ONE, FULL, WINDOW, STATE).catalog) == ShadowCache(
        100.0, PIECE / 16, 4 * PIECE / 16 + 1, 0
    )
    # With the checkpoint of a window, 6 pieces take 10 pieces' blocks.
    for size, reused in ((10, 6 * PIECE), (9, 0)):
        shadow, workers = RoundRobinShadow(), [cache(ONE, FULL, WINDOW, engine=pieces(size))]
        assert [shadow.sent("m", workers, names(0, 6), 6 * PIECE + 1) for _ in range(2)] == [0, reused]


def test_without_a_catalog_the_tokens_count_that_the_engine_states() -> None:
    unknown = build_catalog((), "learned", CatalogSpec(), problem="no KV cache group is known yet")
    assert shadow_cache(EngineCache(blocks=9, tokens=2 * PIECE), unknown) == ShadowCache(2.0)
    assert shadow_cache(UNKNOWN, unknown) == ShadowCache(None)


def test_an_engine_without_prefix_caching_reuses_nothing() -> None:
    shadow, workers = RoundRobinShadow(), [cache(ONE, engine=EngineCache(prefix_caching=False, blocks=99))]
    assert [shadow.sent("m", workers, names(0, 3), 3 * PIECE) for _ in range(2)] == [0, 0]


def test_a_cache_that_is_described_otherwise_later_has_its_new_size() -> None:
    shadow = RoundRobinShadow()
    shadow.sent("m", [cache(ONE)], names(0, 4), 4 * PIECE)
    shadow.sent("m", [cache(ONE, engine=pieces(2))], names(10, 1), PIECE)
    assert len(shadow) == 2


def test_memory_is_bounded_over_all_workers() -> None:
    shadow, workers = RoundRobinShadow(100), [cache(ONE, FULL, WINDOW), cache(TWO, FULL, WINDOW)]
    for number in range(50):
        shadow.sent("m", workers, names(1_000 * number, 30), 30 * PIECE)
        assert len(shadow) <= 100
    shadow.keep({TWO})
    assert len(shadow) == 50


def test_memory_is_bounded_when_workers_join_one_by_one_and_a_model_gets_no_prompts() -> None:
    shadow = RoundRobinShadow(100)
    idle = WorkerKey("n", "w0", 0)
    shadow.sent("n", [cache(idle)], names(0, 100), 100 * PIECE)
    workers = [cache(WorkerKey("m", f"w{number}", 0)) for number in range(20)]
    for number in range(20):
        shadow.sent("m", workers, names(1_000 * (number + 1), 30), 30 * PIECE)
        assert len(shadow) <= 100
    # The workers that have had their turn hold as much as the last one.
    assert len(shadow) == 21 * (100 // 21)


def test_models_have_turns_of_their_own() -> None:
    shadow = RoundRobinShadow()
    other = WorkerKey("n", "w0", 0)
    for _ in range(2):
        shadow.sent("n", [cache(other)], [7], PIECE + 1)
    assert [shadow.sent("m", [cache(ONE), cache(TWO)], [7], PIECE + 1) for _ in range(3)] == [0, 0, PIECE]
