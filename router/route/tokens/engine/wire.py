# SPDX-License-Identifier: Apache-2.0
"""Requests to engines for tokens, and their answers. Pure.

An engine's description lists its endpoints and the fields that they accept (`TokenEndpoints`). A model's name is sent
only with messages, which must have one; without a name vLLM uses its own model, under whatever name it serves that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvrouter.router.base.common.errors import BadQuestion
from kvrouter.router.base.common.json_arrays import token_array
from kvrouter.router.model.engines.engine import TokenEndpoints
from kvrouter.router.model.engines.reading import VLLM_READING, Reading
from kvrouter.router.model.kvcache.multimodal import Items
from kvrouter.router.route.tokens import responses_conversation
from kvrouter.router.route.tokens.anthropic_messages import as_chat
from kvrouter.router.route.tokens.client_body import CHAT_PATH, MESSAGES_PATH, RESPONSES_PATH, TEXT_PATH
from kvrouter.router.route.tokens.media_features import MediaFeatures, items_of
from kvrouter.router.route.tokens.prompt_tokens import TokensUnknown
from kvrouter.router.route.tokens.thinking import DROPPED, NO_SWITCH, ThinkingHistory, ThinkingSwitch
from kvrouter.router.route.tokens.token_request import THINKING_OFF, TRUNCATION, Kind, TokenRequest

COUNT_PATH = f"{MESSAGES_PATH}/count_tokens"
TOKENIZE_PATH = "/tokenize"
# The real endpoints, which show the engine's own tokens of a probe.
REAL_PATHS: dict[Kind, str] = {"chat": CHAT_PATH, "text": TEXT_PATH, "responses": RESPONSES_PATH}

# Fields that only the real endpoint and its render can read.
ONLY_RENDERED = (TRUNCATION, "suffix")
# Values of a template's argument that vLLM treats as not given. Source: renderers/params.py, merge_kwargs.
UNSET = (None, "auto")


class RenderQuirks(msgspec.Struct, frozen=True):
    """Details of how an engine reads chats that it does not report; they are found by trials (`probes.py`)."""

    # Whether tools are written into the prompt even with tool_choice "none"; False if vLLM was started with
    # --exclude-tools-when-tool-choice-none.
    keeps_unused_tools: bool = True
    # Whether the template gets a message's content as parts, not as one text.
    content_parts: bool = False
    # Whether system messages of Anthropic's API that are not the first are moved to the front.
    merges_system: bool = False
    # Whether the name of a called function stands before its arguments, as vLLM writes it for Responses; in its chats the
    # arguments come first. A template may write the whole call.
    name_first: bool = False
    # The forms that the engine gives to thinking in messages of Anthropic's API, if it takes thinking.
    history: ThinkingHistory = DROPPED
    switch: ThinkingSwitch = NO_SWITCH
    # How engines of its kind read chats and messages.
    reading: Reading = VLLM_READING


def chat_of(request: TokenRequest, quirks: RenderQuirks) -> TokenRequest:
    """Return the chat that an engine with these quirks makes of a message or of a body of `/v1/responses`.

    Raises:
        TokensUnknown: Only the engine can read the request.
    """
    if request.kind == "responses":
        if not quirks.reading.converts_responses:
            raise TokensUnknown("unsupported", f"what this engine makes of {RESPONSES_PATH} is not known")
        return responses_conversation.as_chat(request)
    return as_chat(
        request,
        merges_system=quirks.merges_system,
        reading=quirks.reading,
        history=quirks.history,
        switch=quirks.switch,
    )


def render_body(request: TokenRequest, model: str) -> bytes:
    """Return the body for a render endpoint.

    Its mm_payload makes the engine return only the places and the hashes of images and other media.

    Raises:
        TokensUnknown: The render endpoint reads the request differently from the real endpoint.
    """
    if request.kind != "messages":
        return msgspec.json.encode(request.fields | {"mm_payload": "none"})
    if request.thinking == THINKING_OFF:
        # From 0.31 on vLLM tries out once which effort its template uses for disabled thinking, and its render endpoint
        # does not apply that.
        raise TokensUnknown(
            "not_looked_up", "thinking that is disabled: only the engine knows what its template makes of it"
        )
    # Other thinking has no influence, but may be refused together with this limit.
    fields = {name: value for name, value in request.fields.items() if name != "thinking"}
    return msgspec.json.encode(fields | {"model": model, "max_tokens": 1, "mm_payload": "none"})


def count_body(request: TokenRequest, model: str) -> bytes:
    """Return the body that queries the length of a message."""
    return msgspec.json.encode(request.fields | {"model": model})


def tokenize_body(request: TokenRequest, quirks: RenderQuirks, ways: TokenEndpoints) -> bytes:
    """Return the body for the /tokenize of an engine with these quirks and endpoints.

    Raises:
        TokensUnknown: /tokenize cannot show how the real endpoint would read the request.
    """
    if request.kind in ("messages", "responses"):
        request = chat_of(request, msgspec.structs.replace(quirks, reading=ways.reading))
    for name in ONLY_RENDERED:
        if request.has(name):
            raise TokensUnknown(
                "unsupported", f"{name} is read by the engine's render endpoint alone ({ways.how_to_render})"
            )
    if request.kind == "text":
        body: dict[str, Any] = {name: request.fields[name] for name in ways.text_fields if name in request.fields}
        return msgspec.json.encode(body)
    names = request.fields.keys() - ways.ignored_fields if ways.chat_fields is None else ways.chat_fields
    body = {name: request.fields[name] for name in names if name in request.fields}
    if drops_tools(request, quirks):
        body.pop("tools", None)
    if not ways.names_arguments:
        return msgspec.json.encode(body)
    if any("reasoning_content" in message for message in request.messages):
        body["messages"] = [with_reasoning(message) for message in request.messages]
    arguments = template_arguments(request)
    if arguments:
        body["chat_template_kwargs"] = arguments
    return msgspec.json.encode(body)


def drops_tools(request: TokenRequest, quirks: RenderQuirks) -> bool:
    """Return whether the engine leaves the tools out of the prompt."""
    return not quirks.keeps_unused_tools and request.value("tool_choice") == "none"


def template_arguments(request: TokenRequest) -> dict[str, Any]:
    """Return the template's further arguments: the client's own, and those made of fields of the chat.

    Source: vLLM 0.32.0 ChatCompletionRequest.build_chat_params.

    Raises:
        BadQuestion: chat_template_kwargs is not an object.
    """
    client_arguments = request.value("chat_template_kwargs") or {}
    if not isinstance(client_arguments, dict):
        raise BadQuestion("chat_template_kwargs is no object")
    arguments = dict(client_arguments)
    effort = request.value("reasoning_effort")
    for name, value in (("documents", request.value("documents")), ("reasoning_effort", effort)):
        if value not in UNSET:
            arguments[name] = value
    if effort is not None and "enable_thinking" not in client_arguments:
        arguments["enable_thinking"] = effort != "none"
    return arguments


def with_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the message with its reasoning_content under `reasoning`, the chat endpoint's name for it."""
    changed = {name: value for name, value in message.items() if name != "reasoning_content"}
    reasoning = message.get("reasoning_content")
    if reasoning is not None and message.get("reasoning") is None:
        changed["reasoning"] = reasoning
    return changed


