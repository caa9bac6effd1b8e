# SPDX-License-Identifier: Apache-2.0
"""The bodies of a prompt that one engine computes and another one decodes: vLLM's `kv_transfer_params`. Pure.

The first request has the prompt computed, and its answer says where the blocks are; the second request carries that
answer. The first request loses everything that goes beyond computing the prompt: its length, its stream, and options of
the answer. Source: vLLM 0.32.0 distributed/kv_transfer/kv_connector/v1/nixl/pull_scheduler.py:194 (request_finished),
and its tests/v1/kv_connector/nixl_integration/toy_proxy_server.py.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvrouter.router.route.tokens.client_body import CHAT_PATH, TEXT_PATH

# The paths where vLLM reads `kv_transfer_params`.
PATHS = frozenset({CHAT_PATH, TEXT_PATH})

PARAMS = "kv_transfer_params"

# Has the prompt computed and its blocks kept until they are fetched.
ASKED = msgspec.Raw(
    b'{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,'
    b'"remote_host":null,"remote_port":null}'
)
ONE = msgspec.Raw(b"1")
FALSE = msgspec.Raw(b"false")

# Fields that the first request must not have: they are options of an answer, or conflict with an answer of one token.
DROPPED = (
    "stream_options",
    "min_tokens",
    "min_completion_tokens",
    "logprobs",
    "top_logprobs",
    "return_token_ids",
    "return_tokens_as_token_ids",
)

# The list of blocks of a prompt of a million tokens takes some hundred kB for each KV cache group.
MAX_ANSWER_BYTES = 16 * 1024**2


class _Asked(msgspec.Struct):
    """The fields that decide whether a request can be handed over. All values may be of any type."""

    prompt: msgspec.Raw = msgspec.field(default_factory=lambda: msgspec.Raw(b'""'))
    n: Any = None
    best_of: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    use_beam_search: Any = None
    echo: Any = None
    prompt_logprobs: Any = None
    prompt_embeds: Any = None
    kv_transfer_params: Any = None


class _Answered(msgspec.Struct):
    """The field that is read from the answer of the prefill worker."""

    kv_transfer_params: msgspec.Raw = msgspec.field(default_factory=lambda: msgspec.Raw(b"null"))


_asked = msgspec.json.Decoder(_Asked)
_answered = msgspec.json.Decoder(_Answered)
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


def can_be_handed_over(path: str, raw: bytes) -> bool:
    """Return whether one engine can compute this request's prompt and another one decode it.

    It can if it has one prompt and one answer of more than one token, and the decoding engine needs only the blocks.
    Requests that do not qualify:

    - A request that echoes the prompt or wants its log probabilities, because the decoding engine would have to compute
      it.
    - A request for several answers to one prompt, because each answer would fetch the blocks, which are given once.
    - A request that the client hands over itself.
    """
    if path not in PATHS:
        return False
    try:
        fields = _asked.decode(raw)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        # The engine reports what is wrong with the body.
        return False
    limit = fields.max_completion_tokens if fields.max_completion_tokens is not None else fields.max_tokens
    if limit in (0, 1) or fields.n not in (None, 1) or fields.best_of not in (None, 1):
        return False
    if fields.kv_transfer_params is not None or fields.prompt_embeds is not None or fields.prompt_logprobs is not None:
        return False
    return not fields.use_beam_search and not fields.echo and _is_one(bytes(fields.prompt).lstrip())


def _is_one(prompt: bytes) -> bool:
    """Return whether the JSON value is one prompt: a text, a list of token ids, or a list with one element."""
    if not prompt.startswith(b"["):
        return True
    inner = prompt[1:].lstrip()
    if inner[:1].isdigit():
        # A list that begins with a number has token ids.
        return True
    try:
        return len(msgspec.json.decode(prompt)) == 1
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return False


def prefill_body(raw: bytes) -> bytes:
    """Return the request to the prefill worker. `raw` is a request for which `can_be_handed_over` is true."""
    body = _fields.decode(raw)
    for name in DROPPED:
        body.pop(name, None)
    body["max_tokens"] = ONE
    if "max_completion_tokens" in body:
        body["max_completion_tokens"] = ONE
    body["stream"] = FALSE
    body[PARAMS] = ASKED
    return msgspec.json.encode(body)


def given_params(answer: bytes) -> msgspec.Raw | None:
    """Return the `kv_transfer_params` for the decode worker, or None if the prefill worker's answer has none."""
    try:
        params = bytes(_answered.decode(answer).kv_transfer_params)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    return msgspec.Raw(params) if params.startswith(b"{") and params != b"{}" else None


def decode_body(raw: bytes, params: msgspec.Raw) -> bytes:
    """Return the client's request with the prefill worker's `kv_transfer_params`; every other value keeps its bytes."""
    body = _fields.decode(raw)
    body[PARAMS] = params
    return msgspec.json.encode(body)
