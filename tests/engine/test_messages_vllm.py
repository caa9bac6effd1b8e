# SPDX-License-Identifier: Apache-2.0
"""A message of Anthropic's API becomes the chat that vLLM makes of it: vLLM's conversion compared with ours."""

from __future__ import annotations

import json
import random
from typing import Any

import msgspec
import pytest

pytest.importorskip("vllm")

from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages

from kvrouter.router.route.tokens.anthropic_messages import as_chat
from kvrouter.router.route.tokens.client_body import MESSAGES_PATH, read_client_body
from kvrouter.router.route.tokens.prompt_tokens import TokensUnknown
from kvrouter.router.route.tokens.token_request import TokenRequest, read
from tests.support.anthropic_bodies import message

pytestmark = pytest.mark.engine

BODIES = 3_000


def asked(body: dict[str, Any]) -> TokenRequest:
    token_request = read(MESSAGES_PATH, read_client_body(MESSAGES_PATH, msgspec.json.encode({"model": "m"} | body)))
    assert isinstance(token_request, TokenRequest)
    return token_request


def engines_chat(body: dict[str, Any], *, merges_system: bool) -> dict[str, Any]:
    """Return the fields of vLLM's chat that decide its tokens."""
    request = AnthropicMessagesRequest(**json.loads(json.dumps({"model": "m"} | body)))
    chat = AnthropicServingMessages.to_chat_completion_request(request, merge_inline_system=merges_system)
    fields: dict[str, Any] = {"messages": [dict(turn) for turn in chat.messages]}
    if chat.tools is not None:
        fields["tools"] = [tool.model_dump() for tool in chat.tools]
    if chat.tool_choice == "none" and body.get("tool_choice"):
        fields["tool_choice"] = "none"
    if chat.chat_template_kwargs is not None:
        fields["chat_template_kwargs"] = chat.chat_template_kwargs
    assert chat.reasoning_effort is None and chat.documents is None
    return fields


@pytest.mark.parametrize("merges_system", [False, True])
def test_the_chat_is_the_engines(merges_system: bool, seed: int) -> None:
    rng = random.Random(seed + merges_system)
    compared = left = 0
    for _ in range(BODIES):
        body = message(rng)
        try:
            chat = as_chat(asked(body), merges_system=merges_system)
        except TokensUnknown:
            left += 1
            continue
        ours = {name: chat.value(name) for name in chat.fields}
        assert ours == engines_chat(body, merges_system=merges_system), (seed, body)
        compared += 1
    assert compared >= BODIES * 0.9, left


@pytest.mark.parametrize(
    "body",
    [
        {"output_config": {"effort": "high"}},
        {"tools": [{"name": "a", "input_schema": {}, "strict": True}]},
        {"tools": []},
        {"system": [{"type": "text", "text": "x-anthropic-billing-header: 1"}]},
        {"messages": [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "1"}]}]},
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "x", "input": {}}]}]},
        {
            "messages": [
                {"role": "user", "content": "a"},
                {
                    "role": "system",
                    "content": [{"type": "tool_removal", "tool": {"type": "tool_reference", "name": "x"}}],
                },
            ],
            "tools": [{"name": "x", "input_schema": {}}],
        },
    ],
)
def test_what_versions_read_differently_is_left_to_the_engine(body: dict[str, Any]) -> None:
    whole = {"max_tokens": 4, "messages": [{"role": "user", "content": "a"}]} | body
    engines_chat({name: value for name, value in whole.items() if name != "output_config"}, merges_system=False)
    with pytest.raises(TokensUnknown):
        as_chat(asked(whole), merges_system=False)
