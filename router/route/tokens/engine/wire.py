# SPDX-License-Identifier: Apache-2.0
"""Requests to engines for tokens, and their answers. Pure.

Which endpoints an engine has, and what they take, its description says (`TokenEndpoints`). A model's name is sent with
messages alone, which must have one: vLLM takes none for its own, whatever it serves it as.
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
from kvrouter.router.model.kvcache.multimodal import Items, MultimodalItem, in_order
from kvrouter.router.route.tokens.anthropic_messages import as_chat
from kvrouter.router.route.tokens.client_body import CHAT_PATH, MESSAGES_PATH, TEXT_PATH
from kvrouter.router.route.tokens.prompt_tokens import TokensUnknown
from kvrouter.router.route.tokens.token_request import TRUNCATION, Kind, TokenRequest

COUNT_PATH = f"{MESSAGES_PATH}/count_tokens"
TOKENIZE_PATH = "/tokenize"
# The engine itself, for what it makes of a probe.
REAL_PATHS: dict[Kind, str] = {"chat": CHAT_PATH, "text": TEXT_PATH}

# What only the real endpoint and its render can read.
ONLY_RENDERED = (TRUNCATION, "suffix")
# vLLM reads these values of a template's argument as not given. Source: renderers/params.py, merge_kwargs.
UNSET = (None, "auto")


class RenderQuirks(msgspec.Struct, frozen=True):
    """What an engine does with chats and does not say; found by trying (`probes.py`).

    keeps_unused_tools: tools are written into the prompt also with tool_choice "none"; False where vLLM was started
    with --exclude-tools-when-tool-choice-none. content_parts: the template is given a message's content as parts, not
    as one text. merges_system: system messages of Anthropic's API that are not the first are put in front.
    """

    keeps_unused_tools: bool = True
    content_parts: bool = False
    merges_system: bool = False


def render_body(asked: TokenRequest, model: str) -> bytes:
    """mm_payload: of images and the like, only where they are and their hashes."""
    added = {"model": model, "max_tokens": 1} if asked.kind == "messages" else {}
    return msgspec.json.encode(asked.fields | added | {"mm_payload": "none"})


def count_body(asked: TokenRequest, model: str) -> bytes:
    """Asks for the length of a message."""
    return msgspec.json.encode(asked.fields | {"model": model})


def tokenize_body(asked: TokenRequest, habits: RenderQuirks, ways: TokenEndpoints) -> bytes:
    """Raises Unknown where /tokenize cannot say what the real endpoint would make of it."""
    if asked.kind == "messages":
        if not ways.reads_messages:
            raise TokensUnknown("unsupported", "what this engine makes of messages of Anthropic's API is not known")
        asked = as_chat(asked, merges_system=habits.merges_system)
    for name in ONLY_RENDERED:
        if asked.has(name):
            raise TokensUnknown(
                "unsupported", f"{name} is read by the engine's render endpoint alone ({ways.how_to_render})"
            )
    if asked.kind == "text":
        body: dict[str, Any] = {name: asked.fields[name] for name in ways.text_fields if name in asked.fields}
        return msgspec.json.encode(body)
    if asked.kind != "chat":
        raise TokensUnknown(
            "unsupported",
            f"{REAL_PATHS.get(asked.kind, asked.kind)} has a render endpoint alone ({ways.how_to_render})",
        )
    given = asked.fields.keys() - ways.ignored_fields if ways.chat_fields is None else ways.chat_fields
    body = {name: asked.fields[name] for name in given if name in asked.fields}
    if drops_tools(asked, habits):
        body.pop("tools", None)
    if not ways.names_arguments:
        return msgspec.json.encode(body)
    if any("reasoning_content" in message for message in asked.messages):
        body["messages"] = [with_reasoning(message) for message in asked.messages]
    arguments = template_arguments(asked)
    if arguments:
        body["chat_template_kwargs"] = arguments
    return msgspec.json.encode(body)


def drops_tools(asked: TokenRequest, habits: RenderQuirks) -> bool:
    """Whether the engine leaves the tools out of the prompt."""
    return not habits.keeps_unused_tools and asked.value("tool_choice") == "none"


def template_arguments(asked: TokenRequest) -> dict[str, Any]:
    """The template's further arguments: the client's, and what the chat endpoint makes of its own fields.

    Source: vLLM 0.32.0 ChatCompletionRequest.build_chat_params."""
    given = asked.value("chat_template_kwargs") or {}
    if not isinstance(given, dict):
        raise BadQuestion("chat_template_kwargs is no object")
    found = dict(given)
    effort = asked.value("reasoning_effort")
    for name, value in (("documents", asked.value("documents")), ("reasoning_effort", effort)):
        if value not in UNSET:
            found[name] = value
    if effort is not None and "enable_thinking" not in given:
        found["enable_thinking"] = effort != "none"
    return found


def with_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message under the name that the chat endpoint gives to what was called reasoning_content."""
    changed = {name: value for name, value in message.items() if name != "reasoning_content"}
    reasoning = message.get("reasoning_content")
    if reasoning is not None and message.get("reasoning") is None:
        changed["reasoning"] = reasoning
    return changed


