# SPDX-License-Identifier: Apache-2.0
"""What is guessed of engines that tell nothing."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvrouter.router.common.ids import WorkerKey
from kvrouter.router.matching.question import Question
from kvrouter.router.matching.routing_history import PIECE_TOKENS, RoutingHistory, pieces_of

W0, W1 = (WorkerKey("m", "w0"), 0), (WorkerKey("m", "w1"), 0)
TTL_S = 10.0
TOKENS = np.arange(5 * PIECE_TOKENS, dtype=np.int64)


def question(tokens: np.ndarray = TOKENS, **fields: Any) -> Question:
    return Question("m", len(tokens), token_ids=tokens, **fields)


def test_what_was_sent_is_believed_for_a_while() -> None:
    history = RoutingHistory(TTL_S)
    pieces = pieces_of(question())
    history.sent(W0, pieces, 0.0)
    assert history.hit_tokens(W0, pieces, len(TOKENS), TTL_S - 1) == len(TOKENS) - 1
    assert history.hit_tokens(W1, pieces, len(TOKENS), 1.0) == 0
    assert history.hit_tokens((W0[0], 1), pieces, len(TOKENS), 1.0) == 0, "another life"
    assert history.hit_tokens(W0, pieces, len(TOKENS), TTL_S) == 0
    history.expire(TTL_S)
    assert len(history) == 0


def test_a_shared_start_counts_and_anything_else_is_another_prompt() -> None:
    history = RoutingHistory(TTL_S)
    history.sent(W0, pieces_of(question()), 0.0)
    other = TOKENS.copy()
    other[2 * PIECE_TOKENS + 3] += 1
    assert history.hit_tokens(W0, pieces_of(question(other)), len(other), 1.0) == 2 * PIECE_TOKENS
    for one in (question(cache_salt="s"), question(lora_name="l")):
        assert history.hit_tokens(W0, pieces_of(one), len(TOKENS), 1.0) == 0
    assert pieces_of(Question("m", 100, block_hashes=np.zeros(2, np.uint64))) == []
    assert pieces_of(question(TOKENS[: PIECE_TOKENS - 1])) == []


def test_where_room_is_lacking_the_least_lately_sent_goes_its_end_first() -> None:
    history = RoutingHistory(TTL_S, max_pieces=7)
    first, second = pieces_of(question()), pieces_of(question(TOKENS + 9))
    history.sent(W0, first, 0.0)
    history.sent(W0, second, 1.0)
    assert len(history) == 7
    assert history.hit_tokens(W0, second, 10**6, 2.0) == 5 * PIECE_TOKENS
    assert history.hit_tokens(W0, first, 10**6, 2.0) == 2 * PIECE_TOKENS
    history.forget(W0[0])
    assert len(history) == 0