class _Rendered(msgspec.Struct):
    token_ids: msgspec.Raw
    features: MediaFeatures | None = None


class _Tokenized(msgspec.Struct):
    tokens: msgspec.Raw


class _Count(msgspec.Struct):
    input_tokens: int


class _Message(msgspec.Struct):
    message: str = ""


class _Refusal(msgspec.Struct):
    """An error of vLLM, which has had both of these forms."""

    error: _Message | None = None
    message: str = ""


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    # The same count in the usage of a Response.
    input_tokens: int = 0


class _InputMessage(msgspec.Struct):
    """The prompt of a Response that was queried with enable_response_messages."""

    tokens: list[int] = []


class _Choice(msgspec.Struct):
    prompt_token_ids: list[int] | None = None


class _Real(msgspec.Struct):
    usage: _Usage | None = None
    choices: list[_Choice] = []
    prompt_token_ids: list[int] | None = None
    input_messages: list[_InputMessage] | None = None


_rendered = msgspec.json.Decoder(_Rendered)
_rendered_texts = msgspec.json.Decoder(list[_Rendered])
_tokenized = msgspec.json.Decoder(_Tokenized)
_count = msgspec.json.Decoder(_Count)
_refusal = msgspec.json.Decoder(_Refusal)
_real = msgspec.json.Decoder(_Real)