class _Placeholder(msgspec.Struct):
    offset: int
    length: int


class _Features(msgspec.Struct):
    """By kind (image, audio, video); each list in the order of the others."""

    mm_hashes: dict[str, list[str]] = {}
    mm_placeholders: dict[str, list[_Placeholder]] = {}


class _Rendered(msgspec.Struct):
    token_ids: msgspec.Raw
    features: _Features | None = None


class _Tokenized(msgspec.Struct):
    tokens: msgspec.Raw


class _Count(msgspec.Struct):
    input_tokens: int


class _Message(msgspec.Struct):
    message: str = ""


class _Refusal(msgspec.Struct):
    """vLLM's errors have had both forms."""

    error: _Message | None = None
    message: str = ""


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0


class _Choice(msgspec.Struct):
    prompt_token_ids: list[int] | None = None


class _Real(msgspec.Struct):
    usage: _Usage | None = None
    choices: list[_Choice] = []
    prompt_token_ids: list[int] | None = None


_rendered = msgspec.json.Decoder(_Rendered)
_rendered_texts = msgspec.json.Decoder(list[_Rendered])
_tokenized = msgspec.json.Decoder(_Tokenized)
_count = msgspec.json.Decoder(_Count)
_refusal = msgspec.json.Decoder(_Refusal)
_real = msgspec.json.Decoder(_Real)


def rendered(kind: Kind, answer: bytes) -> tuple[NDArray[np.int64], Items]:
    """The ids and the images and the like among them. Raises Unknown where it is no answer of a render endpoint.

    Source: vLLM 0.32.0 entrypoints/scale_out/token_in_token_out/protocol.py (MultiModalFeatures)."""
    try:
        found = _rendered_texts.decode(answer)[0] if kind == "text" else _rendered.decode(answer)
        ids = _ids(found.token_ids)
        items = () if found.features is None else _items(found.features)
        if items and items[-1].offset_tokens + items[-1].length_tokens > len(ids):
            raise ValueError(f"an item ends after the prompt's {len(ids)} tokens")
        return ids, items
    except (msgspec.MsgspecError, BadQuestion, ValueError, IndexError, RecursionError) as error:
        raise TokensUnknown("unreachable", f"its render endpoint does not answer with a prompt: {error}") from None


def _items(features: _Features) -> Items:
    if features.mm_hashes.keys() != features.mm_placeholders.keys():
        raise ValueError("mm_hashes and mm_placeholders are of different kinds")
    return in_order(
        [
            MultimodalItem(identifier, place.offset, place.length)
            for kind, identifiers in features.mm_hashes.items()
            for identifier, place in zip(identifiers, features.mm_placeholders[kind], strict=True)
        ]
    )


def tokenized_ids(answer: bytes) -> NDArray[np.int64]:
    """Raises Unknown where it is no answer of /tokenize."""
    try:
        return _ids(_tokenized.decode(answer).tokens)
    except (msgspec.MsgspecError, BadQuestion, ValueError, RecursionError) as error:
        raise TokensUnknown("unreachable", f"its /tokenize answers without tokens: {error}") from None


def _ids(raw: msgspec.Raw) -> NDArray[np.int64]:
    ids = token_array(raw, is_msgpack=False)
    if not len(ids):
        raise BadQuestion("there are none")
    return ids


def real_ids(answer: bytes) -> NDArray[np.int64] | int:
    """What the engine made of a prompt that it ran: the ids, or how many where it does not tell them. Raises
    Unknown."""
    try:
        found = _real.decode(answer)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise TokensUnknown("unreachable", f"its answer to a probe is no completion: {error}") from None
    for ids in (found.prompt_token_ids, *(choice.prompt_token_ids for choice in found.choices)):
        if ids:
            return np.array(ids, np.int64)
    if found.usage is not None and found.usage.prompt_tokens > 0:
        return found.usage.prompt_tokens
    raise TokensUnknown("unreachable", "its answer to a probe has neither prompt_token_ids nor usage.prompt_tokens")


def counted_tokens(answer: bytes) -> int:
    """How many tokens a message has. Raises Unknown."""
    try:
        return _count.decode(answer).input_tokens
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise TokensUnknown("unreachable", f"its {COUNT_PATH} answers without a count: {error}") from None


def refusal_of(answer: bytes) -> str:
    """The engine's own message in an answer that refuses."""
    try:
        found = _refusal.decode(answer)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return ""
    return (found.error.message if found.error is not None else found.message)[:MAX_REFUSAL_CHARS]


# It is shown to clients and in logs; a template's message may quote the whole chat.
MAX_REFUSAL_CHARS = 500
