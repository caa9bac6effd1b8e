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

from kvrouter.router.route.tokens.client_body import CHAT_PATH, TEXT_PATH, ClientBody

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


class _Choice(msgspec.Struct):
    finish_reason: Any = None


class _Answered(msgspec.Struct):
    """The fields that are read from the answer of the prefill worker."""

    kv_transfer_params: msgspec.Raw = msgspec.field(default_factory=lambda: msgspec.Raw(b"null"))
    choices: list[_Choice] = []


class _Params(msgspec.Struct):
    """The field that says whether blocks are to be fetched; connectors other than vLLM's may not have it."""

    do_remote_prefill: Any = True


class NothingGiven(Exception):
    """The error that a prefill worker answered without handing the prompt over.

    `aborted` means that the engine gave the prompt up, so it holds no blocks for it.
    """

    def __init__(self, *, aborted: bool) -> None:
        super().__init__()
        self.aborted = aborted


_asked = msgspec.json.Decoder(_Asked)
_answered = msgspec.json.Decoder(_Answered)
_params = msgspec.json.Decoder(_Params)
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


def given_params(answer: bytes) -> msgspec.Raw:
    """Return the `kv_transfer_params` for the decode worker in the answer of the prefill worker.

    vLLM's NixlConnector gives them if the prompt was computed, so `finish_reason` is "length" or "stop". The answer of
    an aborted prompt has status 200 too; its blocks are free, whatever the answer says about them.

    Raises:
        NothingGiven: The answer hands nothing over.
    """
    try:
        answered = _answered.decode(answer)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise NothingGiven(aborted=False) from None
    if any(choice.finish_reason == "abort" for choice in answered.choices):
        raise NothingGiven(aborted=True)
    params = bytes(answered.kv_transfer_params)
    if params == b"{}" or not _fetches(params):
        raise NothingGiven(aborted=False)
    return msgspec.Raw(params)


def is_received(body: ClientBody) -> bool:
    """Return whether the client has had the prompt computed elsewhere, and its blocks are to be fetched from there.

    The tokens that the engine then reports as cached are those that it fetched, or those of the other engine's cache.
    """
    params = body.fields.get(PARAMS)
    return params is not None and b"do_remote_prefill" in bytes(params) and _fetches(bytes(params))


def _fetches(params: bytes) -> bool:
    """Return whether these parameters have blocks fetched."""
    if not params.startswith(b"{"):
        return False
    try:
        return bool(_params.decode(params).do_remote_prefill)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return False


def decode_body(raw: bytes, params: msgspec.Raw) -> bytes:
    """Return the client's request with the prefill worker's `kv_transfer_params`; every other value keeps its bytes."""
    body = _fields.decode(raw)
    body[PARAMS] = params
    return msgspec.json.encode(body)
