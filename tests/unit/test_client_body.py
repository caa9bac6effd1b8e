# SPDX-License-Identifier: Apache-2.0
r"""Bodies whose ids are read in passing: they mean the same as to the general decoder, or fail with the same words.

An escape in the name of the field bypasses the fast reader: `promp\u0074` is `prompt`.
"""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import numpy as np
import pytest

from kvrouter.router.base.common.compiled import caution
from kvrouter.router.base.common.errors import BadQuestion
from kvrouter.router.route.tokens import client_body
from kvrouter.router.route.tokens.client_body import (
    CHAT_PATH,
    EMBEDDINGS_PATH,
    GENERATE_PATH,
    MAX_VALUE_BYTES,
    MESSAGES_PATH,
    RESPONSES_PATH,
    SGLANG_GENERATE_PATH,
    TEXT_PATH,
    TOO_LONG,
    is_given,
    read_client_body,
)
from kvrouter.router.route.tokens.prompt_tokens import Prompt, TokensUnknown
from kvrouter.router.route.tokens.token_request import ListRequest, TokenRequest, read
from kvrouter.router.route.tokens.without_cache import engines_without_cache
from kvrouter.router.serve.proxy.kv_transfer_params import can_be_handed_over, is_received
from kvrouter.router.serve.proxy.openai_body import openai_body

ESCAPED = {
    TEXT_PATH: (b'"prompt"', b'"promp\\u0074"'),
    EMBEDDINGS_PATH: (b'"input"', b'"in\\u0070ut"'),
}


def outcome(path: str, raw: bytes) -> Any:
    """Return the proxy's reading of a body, or the type and text of its error."""
    try:
        body = read_client_body(path, raw)
        limits = openai_body(body)
        prompt = read(path, body)
    except (BadQuestion, TokensUnknown) as error:
        return type(error), str(error)
    if isinstance(prompt, TokenRequest):
        return limits, prompt.kind, {name: bytes(value) for name, value in prompt.fields.items()}
    if isinstance(prompt, ListRequest):
        return limits, len(prompt.prompts), prompt.whole[1:], [bytes(item) for item in prompt.whole.prompts]
    ids = prompt.token_ids if isinstance(prompt, Prompt) else prompt
    assert ids is not None
    return limits, ids.dtype, ids.tolist()


@pytest.mark.parametrize("path", ESCAPED)
@pytest.mark.parametrize(
    "body",
    [
        b'{"model": "m", "%s": [1, 2, 3], "max_tokens": 5}',
        b'{"%s": [], "model": "m"}',
        b'{"%s": [1, -2]}',
        b'{"%s": [1, 2147483648]}',
        b'{"%s": [4294967296]}',
        b'{"%s": [[1, 2], [3]]}',
        b'{"%s": "text"}',
        b'{"%s": null, "model": 7}',
        b'{"%s": [1, 2], "truncate_prompt_tokens": 1, "max_tokens": 4}',
        b'{"%s": [1, 2], "prompt_embeds": "AAAA"}',
        b'{"%s": [1, 2], "cache_salt": "s", "max_completion_tokens": 9}',
        b'{"%s": [1, 2], "%s": [3]}',
        b'{"%s": [1, 2], "model": {"a": ]}',
        b'{"%s": [1, 2], "model": nil}',
        b'{"%s": [1, 2], "max_tokens": 01}',
        b'[{"%s": [1, 2]}]',
    ],
)
def test_reading_ids_leaves_the_body_unchanged(path: str, body: bytes) -> None:
    plain, escaped = ESCAPED[path]
    raw = body.replace(b'"%s"', plain)
    actual, expected = outcome(path, raw), outcome(path, raw.replace(plain, escaped))
    if isinstance(actual[0], type) and "byte" in actual[1]:
        # The words are the same, but the escape moves the position.
        actual, expected = actual[1].partition("(byte")[0], expected[1].partition("(byte")[0]
    assert actual == expected


@pytest.mark.parametrize("name", ["model", "n", "max_tokens", "sampling_params"])
@pytest.mark.parametrize("value", [[1] * MAX_VALUE_BYTES, {"a": "b" * MAX_VALUE_BYTES}])
def test_a_long_array_in_a_field_of_one_value_is_not_decoded(name: str, value: Any) -> None:
    raw = json.dumps({"prompt": [1], name: value}).encode()
    body = openai_body(read_client_body(TEXT_PATH, raw))
    assert getattr(body, name) == TOO_LONG
    assert (body.limit_tokens, body.answers, body.salt) == (None, 1, None)


@pytest.mark.skipif(caution() is not None, reason="without the compiled reader all ways are the general one")
def test_ids_of_a_completion_are_read_from_the_body() -> None:
    body = read_client_body(TEXT_PATH, b'{"prompt": [5, 6], "model": "m"}')
    assert body.ids is not None
    np.testing.assert_array_equal(body.ids, [5, 6])
    assert bytes(body.fields["prompt"]) == b"null"


PARAMS = "kv_transfer_params"
NAMES = [
    "logprobs",
    "echo",
    "sampling_params",
    "store",
    "model",
    "n",
    "cache_salt",
    "max_tokens",
    "max_completion_tokens",
]
NAMES += [PARAMS, "request_id", "previous_response_id", "return_logprob", "logprob_start_len", "features", "messages"]
NAMES += ["thinking", "use_beam_search", "prompt", "input_ids", "token_ids", "text", "input", "any"]


def of_router(path: str, raw: bytes) -> list[object]:
    """Return all that the router reads of a body, and the errors where it reads nothing."""
    body = read_client_body(path, raw)
    read_values: list[object] = [body]
    for work in (
        lambda: openai_body(body),
        lambda: engines_without_cache(body),
        lambda: is_received(body),
        lambda: can_be_handed_over(path, body),
        lambda: read(path, body),
        lambda: [is_given(body.fields, name) for name in body.fields],
    ):
        try:
            read_values.append(work())
        except (BadQuestion, TokensUnknown) as error:
            read_values.append(error)
    return read_values


FORMS = (b"%b", b'{"do_remote_prefill": %b}', b'{"prompt_token_ids": %b}', b'[{"a": %b}]')
LISTS = 20_000
# The size of an empty list. The bytes of a field are copied a few times, which takes less.
LIST_BYTES = 56


@pytest.mark.parametrize(
    "path", [CHAT_PATH, TEXT_PATH, MESSAGES_PATH, GENERATE_PATH, SGLANG_GENERATE_PATH, RESPONSES_PATH]
)
def test_no_long_array_becomes_objects(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.setattr(client_body, "MAX_VALUE_BYTES", 1_000)
    monkeypatch.setattr(client_body, "MAX_ELEMENTS", 1_000)
    long = b"[" + b"[]," * (LISTS - 1) + b"[]]"
    tracemalloc.start()
    try:
        for name in NAMES:
            for form in FORMS:
                fields = {
                    "messages": b'[{"role": "user"}]',
                    "echo": b"true",
                    "return_logprob": b"true",
                    name: form % long,
                }
                raw = b"{" + b",".join(b'"%b":%b' % (key.encode(), value) for key, value in fields.items()) + b"}"
                tracemalloc.reset_peak()
                before_bytes = tracemalloc.get_traced_memory()[0]
                assert of_router(path, raw)
                added_bytes = tracemalloc.get_traced_memory()[1] - before_bytes
                assert added_bytes < LISTS * LIST_BYTES, (name, form)
    finally:
        tracemalloc.stop()
