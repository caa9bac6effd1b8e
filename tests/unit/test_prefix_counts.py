# SPDX-License-Identifier: Apache-2.0
"""Number of different prompts that began with each piece."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.index.matching.question import Question
from kvrouter.router.route.load.prefix_tree import (
    PIECE_TOKENS,
    PrefixTree,
    PromptPrefixes,
    counts_of,
    names_of,
    step_of,
)
from kvrouter.router.route.load.prompts_ahead import PromptAhead

BLOCK_TOKENS = 64
HASHED, IN_TOKENS = "hashes", "tokens"


def prompt_of(units: Sequence[int], kind: str = HASHED) -> PromptAhead:
    """Return a prompt of these blocks, as block hashes or, with IN_TOKENS, as tokens that are equal in a block.

    Each block hash covers all blocks before it.
    """
    if kind == IN_TOKENS:
        tokens = np.repeat(np.array(units, np.int64), BLOCK_TOKENS)
        question = Question("m", len(tokens), token_ids=tokens)
    else:
        hashes = [hash((1, *units[: place + 1])) & (1 << 64) - 1 for place in range(len(units))]
        question = Question("m", len(units) * BLOCK_TOKENS + 1, block_hashes=np.array(hashes, np.uint64))
    prefixes = PromptPrefixes([names_of(question, BLOCK_TOKENS, 1)], step_of(question, BLOCK_TOKENS))
    return PromptAhead(question, prefixes, BLOCK_TOKENS)


class Counted(PrefixTree):
    """A tree to which prompts are sent that count at once."""

    def placed(self, prompt: PromptAhead) -> None:
        self.sent(prompt.prefixes, WorkerKey("m", "w0"), 0.0, 1.0)
        self.count(prompt.prefixes, prompt.tail)

    def counts(self, prompt: PromptAhead) -> list[int]:
        """Return how many prompts began with each piece."""
        return [count for count, pieces in counts_of(self.find(prompt.prefixes.names)) for _ in range(pieces)]


PIECE = PIECE_TOKENS // BLOCK_TOKENS
SHARED = [1] * 2 * PIECE


@pytest.mark.parametrize("kind", [HASHED, IN_TOKENS])
def test_prompts_that_continue_differently_are_counted(kind: str) -> None:
    popular = Counted()
    first = [*SHARED, *[2] * PIECE]
    popular.placed(prompt_of(first, kind))
    # The next turn of the same chat, and the same prompt again, are no new prompts.
    for _ in range(2):
        popular.placed(prompt_of([*first, *[3] * PIECE, 4], kind))
    popular.placed(prompt_of([*first, *[3] * PIECE, 4, 5], kind))
    assert popular.counts(prompt_of([*first, *[3] * PIECE], kind)) == [1, 1, 1, 1]
    for unit in (9, 10):
        popular.placed(prompt_of([*SHARED, *[unit] * PIECE], kind))
    assert popular.counts(prompt_of(first, kind)) == [3, 3, 1]
    assert popular.counts(prompt_of([*SHARED, *[9] * PIECE], kind)) == [3, 3, 1]
    assert popular.counts(prompt_of([7] * PIECE, kind)) == [] and counts_of(popular.find([])) == []


@pytest.mark.parametrize("kind", [HASHED, IN_TOKENS])
def test_short_questions_behind_a_common_beginning_are_different_prompts(kind: str) -> None:
    """All of these questions end within the piece behind the beginning, so their names are the same."""
    popular = Counted()
    for number in range(10):
        question = prompt_of([*SHARED, 100 + number], kind)
        popular.placed(question)
        popular.placed(question)
        assert popular.counts(question) == [number + 1] * 2
    # The last prompt goes on. Then an earlier one goes on too, which looks like a new prompt by then.
    popular.placed(prompt_of([*SHARED, 109, 3, 4, 5, 6], kind))
    assert popular.counts(prompt_of(SHARED, kind)) == [10, 10]
    popular.placed(prompt_of([*SHARED, 103, 3, 4, 5, 6], kind))
    assert popular.counts(prompt_of(SHARED, kind)) == [11, 11]


@pytest.mark.parametrize("kind", [HASHED, IN_TOKENS])
def test_counts_equal_those_of_a_complete_record(kind: str) -> None:
    rng = random.Random(1)
    popular = Counted()
    counts: dict[tuple[int, ...], int] = {}
    # The last prompt that ended behind these pieces, unless it has been continued since.
    ended: dict[tuple[int, ...], tuple[int, ...] | None] = {}
    for _ in range(3_000):
        units = tuple(rng.randrange(2) for _ in range(rng.randint(1, 4 * PIECE)))
        pieces = [units[:end] for end in range(PIECE, len(units) + 1, PIECE)]
        counted = [piece for piece in pieces if piece in counts]
        if counted:
            former = ended.get(counted[-1])
            if former is not None and units[: len(former)] == former:
                ended[counted[-1]] = None
            else:
                for piece in counted:
                    counts[piece] += 1
        for piece in pieces[len(counted) :]:
            counts[piece] = 1
        if pieces:
            ended[pieces[-1]] = units
        prompt = prompt_of(units, kind)
        popular.placed(prompt)
        assert popular.counts(prompt) == [counts[piece] for piece in pieces]


def test_memory_is_bounded_and_what_is_in_use_stays() -> None:
    popular = Counted(max_names=100)
    for number in range(10_000):
        popular.placed(prompt_of([*SHARED, *[1_000 + number] * PIECE]))
        assert len(popular) <= 100
    assert popular.counts(prompt_of(SHARED)) == [10_000, 10_000]
    assert popular.counts(prompt_of([1_000] * PIECE)) == []