def rendered(kind: Kind, answer: bytes) -> tuple[NDArray[np.int64], Items]:
    """Return the ids of a render endpoint's answer, and the images and other media among them.

    Raises:
        TokensUnknown: It is no answer of a render endpoint.
    """
    try:
        prompt = _rendered_texts.decode(answer)[0] if kind == "text" else _rendered.decode(answer)
        ids = _ids(prompt.token_ids)
        return ids, items_of(prompt.features, len(ids))
    except (msgspec.MsgspecError, BadQuestion, ValueError, IndexError, RecursionError) as error:
        raise TokensUnknown("unreachable", f"its render endpoint does not answer with a prompt: {error}") from None


def tokenized_ids(answer: bytes) -> NDArray[np.int64]:
    """Return the ids of an answer of /tokenize.

    Raises:
        TokensUnknown: It is no answer of /tokenize.
    """
    try:
        return _ids(_tokenized.decode(answer).tokens)
    except (msgspec.MsgspecError, BadQuestion, ValueError, RecursionError) as error:
        raise TokensUnknown("unreachable", f"its /tokenize answers without tokens: {error}") from None


def _ids(raw: msgspec.Raw) -> NDArray[np.int64]:
    """Return the ids; raise BadQuestion if there are none."""
    ids = token_array(raw, is_msgpack=False)
    if not len(ids):
        raise BadQuestion("there are none")
    return ids


def real_ids(answer: bytes) -> NDArray[np.int64] | int:
    """Return the ids of a prompt that an engine ran, or their number if it does not report them.

    Raises:
        TokensUnknown: The answer has neither.
    """
    try:
        completion = _real.decode(answer)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise TokensUnknown("unreachable", f"its answer to a probe is no completion: {error}") from None
    inputs = (message.tokens for message in completion.input_messages or ())
    choices = (choice.prompt_token_ids for choice in completion.choices)
    for ids in (completion.prompt_token_ids, *choices, *inputs):
        if ids:
            return np.array(ids, np.int64)
    usage = completion.usage or _Usage()
    if num_tokens := usage.prompt_tokens or usage.input_tokens:
        return num_tokens
    raise TokensUnknown("unreachable", "its answer to a probe has neither the prompt's ids nor their number")


def counted_tokens(answer: bytes) -> int:
    """Return the number of tokens of a message.

    Raises:
        TokensUnknown: The answer has no count.
    """
    try:
        return _count.decode(answer).input_tokens
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise TokensUnknown("unreachable", f"its {COUNT_PATH} answers without a count: {error}") from None


def refusal_of(answer: bytes) -> str:
    """Return the engine's message in an answer that refuses a request, or "" if it has none."""
    try:
        refusal = _refusal.decode(answer)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return ""
    return (refusal.error.message if refusal.error is not None else refusal.message)[:MAX_REFUSAL_CHARS]


# A refusal is shown to clients and in logs, and a template's message may quote the whole chat.
MAX_REFUSAL_CHARS = 500
