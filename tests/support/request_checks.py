# SPDX-License-Identifier: Apache-2.0
"""Requests that vLLM's HTTP server accepts or refuses before it computes anything.

The list is the same for a real server and for the simulator. The real server's answers are in
tests/golden/request_checks.json. The list has only mistakes that clients make in fields that the simulator uses;
docs/reference/simulator.md lists the rest.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any, NamedTuple
from urllib.parse import urlsplit

COMPLETIONS, CHAT, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/messages"
TOKENIZE, DETOKENIZE, COUNT = "/tokenize", "/detokenize", "/v1/messages/count_tokens"
JSON = "application/json"
TIMEOUT_S = 120.0
# The context length of the compared engines, in tokens of prompt and answer together.
CONTEXT_TOKENS = 2_048
HELLO = {"role": "user", "content": "hello"}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {}}}


def each(field: str, *values: Any) -> list[dict[str, Any]]:
    """Return one change of a body for each value of the field."""
    return [{field: value} for value in values]


GOOD: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "hello", "max_tokens": 1},
    CHAT: {"messages": [HELLO], "max_tokens": 1},
    MESSAGES: {"messages": [HELLO], "max_tokens": 1},
    TOKENIZE: {"prompt": "hello"},
    DETOKENIZE: {"tokens": [1, 2]},
    COUNT: {"messages": [HELLO]},
}
# Changes of a good body in the fields that completions and chats share.
SAMPLING: list[dict[str, Any]] = [
    *each("max_tokens", 0, -1, 1.5, 1.0, "1", "x", None, True, 10**9, 2**70),
    *each("n", 0, 1, "1"),
    *each("temperature", -0.1, 0, 2, 2.1, "0.5", "x", None, True),
    *each("top_p", 0, 1, 1.1, "x", None),
    *each("top_k", -2, -1, 0, 5, 1.5, None),
    *each("min_p", -0.1, 0.5, 1.1),
    *each("presence_penalty", -2.1, 2, 2.1),
    *each("frequency_penalty", -2.1, 2, 2.1),
    *each("repetition_penalty", 0, 1.5),
    *each("min_tokens", -1, 0, 1, 2),
    *each("stop", "x", ["x"], [], "", [""], 1, None),
    *each("seed", 1, 2**63, "x"),
    *each("stream", "x", 2, "true"),
    *each("stream_options", {"include_usage": True}, {}, None),
    *(
        {"stream": True} | change
        for change in each("stream_options", {"include_usage": True}, {"include_usage": 5}, [], "x")
    ),
    *each("cache_salt", "", "s", "s" * 128, "s" * 129, "a/b", "a@b", "a\\b", "a\0b", 5, None),
    *each("kv_transfer_params", {}, [], "x", None),
    *each("user", "u", 5),
    *each("model", "other", "", 5, None),
    *each("ignore_eos", True, "x"),
    *each("priority", 0, "x"),
    *each("return_token_ids", True, "x", None),
    *each("stop_token_ids", [1], ["x"], 1, None),
    *each("logit_bias", {"1": 1.0}, [], None),
    *each("request_id", "r", 5),
    {"unknown_field": 1},
]
OF_COMPLETIONS: list[dict[str, Any]] = [
    *each("prompt", "", None, [], [""], [[]], "x", ["x"], [1], [[1]], [-1], [1.0], [1.5], ["x", 1]),
    *each("prompt", 5, {}, True, [None], [10**6], [2**70], "\ud83d\ude00"),
    *each("logprobs", None, -2, "x"),
    *each("prompt_logprobs", None, -2, "x"),
    *each("echo", False, "x"),
    {"suffix": 5},
    *each("prompt", *([5] * length for length in (CONTEXT_TOKENS - 1, CONTEXT_TOKENS, CONTEXT_TOKENS + 1))),
    {"prompt": [5] * (CONTEXT_TOKENS - 9), "max_tokens": 9},
    {"prompt": [5] * (CONTEXT_TOKENS - 9), "max_tokens": 10},
    # Without `max_tokens` the default is 16, which does not fit.
    {"prompt": [5] * (CONTEXT_TOKENS - 9), "max_tokens": None},
]
OF_CHATS: list[dict[str, Any]] = [
    *each("messages", None, [], {}, "x", [5], [{}], [{"role": "user"}], [{"content": "x"}]),
    *(
        {"messages": [change | {"content": "x"}]}
        for change in each("role", "system", "assistant", "tool", "other", "", 5, None)
    ),
    *({"messages": [{"role": "user"} | change]} for change in each("content", None, "", [], 5, {}, ["x"], [{}])),
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]},
    {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
    {"messages": [{"role": "user", "content": [{"type": "other", "text": "x"}]}]},
    *each("max_completion_tokens", 0, -1, 1, "x", None),
    *each("tools", [TOOL], [], {}, [{}], [5], None),
    *each("tool_choice", "none", "auto", "other", None),
    {"tools": [TOOL], "tool_choice": "auto"},
    {"tools": [TOOL], "tool_choice": "other"},
    {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "other"}}},
    *each("add_generation_prompt", False, "x", None),
    {"continue_final_message": True},
    {"continue_final_message": True, "add_generation_prompt": True},
    {
        "messages": [HELLO, {"role": "assistant", "content": "a"}],
        "continue_final_message": True,
        "add_generation_prompt": False,
    },
    *each("logprobs", None, False, "x"),
    *each("top_logprobs", None, 0, -2, 1, "x"),
    {"messages": [{"role": "user", "content": "word " * 2 * CONTEXT_TOKENS}]},
    *each("response_format", {"type": "text"}, {"type": "other"}, "x", None),
]
OF_MESSAGES: list[dict[str, Any]] = [
    *each("max_tokens", 0, -1, "x", None),
    *each("messages", None, [], "x", [{}], [{"role": "user"}], [{"role": "other", "content": "x"}]),
    *each("system", None, "x", 5, []),
    *each("model", "other", None),
    *each("stream", "x", None),
    *each("temperature", -1, 1),
]
OF_COUNT: list[dict[str, Any]] = [{"messages": []}, {"messages": None}, {"model": "other"}, {"model": None}]
OF_TOKENIZE: list[dict[str, Any]] = [
    *each("prompt", "", None, 5, ["x"]),
    *({"prompt": None} | change for change in each("messages", [HELLO], [], None)),
    *each("model", "other", None),
    {"return_token_strs": "x"},
]
OF_DETOKENIZE: list[dict[str, Any]] = [
    *each("tokens", [], None, [-1], ["x"], [1.0], "x"),
    {"model": "other"},
]
CHANGES: dict[str, list[dict[str, Any]]] = {
    COMPLETIONS: SAMPLING + OF_COMPLETIONS,
    CHAT: SAMPLING + OF_CHATS,
    MESSAGES: OF_MESSAGES,
    COUNT: OF_COUNT,
    TOKENIZE: OF_TOKENIZE,
    DETOKENIZE: OF_DETOKENIZE,
}
TYPES = (
    None,
    "",
    "text/plain",
    "application/x-www-form-urlencoded",
    "application/json; charset=utf-8",
    "APPLICATION/JSON",
)
RAW = (b"", b"{", b"[]", b"null", b"5", b'"x"', b"\xff", b"{}", b'{"model": "MODEL"}')


class Checked(NamedTuple):
    """One request of the list."""

    name: str
    path: str
    # None: the request has no such header.
    content_type: str | None
    body: bytes


def checked_requests(model: str) -> Iterator[Checked]:
    """Yield all requests, for an engine that serves `model`."""
    for path, good in GOOD.items():
        whole = {"model": model} | good
        for content_type in TYPES:
            yield Checked(f"{path} content-type {content_type}", path, content_type, json.dumps(whole).encode())
        for raw in RAW:
            yield Checked(f"{path} {raw!r}", path, JSON, raw.replace(b"MODEL", model.encode()))
        for change in CHANGES[path]:
            yield Checked(f"{path} {_short(change)}", path, JSON, json.dumps(whole | change).encode())
        for field in whole:
            rest = {name: value for name, value in whole.items() if name != field}
            yield Checked(f"{path} without {field}", path, JSON, json.dumps(rest).encode())


def _short(change: dict[str, Any]) -> str:
    text = json.dumps(change)
    return text if len(text) < 90 else f"{text[:80]}... ({len(text)})"


def answer_to(url: str, checked: Checked) -> tuple[int, bytes]:
    """Return the status and the body of the answer."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=TIMEOUT_S)
    try:
        headers = {} if checked.content_type is None else {"content-type": checked.content_type}
        connection.request("POST", checked.path, checked.body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def statuses_of(url: str, model: str) -> dict[str, int]:
    """Send all requests to the engine at `url`, and return the statuses of its answers by the requests' names."""
    return {checked.name: answer_to(url, checked)[0] for checked in checked_requests(model)}
