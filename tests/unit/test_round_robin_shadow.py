# SPDX-License-Identifier: Apache-2.0
"""What the workers would hold if prompts were sent to them in turn."""

from __future__ import annotations

from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.observe.history.round_robin_shadow import RoundRobinShadow

ONE, TWO = WorkerKey("m", "w0", 0), WorkerKey("m", "w1", 0)
PIECE = 128


def names(first: int, count: int) -> list[int]:
    return list(range(first, first + count))


def test_a_prompt_is_reused_when_its_worker_has_its_turn_again() -> None:
    shadow, workers = RoundRobinShadow(), [(ONE, None), (TWO, None)]
    prompt = names(0, 4)
    reused = [shadow.sent("m", workers, prompt, 4 * PIECE + 10) for _ in range(4)]
    assert reused == [0, 0, 4 * PIECE, 4 * PIECE]


def test_the_last_token_is_always_computed() -> None:
    shadow = RoundRobinShadow()
    assert [shadow.sent("m", [(ONE, None)], [1], PIECE) for _ in range(2)] == [0, PIECE - 1]


def test_only_the_common_beginning_is_reused() -> None:
    shadow, workers = RoundRobinShadow(), [(ONE, None)]
    shadow.sent("m", workers, [1, 2, 3], 3 * PIECE)
    assert shadow.sent("m", workers, [1, 2, 9], 3 * PIECE + 5) == 2 * PIECE
    assert shadow.sent("m", workers, [8, 2, 3], 3 * PIECE + 5) == 0


def test_a_cache_gives_up_what_was_used_longest_ago_and_a_prompts_end_first() -> None:
    shadow, workers = RoundRobinShadow(), [(ONE, 4 * PIECE)]
    shadow.sent("m", workers, names(0, 3), 3 * PIECE)
    shadow.sent("m", workers, names(10, 2), 2 * PIECE)
    assert len(shadow) == 4
    assert shadow.sent("m", workers, names(0, 3), 3 * PIECE + 1) == 2 * PIECE


def test_an_engine_without_prefix_caching_reuses_nothing() -> None:
    shadow = RoundRobinShadow()
    assert [shadow.sent("m", [(ONE, 0)], names(0, 3), 3 * PIECE) for _ in range(2)] == [0, 0]


def test_memory_is_bounded_over_all_workers() -> None:
    shadow, workers = RoundRobinShadow(100), [(ONE, None), (TWO, None)]
    for number in range(50):
        shadow.sent("m", workers, names(1_000 * number, 30), 30 * PIECE)
        assert len(shadow) <= 100
    shadow.keep({TWO})
    assert len(shadow) == 50


def test_models_have_turns_of_their_own() -> None:
    shadow = RoundRobinShadow()
    other = WorkerKey("n", "w0", 0)
    for _ in range(2):
        shadow.sent("n", [(other, None)], [7], PIECE + 1)
    assert [shadow.sent("m", [(ONE, None), (TWO, None)], [7], PIECE + 1) for _ in range(3)] == [0, 0, PIECE]
