# SPDX-License-Identifier: Apache-2.0
"""Fields of a body that decide its tokens, and the body that is sent on with ids in place of text."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import numpy as np
import pytest

from kvrouter.router.base.common.errors import BadQuestion
from kvrouter.router.model.engines.vllm.description import VLLM
from kvrouter.router.route.tokens.client_body import CHAT_PATH, MESSAGES_PATH, TEXT_PATH, read_client_body
from kvrouter.router.route.tokens.engine.wire import RenderQuirks, refusal_of, tokenize_body
from kvrouter.router.route.tokens.forward_ids import MIN_TOKENS, forwarded_body
from kvrouter.router.route.tokens.prompt_tokens import Prompt, TokensUnknown, estimated_tokens
from kvrouter.router.route.tokens.token_request import WITHOUT_TOKENS, TokenRequest, read

USER = {"role": "user", "content": "Hi"}
CHAT = {"messages": [USER]}


def request_for(body: dict[str, Any], path: str = CHAT_PATH) -> TokenRequest:
    request = read(path, read_client_body(path, msgspec.json.encode(body)))
    assert isinstance(request, TokenRequest)
    return request


def test_the_fields_without_influence_are_complete_names() -> None:
    assert {"model", "prediction", "return_mm_kwargs", "cache_salt"} <= WITHOUT_TOKENS
    assert all(len(name) > 1 or name == "n" for name in WITHOUT_TOKENS)
    # These fields do decide the tokens.
    assert WITHOUT_TOKENS.isdisjoint(
        {"messages", "prompt", "tools", "tool_choice", "documents", "reasoning_effort", "suffix", "response_format"}
    )


@pytest.mark.parametrize("name", sorted(WITHOUT_TOKENS - {"kv_transfer_params"}))
def test_fields_without_influence_do_not_change_the_key(name: str) -> None:
    assert request_for(CHAT | {name: 3}).key == request_for(CHAT).key


@pytest.mark.parametrize(
    "more",
    [
        {"tools": [{}]},
        {"add_generation_prompt": False},
        {"chat_template_kwargs": {"a": 1}},
        {"field_of_tomorrow": 1},
        {"truncate_prompt_tokens": 5},
        {"tool_choice": "none"},
        {"messages": [USER, USER]},
    ],
)
def test_fields_with_influence_change_the_key(more: dict[str, Any]) -> None:
    assert request_for(CHAT | more).key != request_for(CHAT).key


def test_limits_of_the_answer_decide_where_the_prompt_is_cut() -> None:
    cut = CHAT | {"truncate_prompt_tokens": -1}
    assert request_for(cut | {"max_tokens": 5}).key != request_for(cut | {"max_tokens": 6}).key


def test_two_fields_cannot_collide_with_one() -> None:
    joined = TokenRequest("chat", {"a": msgspec.Raw(b'"1b=3:222"')})
    split = TokenRequest("chat", {"a": msgspec.Raw(b'"1'), "b": msgspec.Raw(b'222"')})
    assert joined.key != split.key


@pytest.mark.parametrize(
    ("part", "media"),
    [
        ({"type": "text", "text": "a"}, False),
        ("a", False),
        ({"text": "a"}, False),
        ({"type": "image_url", "image_url": {"url": "x"}}, True),
        ({"image_url": "x"}, True),
        ({"type": "text", "text": "a", "image_url": "x"}, True),
        ({"type": "input_audio", "input_audio": {}}, True),
        ({"type": "prompt_embeds", "data": "x"}, True),
        ({"type": ["text"]}, True),
        ({"type": "something new"}, True),
    ],
)
def test_a_message_with_more_than_text_is_seen(part: Any, media: bool) -> None:
    request = request_for({"messages": [USER, {"role": "user", "content": ["x", part]}]})
    assert request.media_at == (1 if media else None)


@pytest.mark.parametrize("params", [["prompt_token_ids"], "prompt_token_ids", [{"prompt_token_ids": [1]}]])
def test_transfer_params_that_are_no_object_have_no_ids(params: Any) -> None:
    """The engine refuses such a body, or ignores the field."""
    assert request_for(CHAT | {"kv_transfer_params": params}).key == request_for(CHAT).key


@pytest.mark.parametrize("ids", [["a"], [None], [-1], [2**70], [1.5], [[1]]])
def test_transferred_ids_that_are_none_are_the_clients_error(ids: Any) -> None:
    with pytest.raises(BadQuestion, match="token_ids"):
        read(CHAT_PATH, read_client_body(CHAT_PATH, json.dumps({**CHAT, **transferred(ids)}).encode()))


def transferred(ids: Any) -> dict[str, Any]:
    return {"kv_transfer_params": {"prompt_token_ids": ids}}


def test_a_result_within_results_is_descended_without_recursion() -> None:
    block: dict[str, Any] = {"type": "image"}
    for _ in range(300):
        block = {"type": "tool_result", "content": [block]}
    assert request_for({"messages": [{"role": "user", "content": [block]}]}, MESSAGES_PATH).media_at == 0
    deep = b'[{"type":"tool_result","content":' * 450 + b"[]" + b"}]" * 450
    body = read_client_body(MESSAGES_PATH, b'{"messages":[{"role":"user","content":' + deep + b"}]}")
    request = read(MESSAGES_PATH, body)
    assert isinstance(request, TokenRequest) and request.media_at is None


def test_features_are_those_that_the_probes_prove() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    assert request_for(CHAT).features == ("chat",)
    assert request_for(CHAT | {"tools": [tool]}).features == ("chat", "tools")
    assert request_for({"messages": [USER, {"role": "tool", "content": "1"}]}).features == ("chat", "tools")
    assert request_for(CHAT | {"continue_final_message": True}).features == ("chat", "continued")
    assert request_for({"prompt": "a"}, TEXT_PATH).features == ("text",)


def test_tokenize_gets_the_fields_as_the_chat_endpoint_reads_them() -> None:
    message = {"role": "assistant", "content": "a", "reasoning_content": "r"}
    body = {
        "messages": [message],
        "tools": [{}],
        "tool_choice": "none",
        "documents": [{"text": "d"}],
        "reasoning_effort": "none",
        "chat_template_kwargs": {"own": 1},
        "add_special_tokens": True,
        "unheard_of": 1,
    }
    sent_body = msgspec.json.decode(tokenize_body(request_for(body), RenderQuirks(), VLLM.tokens))
    arguments = {"own": 1, "documents": [{"text": "d"}], "reasoning_effort": "none", "enable_thinking": False}
    assert sent_body == {
        "messages": [{"role": "assistant", "content": "a", "reasoning": "r"}],
        "tools": [{}],
        "chat_template_kwargs": arguments,
        "add_special_tokens": True,
    }
    assert "tools" not in msgspec.json.decode(
        tokenize_body(request_for(body), RenderQuirks(keeps_unused_tools=False), VLLM.tokens)
    )
    for name in ("truncate_prompt_tokens", "suffix"):
        with pytest.raises(TokensUnknown):
            tokenize_body(request_for(CHAT | {name: 1}), RenderQuirks(), VLLM.tokens)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b'{"error": {"message": "too long", "type": "x"}}', "too long"),
        (b'{"object": "error", "message": "old form"}', "old form"),
        (b'{"detail": "x"}', ""),
        (b"<html>", ""),
        (b'{"error": {"message": "' + b"x" * 9999 + b'"}}', "x" * 500),
    ],
)
def test_an_engines_refusal_keeps_its_message(answer: bytes, said: str) -> None:
    assert refusal_of(answer) == said


def test_a_prompt_is_a_question_for_what_is_known_of_it() -> None:
    ids = np.arange(5, dtype=np.int64)
    complete = Prompt(5, ids, "local").question("m", cache_salt="s")
    assert complete.token_ids is ids and (complete.num_tokens, complete.cache_salt) == (5, "s")
    partly = Prompt(900, ids, "local", known_tokens=5).question("m")
    assert partly.token_ids is ids and partly.num_tokens == 900
    nothing = Prompt(900, None, "none").question("m")
    assert nothing.token_ids is None and nothing.block_hashes is not None and nothing.num_tokens == 900
    assert estimated_tokens(0) == 1


IDS = np.arange(MIN_TOKENS, dtype=np.int64)
FOUND = Prompt(len(IDS), IDS, "render", replaces=True)


def body(**fields: Any) -> bytes:
    return msgspec.json.encode({"model": "m", "prompt": "text", "temperature": 0.1} | fields)


def test_a_completion_is_forwarded_with_its_ids() -> None:
    sent_body = msgspec.json.decode(forwarded_body(TEXT_PATH, body(stream=True, echo=False), FOUND))
    expected = {"model": "m", "prompt": IDS.tolist(), "temperature": 0.1, "stream": True, "echo": False}
    assert sent_body == expected


@pytest.mark.parametrize(
    ("path", "raw", "prompt"),
    [
        (CHAT_PATH, body(), FOUND),
        (TEXT_PATH, body(prompt=["text"]), FOUND),
        (TEXT_PATH, body(prompt=[1, 2]), FOUND),
        (TEXT_PATH, body(echo=True), FOUND),
        (TEXT_PATH, body(suffix="x"), FOUND),
        (TEXT_PATH, body(prompt_logprobs=1), FOUND),
        (TEXT_PATH, body(truncate_prompt_tokens=1), FOUND),
        (TEXT_PATH, b"{", FOUND),
        (TEXT_PATH, body(), Prompt(len(IDS), IDS, "render")),
        (TEXT_PATH, body(), Prompt(9, IDS[:9], "render", replaces=True)),
        (TEXT_PATH, body(), Prompt(9, None, "none", replaces=True)),
    ],
)
def test_the_clients_body_is_forwarded_in_doubt(path: str, raw: bytes, prompt: Prompt) -> None:
    assert forwarded_body(path, raw, prompt) is raw


def test_a_nested_prompt_is_refused_and_not_descended() -> None:
    with pytest.raises(BadQuestion, match="nested"):
        read(TEXT_PATH, read_client_body(TEXT_PATH, b'{"prompt": [[["a"]]]}'))
    with pytest.raises(BadQuestion):
        read(TEXT_PATH, read_client_body(TEXT_PATH, b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"))
