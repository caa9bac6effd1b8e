# SPDX-License-Identifier: Apache-2.0
"""The tokens of bodies of `/v1/responses` from engines that do not render them.

Real HTTP servers answer as vLLM does.
"""

from __future__ import annotations

from typing import Any

import pytest

from kvrouter.router.route.tokens.client_body import RESPONSES_PATH
from kvrouter.router.route.tokens.engine import verified_engines
from tests.support.token_engine import tokens_of
from tests.support.tokenizer_stage import MODEL, NO_RENDER, Here, case, ids, until

RENDER_RESPONSES = f"{RESPONSES_PATH}/render"
ASKED = {"instructions": "Be brief", "input": "Hi 🙂"}
CALLS = {
    "input": [
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "1"},
    ]
}


class HereToo(Here):
    """A local tokenizer that reads Responses as well."""

    reads_responses = True


def without_calls(body: dict[str, Any]) -> list[int]:
    """Return the tokens of an engine that reads calls in Responses in its own way."""
    return [8, *tokens_of(body)] if "function_call" in str(body.get("input")) else tokens_of(body)


@pytest.mark.parametrize("statuses", [NO_RENDER | {RENDER_RESPONSES: 404}, {RENDER_RESPONSES: 404}])
@pytest.mark.parametrize("tells_ids", [True, False])
async def test_without_a_render_endpoint_responses_are_converted_and_verified(
    statuses: dict[str, int], tells_ids: bool
) -> None:
    async with case(statuses=statuses, tells_ids=tells_ids) as stage:
        prompt = await stage.response(**ASKED)
        assert (ids(prompt), prompt.source) == (tokens_of(ASKED), "tokenize")
        assert ids(await stage.response(**CALLS)) == tokens_of(CALLS)
        assert list(stage.tokenizing.unread_responses()) == [] == stage.tokenizing.health()
        # A probe runs for one token, and the engine does not keep it.
        probes = [body for path, body in stage.engines[0].asked if path == RESPONSES_PATH]
        assert probes and all(probe["store"] is False and probe["max_output_tokens"] == 1 for probe in probes)


async def test_an_engine_that_reads_calls_in_its_own_way_is_reported_after_the_first_such_request() -> None:
    async with case(statuses=NO_RENDER | {RENDER_RESPONSES: 404}, tokens=without_calls) as stage:
        assert (await stage.response(**ASKED)).source == "tokenize"
        assert list(stage.tokenizing.unread_responses()) == []
        prompt = await stage.response(**CALLS)
        assert (ids(prompt), prompt.reason) == (None, "unverified")
        (unread,) = stage.tokenizing.unread_responses()
        assert unread.model == MODEL and unread.can_render
        assert "with calls of functions is placed by load" in unread.problem and "token 0" in unread.problem
        # This is no difference in chats.
        assert stage.tokenizing.health() == []


async def test_the_report_ends_when_the_engine_comes_back_with_its_render_endpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(verified_engines, "MIN_JUDGE_INTERVAL_S", 0.0)
    async with case(statuses=NO_RENDER | {RENDER_RESPONSES: 404}, tokens=without_calls) as stage:
        await stage.response(**CALLS)
        assert list(stage.tokenizing.unread_responses())
        stage.engines[0].statuses = {}
        stage.lives[0] = "2"
        await until(lambda: not list(stage.tokenizing.unread_responses()))
        prompt = await stage.response(**CALLS)
        assert (ids(prompt), prompt.source) == (without_calls(CALLS), "render")


async def test_an_engine_without_the_path_is_judged_by_its_chats_and_not_reported() -> None:
    async with case(statuses=NO_RENDER | {RENDER_RESPONSES: 404, RESPONSES_PATH: 404}) as stage:
        assert (await stage.chat()).source == "tokenize"
        assert (await stage.response(**ASKED)).reason == "unverified"
        assert list(stage.tokenizing.unread_responses()) == [] == stage.tokenizing.health()


async def test_an_engine_whose_template_refuses_instructions_is_tried_without() -> None:
    async with case(statuses=NO_RENDER | {RENDER_RESPONSES: 404}) as stage:
        stage.engines[0].refused = "instructions"
        prompt = await stage.response(input="Hi")
        assert (ids(prompt), prompt.source) == (tokens_of({"input": "Hi"}), "tokenize")


async def test_a_local_tokenizer_reads_responses_where_it_agrees() -> None:
    async with case(statuses=NO_RENDER | {RENDER_RESPONSES: 404}, local=HereToo(), tokens=without_calls) as stage:
        prompt = await stage.response(**ASKED)
        assert (ids(prompt), prompt.source) == (tokens_of(ASKED), "local")
        assert (await stage.response(**CALLS)).reason == "unverified"
        assert (await stage.chat()).source == "local"


async def test_what_cannot_be_converted_is_named() -> None:
    async with case(statuses=NO_RENDER | {RENDER_RESPONSES: 404}) as stage:
        image = {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]}
        prompt = await stage.response(**image)
        assert prompt.reason == "media" and "input_image" in prompt.problem
        prompt = await stage.response(input="a", truncation="auto")
        assert prompt.reason == "unsupported" and "truncation" in prompt.problem
        prompt = await stage.response(input="a", kv_transfer_params={"prompt_token_ids": [1]})
        assert prompt.reason == "not_looked_up" and "prompt_token_ids" in prompt.problem
