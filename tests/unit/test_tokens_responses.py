# SPDX-License-Identifier: Apache-2.0
"""A body of `/v1/responses` as the chat that vLLM makes of it; `tests/engine/test_responses_vllm.py` compares them."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from kvrouter.router.model.engines.sglang.description import SGLANG
from kvrouter.router.model.engines.vllm.description import VLLM
from kvrouter.router.route.tokens.client_body import RESPONSES_PATH, read_client_body
from kvrouter.router.route.tokens.engine.probes import PLAIN_RESPONSES, RESPONSE_PROBES
from kvrouter.router.route.tokens.engine.wire import RenderQuirks, tokenize_body
from kvrouter.router.route.tokens.prompt_tokens import TokensUnknown
from kvrouter.router.route.tokens.responses_conversation import as_chat
from kvrouter.router.route.tokens.token_request import TokenRequest, read
from tests.support.responses_bodies import malformed, response

FUNCTION = {"type": "function", "name": "f", "parameters": {}}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": 1}'}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "1"}
REASONING = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "why"}]}
ANSWER = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "so"}, {"text": "lost"}]}


def request_for(**body: Any) -> TokenRequest:
    request = read(RESPONSES_PATH, read_client_body(RESPONSES_PATH, msgspec.json.encode({"model": "m"} | body)))
    assert isinstance(request, TokenRequest)
    return request


def test_items_of_one_answer_are_one_message() -> None:
    chat = as_chat(
        request_for(instructions="Be brief", input=[{"role": "user", "content": "a"}, REASONING, ANSWER, CALL, OUTPUT])
    )
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    assert chat.messages == [
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "reasoning": "why", "content": "so", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "1"},
    ]
    assert as_chat(request_for(input=[ANSWER, ANSWER])).messages == [{"role": "assistant", "content": "so"}] * 2


def test_what_the_template_gets_besides_is_kept() -> None:
    chat = as_chat(
        request_for(
            input="a", tools=[FUNCTION], tool_choice="none", reasoning={"effort": "low"}, chat_template_kwargs={"x": 1}
        )
    )
    assert chat.messages == [{"role": "user", "content": "a"}]
    assert chat.value("tools") == [
        {"type": "function", "function": {"name": "f", "description": None, "parameters": {}}}
    ]
    assert chat.value("tool_choice") == "none" and chat.value("reasoning_effort") == "low"
    assert chat.value("chat_template_kwargs") == {"x": 1} and chat.value("add_special_tokens") is True


@pytest.mark.parametrize(
    ("body", "features"),
    [
        ({"input": "a"}, ()),
        ({"input": "a", "tools": []}, ()),
        ({"input": "a", "tools": [FUNCTION]}, ("response tools",)),
        ({"input": "a", "tools": [FUNCTION], "tool_choice": "none"}, ("unused response tools",)),
        ({"input": "a", "tools": [{"type": "web_search"}]}, ("response tools", "response tool kinds")),
        ({"input": [CALL]}, ("response calls",)),
        ({"input": [OUTPUT]}, ("response calls",)),
        ({"input": [CALL | {"namespace": "n"}]}, ("response calls", "response call kinds")),
        ({"input": [{"type": "custom_tool_call_output"}]}, ("response call kinds",)),
        ({"input": [{"type": []}, 3], "tools": [3]}, ()),
    ],
)
def test_features_are_those_that_the_probes_prove(body: dict[str, Any], features: tuple[str, ...]) -> None:
    assert request_for(**body).features == ("responses", *features)


def test_each_probe_has_its_feature_and_can_be_converted() -> None:
    for feature, probe in RESPONSE_PROBES.items():
        assert feature in probe.features
        tokenize_body(probe, RenderQuirks(), VLLM.tokens)
    assert PLAIN_RESPONSES.features == ("responses",)
    with pytest.raises(TokensUnknown, match="is not known"):
        tokenize_body(PLAIN_RESPONSES, RenderQuirks(), SGLANG.tokens)


@pytest.mark.parametrize("seed", range(2))
def test_malformed_bodies_are_left_to_the_engine(seed: int) -> None:
    rng = random.Random(seed)
    left = 0
    for _ in range(2_000):
        request = request_for(**malformed(rng, response(rng)))
        assert request.features[0] == "responses"
        try:
            as_chat(request)
        except TokensUnknown:
            left += 1
    assert left
