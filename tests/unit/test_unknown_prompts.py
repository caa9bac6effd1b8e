# SPDX-License-Identifier: Apache-2.0
"""The moment from which the texts of a model count as without tokens."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from kvrouter.router.route.tokens.client_body import read_client_body
from kvrouter.router.route.tokens.prompt_tokens import Prompt, Reason
from kvrouter.router.route.tokens.unknown_prompts import (
    COUNTED_MIN,
    COUNTED_S,
    OF_THE_REQUEST,
    WINDOW,
    WITHOUT_ENGINE,
    UnknownPrompts,
)
from tests.support.tokenizer_stage import MODEL, case

KNOWN = Prompt(3, np.arange(3), "render")


def unknown(reason: Reason, problem: str = "a sentence") -> Prompt:
    return Prompt(3, None, "none", problem, reason=reason)


def test_most_texts_without_tokens_are_named_with_the_usual_reason() -> None:
    texts = UnknownPrompts(lambda: 0.0)
    texts.add("m", unknown("timeout"))
    for number in range(COUNTED_MIN - 2):
        texts.add("m", unknown("unauthorized", f"sentence {number}"))
    assert not list(texts.found()), "a few say nothing"
    texts.add("m", KNOWN)
    (missing,) = texts.found()
    assert (missing.model, missing.missing, missing.counted) == ("m", COUNTED_MIN - 1, COUNTED_MIN)
    assert (missing.reason, missing.problem) == ("unauthorized", f"sentence {COUNTED_MIN - 3}")
    assert texts.health() == [f"model m: {missing.text}"] and "(unauthorized): sentence" in missing.text


def test_half_of_the_texts_are_not_most_and_success_ends_the_finding() -> None:
    texts = UnknownPrompts(lambda: 0.0)
    for _ in range(WINDOW):
        texts.add("m", unknown("busy"))
    assert list(texts.found())
    for _ in range(WINDOW // 2):
        texts.add("m", KNOWN)
    assert not list(texts.found())


def test_refusals_of_single_requests_and_given_ids_do_not_count() -> None:
    texts = UnknownPrompts(lambda: 0.0)
    for _ in range(COUNTED_MIN):
        for reason in OF_THE_REQUEST:
            texts.add("m", unknown(reason))
    assert not list(texts.found())
    for _ in range(COUNTED_MIN):
        texts.add("m", unknown("timeout"))
        # Prompts with known tokens do not hide a problem either.
        for _ in range(9):
            texts.add("m", Prompt(3, np.arange(3), "given"))
    assert [missing.counted for missing in texts.found()] == [COUNTED_MIN]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": "a text"}),
        ("/v1/embeddings", {"input": ["a text", "another"]}),
        ("/v1/embeddings", {"input": [1, 2], "truncate_prompt_tokens": 1}),
        ("/generate", {"text": ["a text", "another"]}),
        ("/generate", {"input_ids": [[1, 2], [3]]}),
        ("/generate", {"text": "a text", "session_params": {"id": "s"}}),
        ("/v1/completions", {"prompt": ["a"] * 5_000}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "extra_key": "k"}),
        ("/v1/responses", {"input": "hi", "previous_response_id": "resp_1"}),
        ("/v1/responses", {"input": "hi", "kv_transfer_params": {"prompt_token_ids": [1]}}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "thinking": {"type": "disabled"}}),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": "hi"}], "kv_transfer_params": {"prompt_token_ids": [1]}},
        ),
    ],
)
async def test_requests_that_are_never_looked_up_do_not_count(path: str, body: dict[str, Any]) -> None:
    body["model"] = MODEL
    client_body = read_client_body(path, json.dumps(body).encode())
    async with case() as stage:
        for _ in range(COUNTED_MIN):
            prompt = await stage.tokenizing.prompt(path, MODEL, client_body)
            assert (prompt.source, prompt.reason) == ("none", "not_looked_up") and prompt.problem
        assert not list(stage.tokenizing.missing())


def test_models_are_judged_apart_and_those_that_are_gone_forgotten() -> None:
    texts = UnknownPrompts(lambda: 0.0)
    for _ in range(COUNTED_MIN):
        texts.add("m", unknown("timeout"))
        texts.add("n", KNOWN)
    assert [missing.model for missing in texts.found()] == ["m"]
    texts.keep({"n"})
    assert not texts.health()


def test_texts_no_longer_count_after_a_while() -> None:
    times = iter([*range(COUNTED_MIN), COUNTED_S, COUNTED_S + 1, COUNTED_S + COUNTED_MIN + 1])
    texts = UnknownPrompts(lambda: float(next(times)))
    for _ in range(COUNTED_MIN):
        texts.add("m", unknown("timeout"))
    assert list(texts.found())
    assert not list(texts.found()), "fewer than needed are left"
    assert not list(texts.found())


def test_texts_whose_reason_has_ended_are_forgotten() -> None:
    texts = UnknownPrompts(lambda: 0.0)
    for _ in range(COUNTED_MIN):
        for reason in WITHOUT_ENGINE:
            texts.add("m", unknown(reason))
        texts.add("n", unknown("unreachable"))
    texts.end("m", WITHOUT_ENGINE)
    assert [missing.model for missing in texts.found()] == ["n"]
    for _ in range(COUNTED_MIN):
        texts.add("m", unknown("busy"))
    texts.end("m", WITHOUT_ENGINE)
    assert {missing.model for missing in texts.found()} == {"m", "n"}
