# SPDX-License-Identifier: Apache-2.0
"""The bodies of a prompt that one engine computes and another one decodes: vLLM's `kv_transfer_params`. Pure.

The first request has the prompt computed, and its answer says where the blocks are; the second request carries that
answer. The first request loses everything that goes beyond computing the prompt: its length, its stream, and options of
the answer. Source: vLLM 0.32.0 distributed/kv_transfer/kv_connector/v1/nixl/pull_scheduler.py:194 (request_finished),
and its tests/v1/kv_connector/nixl_integration/toy_proxy_server.py.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from kvrouter.router.base.common.errors import BadQuestion
from kvrouter.router.route.tokens.client_body import CHAT_PATH, TEXT_PATH, ClientBody, is_given, value_of
from kvrouter.router.route.tokens.prompt_list import PromptList, prompts_of

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

# Fields with which a request is not handed over.
NOT_HANDED_OVER = (PARAMS, "prompt_embeds", "prompt_logprobs")
# Fields whose values decide whether a request is handed over; each value is short.
DECIDING_FIELDS = ("max_completion_tokens", "max_tokens", "n", "best_of", "use_beam_search", "echo")

# Longer parameters of a client are not searched. Their blocks count as fetched from elsewhere, so no prediction is judged.
MAX_SEARCHED_BYTES = 1024**2

# The list of blocks of a prompt of a million tokens takes some hundred kB for each KV cache group.
MAX_ANSWER_BYTES = 16 * 1024**2


class _Choice(msgspec.Struct):
    finish_reason: Any = None


class _Answered(msgspec.Struct):
    """The fields that are read from the answer of the prefill worker."""

    kv_transfer_params: msgspec.Raw = msgspec.field(default_factory=lambda: msgspec.Raw(b"null"))
    choices: list[_Choice] = []


class _Params(msgspec.Struct):
    """The field that says whether blocks are to be fetched; connectors other than vLLM's may not have it."""

    do_remote_prefill: msgspec.Raw = msgspec.field(default_factory=lambda: msgspec.Raw(b"true"))


class NothingGiven(Exception):
    """The error that a prefill worker answered without handing the prompt over.

    `aborted` means that the engine gave the prompt up, so it holds no blocks for it.
    """

    def __init__(self, *, aborted: bool) -> None:
        super().__init__()
        self.aborted = aborted


_NO_PROMPT = re.compile(rb"\s*\[\s*\]\s*")
_answered = msgspec.json.Decoder(_Answered)
_params = msgspec.json.Decoder(_Params)
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


def can_be_handed_over(path: str, body: ClientBody) -> bool:
    """Return whether one engine can compute this request's prompt and another one decode it.

    It can if it has one prompt and one answer of more than one token, and the decoding engine needs only the blocks.
    Requests that do not qualify:

    - A request that echoes the prompt or wants its log probabilities, because the decoding engine would have to compute
      it.
    - A request for several answers to one prompt, because each answer would fetch the blocks, which are given once.
    - A request that the client hands over itself.
    """
    if path not in PATHS or not body.is_json or any(is_given(body.fields, name) for name in NOT_HANDED_OVER):
        return False
    try:
        fields = {name: value_of(body.fields[name]) for name in DECIDING_FIELDS if name in body.fields}
        is_one = _has_one_prompt(body)
    except (BadQuestion, msgspec.MsgspecError, ValueError, RecursionError):
        # The engine reports what is wrong with the body.
        return False
    limit = fields.get("max_completion_tokens")
    limit = fields.get("max_tokens") if limit is None else limit
    if limit in (0, 1) or fields.get("n") not in (None, 1) or fields.get("best_of") not in (None, 1):
        return False
    return is_one and not fields.get("use_beam_search") and not fields.get("echo")


def _has_one_prompt(body: ClientBody) -> bool:
    """Return whether the body has messages or one prompt. Raises BadQuestion if the prompt cannot be read."""
    if body.ids is not None:
        return len(body.ids) > 0
    prompt = body.fields.get("prompt")
    if prompt is None:
        return True
    prompts = prompts_of(prompt)
    return not isinstance(prompts, PromptList) and _NO_PROMPT.fullmatch(prompts) is None


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
    if params is None:
        return False
    if memoryview(params).nbytes > MAX_SEARCHED_BYTES:
        return True
    return b"do_remote_prefill" in bytes(params) and _fetches(bytes(params))


def _fetches(params: bytes) -> bool:
    """Return whether these parameters have blocks fetched."""
    if not params.startswith(b"{"):
        return False
    try:
        return bool(value_of(_params.decode(params).do_remote_prefill))
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return False


def decode_body(raw: bytes, params: msgspec.Raw) -> bytes:
    """Return the client's request with the prefill worker's `kv_transfer_params`; every other value keeps its bytes."""
    body = _fields.decode(raw)
    body[PARAMS] = params
    return msgspec.json.encode(body)
