# SPDX-License-Identifier: Apache-2.0
"""Handover of a prompt from prefill to decode: the parameters, and the two requests."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from kvrouter.router.model.upstream.failure import Failure, Kind
from kvrouter.router.model.upstream.origin import target_of
from kvrouter.router.route.tokens.client_body import ClientBody, read_as_python, read_client_body
from kvrouter.router.serve.proxy.attempts import MAX_ATTEMPTS, Attempts
from kvrouter.router.serve.proxy.headers import request_head
from kvrouter.router.serve.proxy.kv_transfer_params import (
    NothingGiven,
    can_be_handed_over,
    decode_body,
    given_params,
    is_received,
    prefill_body,
)

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


def raw(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"messages": []}),
        (CHAT, {"messages": [], "n": 1, "max_tokens": 1, "max_completion_tokens": 5, "tools": [{}], "stream": True}),
        (COMPLETION, {"prompt": "a"}),
        (COMPLETION, {"prompt": ["a"]}),
        (COMPLETION, {"prompt": [1, 2, 3], "n": None, "best_of": 1}),
        (COMPLETION, {"prompt": [[1, 2, 3]], "echo": False, "max_tokens": None, "kv_transfer_params": None}),
    ],
)
def test_one_prompt_with_one_answer_can_be_handed_over(path: str, fields: dict[str, Any]) -> None:
    assert can_be_handed_over(path, read_client_body(path, raw(**fields)))


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/responses", {"input": "a"}),
        ("/v1/embeddings", {"input": "a"}),
        ("/tokenize", {"prompt": "a"}),
        (CHAT, {"messages": [], "n": 2}),
        (CHAT, {"messages": [], "max_completion_tokens": 1}),
        (CHAT, {"messages": [], "max_tokens": 0}),
        (CHAT, {"messages": [], "prompt_logprobs": 0}),
        (CHAT, {"messages": [], "use_beam_search": True}),
        (CHAT, {"messages": [], "kv_transfer_params": {}}),
        (COMPLETION, {"prompt": ["a", "b"]}),
        (COMPLETION, {"prompt": [[1], [2]]}),
        (COMPLETION, {"prompt": []}),
        (COMPLETION, {"prompt": "a", "echo": True}),
        (COMPLETION, {"prompt": "a", "best_of": 2}),
        (COMPLETION, {"prompt": "a", "prompt_embeds": "x"}),
    ],
)
def test_requests_that_need_more_than_blocks_are_not_handed_over(path: str, fields: dict[str, Any]) -> None:
    assert not can_be_handed_over(path, read_client_body(path, raw(**fields)))


@pytest.mark.parametrize(("name", "value"), [("n", b"nil"), ("prompt", b'["a", ]'), ("echo", b'"\\ud800"')])
def test_fields_that_cannot_be_read_are_left_to_the_engine(name: str, value: bytes) -> None:
    assert not can_be_handed_over(COMPLETION, ClientBody(b"", {name: msgspec.Raw(value)}))


@pytest.mark.parametrize("body", [b'{"prompt": "a", "top_p": NaN}', '{"prompt": "a"}'.encode("utf-16")])
def test_a_body_that_only_python_reads_is_not_handed_over(body: bytes) -> None:
    client_body = read_as_python(COMPLETION, body)
    assert client_body is not None and not can_be_handed_over(COMPLETION, client_body)


def test_the_first_request_computes_a_prompt_and_no_more() -> None:
    raw_request = raw(
        messages=[{"role": "user", "content": "x"}],
        max_completion_tokens=9,
        min_tokens=2,
        stream=True,
        stream_options={"include_usage": True},
        logprobs=True,
        top_logprobs=3,
        return_token_ids=True,
        tools=[{"type": "function"}],
        chat_template_kwargs={"a": 1},
    )
    body = json.loads(prefill_body(raw_request))
    params = body.pop("kv_transfer_params")
    assert (params["do_remote_decode"], params["do_remote_prefill"]) == (True, False)
    assert body == {
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 1,
        "max_completion_tokens": 1,
        "stream": False,
        "tools": [{"type": "function"}],
        "chat_template_kwargs": {"a": 1},
    }


def test_the_second_request_is_the_clients_with_the_answer_of_the_first() -> None:
    params = given_params(
        b'{"id": "x", "kv_transfer_params": {"remote_block_ids": [[1, 2]], "big": 18446744073709551616}}'
    )
    raw_request = b'{"model": "m",  "temperature": 0.10, "prompt": [1,  2]}'
    body = decode_body(raw_request, params)
    # Unchanged fields keep their bytes.
    assert b'"temperature":0.10' in body and b"[1,  2]" in body and b"18446744073709551616" in body
    assert json.loads(body)["kv_transfer_params"]["remote_block_ids"] == [[1, 2]]


@pytest.mark.parametrize(
    "answer",
    [b"", b"{}", b"[]", b'{"kv_transfer_params": null}', b'{"kv_transfer_params": {}}', b'{"kv_transfer_params": 1}'],
)
def test_an_answer_without_a_hand_over_gives_nothing(answer: bytes) -> None:
    with pytest.raises(NothingGiven) as nothing:
        given_params(answer)
    assert not nothing.value.aborted


@pytest.mark.parametrize(
    ("finish_reason", "params", "aborted"),
    [
        ("length", None, False),
        ("stop", {}, False),
        ("length", {"do_remote_prefill": False, "remote_block_ids": [[1]]}, False),
        ("abort", None, True),
        ("abort", {"do_remote_prefill": True, "remote_block_ids": [[1]]}, True),
        ("abort", {"do_remote_prefill": False}, True),
    ],
)
def test_an_answer_says_why_nothing_was_handed_over(finish_reason: str, params: Any, aborted: bool) -> None:
    answer = {"choices": [{"index": 0, "finish_reason": finish_reason}], "kv_transfer_params": params}
    with pytest.raises(NothingGiven) as nothing:
        given_params(json.dumps(answer).encode())
    assert nothing.value.aborted is aborted


def test_params_of_other_connectors_need_not_say_that_blocks_are_fetched() -> None:
    answer = {"choices": [{"finish_reason": "length"}], "kv_transfer_params": {"remote_block_ids": [[1]]}}
    assert json.loads(bytes(given_params(json.dumps(answer).encode()))) == answer["kv_transfer_params"]


@pytest.mark.parametrize(
    ("params", "received"),
    [
        (None, False),
        ({}, False),
        ("do_remote_prefill", False),
        ({"do_remote_decode": True, "do_remote_prefill": False}, False),
        ({"do_remote_prefill": True, "remote_block_ids": [[1]]}, True),
    ],
)
def test_a_body_says_whether_its_prompt_was_computed_elsewhere(params: Any, received: bool) -> None:
    raw = json.dumps({"messages": [], "kv_transfer_params": params}).encode()
    assert is_received(read_client_body(CHAT, raw)) is received


def test_prefill_failures_leave_the_decode_worker_its_chance() -> None:
    attempts = Attempts(CHAT, pinned=False)
    refused, lost = Failure(Kind.REFUSED, ""), Failure(Kind.RESET, "")
    assert [attempts.prefill_failed(f"p{n}", refused) for n in range(MAX_ATTEMPTS)] == [True, True, False]
    # None of these requests arrived, so the decode workers have all of their attempts.
    assert attempts.failed("d0", lost) and not attempts.failed("d1", lost)
    attempts = Attempts(CHAT, pinned=False)
    assert not attempts.prefill_failed("p0", lost)
    # The request may have killed the engine: only one more attempt is left, and the decode worker gets it.
    assert not attempts.failed("d0", lost)
    assert attempts.trail == ["p0 reset", "d0 reset"]


def test_only_the_router_says_where_a_prompt_is_computed() -> None:
    client = [(b"x-prefiller-host-port", b"evil:1"), (b"x-prefiller-url", b"evil"), (b"a", b"b")]
    head = request_head(
        target_of("http://h:1"),
        b"/v1/x",
        client,
        length=0,
        request_id=b"i",
        authorization=None,
        rank=None,
        added=[(b"x-prefiller-host-port", target_of("http://[::1]:8000/base").host_port)],
    )
    assert b"evil" not in head and b"x-prefiller-host-port: [::1]:8000\r\n" in head and b"a: b\r\n" in head
    assert target_of("https://h").host_port == b"h:443"
