# SPDX-License-Identifier: Apache-2.0
"""A body of `/v1/responses` becomes the chat that vLLM makes of it: vLLM's conversion compared with ours."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("vllm")

from vllm import __version__
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.responses.utils import construct_input_messages, construct_tool_dicts

from kvrouter.router.route.tokens.client_body import RESPONSES_PATH, read_client_body
from kvrouter.router.route.tokens.engine.wire import template_arguments
from kvrouter.router.route.tokens.prompt_tokens import TokensUnknown
from kvrouter.router.route.tokens.responses_conversation import as_chat
from kvrouter.router.route.tokens.token_request import TokenRequest, read
from tests.engine.versions import INSTALLED, NEWEST, run_under
from tests.support.responses_bodies import malformed, response

pytestmark = pytest.mark.engine

BODIES = 3_000
MALFORMED = 1_500
TIMEOUT_S = 300.0
# The version before custom tools; those before 0.28 write other tools, which the probes show.
OLDER = "0.31.0"
CUSTOM_TOOLS = not __version__.startswith(OLDER)


def request_for(body: dict[str, Any]) -> TokenRequest:
    token_request = read(RESPONSES_PATH, read_client_body(RESPONSES_PATH, msgspec.json.encode({"model": "m"} | body)))
    assert isinstance(token_request, TokenRequest)
    return token_request


def as_text_parts(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message as far as it decides the tokens. vLLM reads parts of either kind of text alike."""
    content = message.get("content")
    if content is not None and not isinstance(content, str):
        # Pydantic leaves some lists to be read later, as an iterator.
        content = [{"type": "text", "text": part["text"]} for part in content if part["type"] == "input_text"]
    decisive = {name: message[name] for name in ("role", "reasoning", "tool_calls", "tool_call_id") if name in message}
    return decisive | ({"content": content} if "content" in message else {})


def engines_chat(body: dict[str, Any]) -> dict[str, Any]:
    """Return what vLLM gives to the chat template."""
    request = ResponsesRequest(**json.loads(json.dumps({"model": "m"} | body)))
    messages = construct_input_messages(request_instructions=request.instructions, request_input=request.input)
    params = request.build_chat_params(None, "auto")
    arguments = dict(params.chat_template_kwargs)
    assert arguments.pop("add_generation_prompt") is True
    assert not arguments.pop("continue_final_message")
    return {
        "messages": [as_text_parts(dict(message)) for message in messages],
        "tools": construct_tool_dicts(request.tools, request.tool_choice) or None,
        "arguments": arguments,
    }


def our_chat(body: dict[str, Any]) -> dict[str, Any]:
    chat = as_chat(request_for(body))
    return {"messages": chat.messages, "tools": chat.value("tools"), "arguments": template_arguments(chat)}


def key_order(chat: dict[str, Any]) -> str:
    """Return tools and calls as a template writes them, with the order of their keys."""
    calls = [call["function"] for message in chat["messages"] for call in message.get("tool_calls", ())]
    return json.dumps([chat["tools"], calls])


def test_the_chat_is_the_engines(seed: int) -> None:
    rng = random.Random(seed)
    kinds: set[str] = set()
    for _ in range(BODIES):
        body = response(rng, kinds=CUSTOM_TOOLS)
        ours, engines = our_chat(body), engines_chat(body)
        assert ours == engines, (seed, body)
        assert key_order(ours) == key_order(engines), (seed, body)
        if isinstance(body["input"], list):
            kinds |= {item.get("type", "message") for item in body["input"]}
    assert {"message", "reasoning", "function_call", "function_call_output"} <= kinds


def test_no_other_chat_is_made_of_what_clients_should_not_send(seed: int) -> None:
    rng = random.Random(seed)
    compared = 0
    for _ in range(MALFORMED):
        body = malformed(rng, response(rng, kinds=CUSTOM_TOOLS))
        try:
            ours, engines = our_chat(body), engines_chat(body)
        except Exception:
            # We leave it to the engine, or the engine refuses it, by any of many errors.
            continue
        assert ours == engines, (seed, body)
        compared += 1
    assert compared > MALFORMED / 10


def test_special_tokens_are_added_as_the_engine_adds_them() -> None:
    class Model:
        max_model_len = 8

    request = ResponsesRequest(input="a")
    assert request.build_tok_params(Model()).add_special_tokens is as_chat(request_for({"input": "a"})).value(
        "add_special_tokens"
    )


def user(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


TEXT = {"type": "input_text", "text": "a"}


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("input_image", {"input": user(TEXT, {"type": "input_image", "image_url": "data:image/png;base64,aGk="})}),
        ("input_file", {"input": user(TEXT, {"type": "input_file", "file_data": "aGk="})}),
        ("truncation", {"input": "a", "truncation": "auto"}),
        ("unfinished", {"input": [{"role": "user", "content": "a", "type": "message", "status": "incomplete"}]}),
        ("defer_loading", {"input": "a", "tools": [{"type": "function", "name": "f", "defer_loading": True}]}),
        ("'mcp'", {"input": "a", "tools": [{"type": "mcp", "server_label": "s", "server_url": "http://s"}]}),
        ("a message's name", {"input": [{"type": "message", "role": "user", "content": [TEXT], "name": "bob"}]}),
        ("previous_input_messages", {"input": "a", "previous_input_messages": [{"role": "user", "content": "b"}]}),
    ],
)
def test_what_is_not_converted_exactly_is_named_and_left_to_the_engine(name: str, body: dict[str, Any]) -> None:
    ResponsesRequest(**json.loads(json.dumps(body)))
    with pytest.raises(TokensUnknown, match=name):
        our_chat(body)


@pytest.mark.skipif(not __version__.startswith(INSTALLED), reason="this process runs another version")
@pytest.mark.parametrize("version", [NEWEST, OLDER])
def test_other_versions_make_the_same_chat(version: str) -> None:
    arguments = ["-p", "no:cacheprovider", "-p", "no:xdist", str(Path(__file__)), "-k", "the_engines"]
    output = run_under(
        version, Path(__file__).parent / "run_pytest.py", *arguments, timeout_s=TIMEOUT_S, hash_seed=None
    )
    assert "passed" in output and " failed" not in output, output
