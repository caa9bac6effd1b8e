# SPDX-License-Identifier: Apache-2.0
"""Scores, rerank, pooling and classes as vLLM 0.32.0 serves them.

Each pair of texts is a separate prompt. The score of two texts is the share of words that they have in common.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec


class ScoreBody(msgspec.Struct, kw_only=True):
    """Body of /score: `text_1` has one text, or as many as `text_2`."""

    text_1: str | list[str]
    text_2: str | list[str]
    model: str | None = None


class RerankBody(msgspec.Struct, kw_only=True):
    """Body of /rerank."""

    query: str
    documents: list[str]
    top_n: Annotated[int, msgspec.Meta(ge=0)] = 0
    model: str | None = None


class PoolingBody(msgspec.Struct, kw_only=True):
    """Body of /pooling and /classify."""

    input: str | list[str]
    model: str | None = None


class SpeechBody(msgspec.Struct, kw_only=True):
    """Body of /v1/audio/speech."""

    input: str
    model: str | None = None


def pairs(first: str | list[str], second: str | list[str]) -> list[tuple[str, str]]:
    """Return the pairs that are scored. Raises ValueError if the numbers of texts do not match."""
    firsts, seconds = [first] if isinstance(first, str) else first, [second] if isinstance(second, str) else second
    if len(firsts) == 1:
        firsts = firsts * len(seconds)
    if len(firsts) != len(seconds) or not firsts:
        raise ValueError("text_1 has as many texts as text_2, or one")
    return list(zip(firsts, seconds, strict=True))


def score(first: str, second: str) -> float:
    """Return the share of common words, between 0 and 1."""
    first_words, second_words = set(first.split()), set(second.split())
    return len(first_words & second_words) / max(1, len(first_words | second_words))


def score_reply(
    request_id: str, model: str, created: int, scored: list[tuple[str, str]], tokens: int
) -> dict[str, Any]:
    """Return the answer to /score; `tokens` counts the tokens of all prompts."""
    data = [{"index": n, "object": "score", "score": score(*pair)} for n, pair in enumerate(scored)]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0, "prompt_tokens_details": None}
    head = {"id": f"score-{request_id}", "object": "list", "created": created, "model": model}
    return {**head, "data": data, "usage": usage}


def rerank_reply(request_id: str, model: str, body: RerankBody, tokens: int) -> dict[str, Any]:
    """Return the answer to /rerank, the best document first; `tokens` counts the tokens of all prompts."""
    scored = [(score(body.query, text), n, text) for n, text in enumerate(body.documents)]
    results = [
        {"index": n, "document": {"text": text, "multi_modal": None}, "relevance_score": score_value}
        for score_value, n, text in sorted(scored, key=lambda result: -result[0])
    ]
    return {
        "id": f"rerank-{request_id}",
        "model": model,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        "results": results[: body.top_n or None],
    }


def pooling_reply(request_id: str, model: str, created: int, tokens: list[int], classifies: bool) -> dict[str, Any]:
    """Return the answer to /pooling or /classify; `tokens` has the number of prompt tokens of each text."""
    total = sum(tokens)
    usage = {"prompt_tokens": total, "total_tokens": total, "completion_tokens": 0, "prompt_tokens_details": None}
    if classifies:
        result: dict[str, Any] = {"label": "LABEL_0", "probs": [0.75, 0.25], "num_classes": 2}
        head = {"id": f"classify-{request_id}"}
    else:
        result = {"object": "pooling", "data": [0.75, 0.25]}
        head = {"id": f"pool-{request_id}"}
    data = [{"index": number, **result} for number in range(len(tokens))]
    return {**head, "object": "list", "created": created, "model": model, "data": data, "usage": usage}
