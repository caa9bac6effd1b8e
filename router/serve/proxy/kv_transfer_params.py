# SPDX-License-Identifier: Apache-2.0
"""The bodies of a prompt that one engine computes and another one decodes: vLLM's `kv_transfer_params`. Pure.

The first request has the prompt computed and is answered with where its blocks are; the second one carries that answer.
The first request loses whatever goes beyond computing the prompt: its length, its stream, and options of the answer.
Source: vLLM 0.32.0 distributed/kv_transfer/kv_connector/v1/nixl/pull_scheduler.py:194 (request_finished), and its
tests/v1/kv_connector/nixl_integration/toy_proxy_server.py.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvrouter.router.route.tokens.client_body import CHAT_PATH, TEXT_PATH

# vLLM reads kv_transfer_params there.
PATHS = frozenset({CHAT_PATH, TEXT_PATH})

PARAMS = "kv_transfer_params"

# Asks for the prompt to be computed and kept until it is fetched.
ASKED = msgspec.Raw(
    b'{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,'
    b'"remote_host":null,"remote_port":null}'
)
ONE = msgspec.Raw(b"1")
FALSE = msgspec.Raw(b"false")

# Of the answer, or against its being one token long: the first request has none.
DROPPED = (
    "stream_options",
    "min_tokens",
    "min_completion_tokens",
    "logprobs",
    "top_logprobs",
    "return_token_ids",
    "return_tokens_as_token_ids",
)

# Where the blocks of a prompt of a million tokens are is some hundred kB for each KV cache group.
MAX_ANSWER_BYTES = 16 * 1024**2


class _Asked(msgspec.Struct):
    """What decides whether a request can be handed over. All values may be of any type."""

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
    kv_transfer_params: msgspec.Raw = msgspec.field(default_factory=lambda: msgspec.Raw(b"null"))


_asked = msgspec.json.Decoder(_Asked)
_answered = msgspec.json.Decoder(_Answered)
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


def can_be_handed_over(path: str, raw: bytes) -> bool:
    """Whether this is one prompt with one answer of more than a token, of which the engine that decodes it needs the
    blocks alone.

    Not what echoes the prompt or wants its log probabilities (the engine that decodes would have to compute it), not
    several answers to one prompt (each would fetch the blocks, which are given once), and not what a client hands over
    itself."""
    if path not in PATHS:
        return False
    try:
        asked = _asked.decode(raw)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        # The engine reports what is wrong with it.
        return False
    limit = asked.max_completion_tokens if asked.max_completion_tokens is not None else asked.max_tokens
    if limit in (0, 1) or asked.n not in (None, 1) or asked.best_of not in (None, 1):
        return False
    if asked.kv_transfer_params is not None or asked.prompt_embeds is not None or asked.prompt_logprobs is not None:
        return False
    return not asked.use_beam_search and not asked.echo and _is_one(bytes(asked.prompt).lstrip())


def _is_one(prompt: bytes) -> bool:
    if not prompt.startswith(b"["):
        return True
    inner = prompt[1:].lstrip()
    if inner[:1].isdigit():
        # Token ids.
        return True
    try:
        return len(msgspec.json.decode(prompt)) == 1
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return False


def prefill_body(raw: bytes) -> bytes:
    """The request to the engine that computes the prompt. raw: of one that can be handed over."""
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
    """What the engine that decodes is to be sent, None where the answer has nothing of the kind."""
    try:
        found = bytes(_answered.decode(answer).kv_transfer_params)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    return msgspec.Raw(found) if found.startswith(b"{") and found != b"{}" else None


def decode_body(raw: bytes, params: msgspec.Raw) -> bytes:
    """The client's request with the answer of the first one; all else keeps its bytes."""
    body = _fields.decode(raw)
    body[PARAMS] = params
    return msgspec.json.encode(body)
