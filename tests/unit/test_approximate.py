# SPDX-License-Identifier: Apache-2.0
"""Guessed residency of engines that publish no events."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.index.matching.question import Question
from kvrouter.router.index.matching.routing_history import PIECE_TOKENS, RoutingHistory, piece_tokens, pieces_of

W0, W1 = (WorkerKey("m", "w0"), 0), (WorkerKey("m", "w1"), 0)
TTL_S = 10.0
TOKENS = np.arange(5 * PIECE_TOKENS, dtype=np.int64)


def question(tokens: np.ndarray = TOKENS, **fields: Any) -> Question:
    return Question("m", len(tokens), token_ids=tokens, **fields)


def test_a_sent_prompt_counts_as_cached_for_a_while() -> None:
    history = RoutingHistory(TTL_S)
    pieces = pieces_of(question(), None)
    history.sent(W0, pieces, 0.0)
    assert history.hit_tokens(W0, pieces, len(TOKENS), TTL_S - 1, None) == len(TOKENS) - PIECE_TOKENS
    assert history.hit_tokens(W1, pieces, len(TOKENS), 1.0, None) == 0
    assert history.hit_tokens((W0[0], 1), pieces, len(TOKENS), 1.0, None) == 0, "another life"
    assert history.hit_tokens(W0, pieces, len(TOKENS), TTL_S, None) == 0
    history.expire(TTL_S)
    assert len(history) == 0


def test_a_shared_start_counts_and_anything_else_is_another_prompt() -> None:
    history = RoutingHistory(TTL_S)
    history.sent(W0, pieces_of(question(), None), 0.0)
    changed = TOKENS.copy()
    changed[2 * PIECE_TOKENS + 3] += 1
    assert history.hit_tokens(W0, pieces_of(question(changed), None), len(changed), 1.0, None) == 2 * PIECE_TOKENS
    for salted in (question(cache_salt="s"), question(lora_name="l")):
        assert history.hit_tokens(W0, pieces_of(salted, None), len(TOKENS), 1.0, None) == 0
    assert pieces_of(Question("m", 100, block_hashes=np.zeros(2, np.uint64)), None) == []
    assert pieces_of(question(TOKENS[: PIECE_TOKENS - 1]), None) == []


@pytest.mark.parametrize("block_size", [16, 48, 64, 128, 528])
def test_an_engine_that_says_its_block_size_is_guessed_in_its_own_blocks(block_size: int) -> None:
    rng = random.Random(block_size)
    for _ in range(200):
        history = RoutingHistory(TTL_S)
        sent_tokens = np.arange(rng.randrange(1, 3_000), dtype=np.int64)
        common = rng.randrange(len(sent_tokens) + 1)
        tokens = np.concatenate([sent_tokens[:common], 10_000 + np.arange(rng.randrange(1, 1_000), dtype=np.int64)])
        tokens = rng.choice([tokens, sent_tokens, sent_tokens[: common + 1]])
        shared = int(np.argmin(np.append(sent_tokens[: len(tokens)] == tokens[: len(sent_tokens)], False)))
        history.sent(W0, pieces_of(question(sent_tokens), block_size), 0.0)
        hit = history.hit_tokens(W0, pieces_of(question(tokens), block_size), len(tokens), 1.0, block_size)
        # vLLM reuses whole blocks, and computes at least one token.
        expected = min(shared // block_size, (len(tokens) - 1) // block_size) * block_size
        assert hit <= expected
        assert hit > expected - piece_tokens(block_size)
        if block_size >= PIECE_TOKENS:
            assert hit == expected


def test_the_least_recently_sent_prompt_is_forgotten_from_its_end() -> None:
    history = RoutingHistory(TTL_S, max_pieces=7)
    first, second = pieces_of(question(), None), pieces_of(question(TOKENS + 9), None)
    history.sent(W0, first, 0.0)
    history.sent(W0, second, 1.0)
    assert len(history) == 7
    assert history.hit_tokens(W0, second, 10**6, 2.0, None) == 5 * PIECE_TOKENS
    assert history.hit_tokens(W0, first, 10**6, 2.0, None) == 2 * PIECE_TOKENS
    history.forget(W0[0])
    assert len(history) == 0
