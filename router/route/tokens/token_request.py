# SPDX-License-Identifier: Apache-2.0
"""The part of a client's body that decides its tokens. Pure.

Every field that may influence the tokens is kept: an engine that is queried gets it, and two bodies that differ in it
are two prompts. Fields that are known to have no influence (sampling, streaming, names) are left out.
"""

from __future__ import annotations

import hashlib
from functools import cached_property
from typing import Any, Final, Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvrouter.router.base.common.errors import BadQuestion
from kvrouter.router.base.common.json_arrays import token_array
from kvrouter.router.route.tokens import message_blocks
from kvrouter.router.route.tokens.client_body import (
    CHAT_PATH,
    EMBEDDINGS_PATH,
    GENERATE_PATH,
    MESSAGES_PATH,
    NULL,
    RESPONSES_PATH,
    SGLANG_GENERATE_PATH,
    TEXT_PATH,
    ClientBody,
    check_elements,
    is_given,
)
from kvrouter.router.route.tokens.generate_bodies import (
    check_other_blocks,
    check_sglang_media,
    sglang_prompt,
    vllm_prompt,
)
from kvrouter.router.route.tokens.prompt_list import PromptList, is_list, prompts_of
from kvrouter.router.route.tokens.prompt_tokens import Prompt, TokensUnknown

Kind = Literal["chat", "text", "responses", "messages"]
# The features by which a way to find tokens is judged; each has a probe (`probes.py`).
ResponseFeature = Literal[
    "responses",
    "response tools",
    "unused response tools",
    "response tool kinds",
    "response calls",
    "response call kinds",
]
Feature = Literal[
    "chat",
    "tools",
    "continued",
    "text",
    "messages",
    "message tools",
    "inline system",
    "message thinking",
    "thinking on",
    "thinking off",
    "message effort",
    ResponseFeature,
]
# Whether a message switches thinking on or off.
THINKING_ON: Final = "thinking on"
THINKING_OFF: Final = "thinking off"

# Fields of requests to vLLM, OpenAI or this router that no engine turns into tokens of the prompt. Source: vLLM 0.32.0
# entrypoints/openai/{chat_completion,completion}/protocol.py, renderers/online_renderer.py.
WITHOUT_TOKENS = frozenset(
    (
        # the model, the form of the answer, and the client
        *("model", "stream", "stream_options", "stream_interval", "return_token_ids", "return_tokens_as_token_ids"),
        *("return_token_offsets", "return_prompt_text", "routed_experts_prompt_start", "request_id", "session_id"),
        *("priority", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
        *("prompt_cache_retention", "vllm_xargs", "kv_transfer_params", "ec_transfer_params"),
        *("mm_payload", "return_mm_kwargs"),
        # the sampling of the answer
        *("n", "best_of", "use_beam_search", "length_penalty", "early_stopping", "seed", "temperature", "top_p"),
        *("top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "repetition_detection"),
        *("logit_bias", "allowed_token_ids", "bad_words", "watermarking", "structured_outputs"),
        *("thinking_token_budget", "include_reasoning", "parallel_tool_calls", "verbosity"),
        *("modalities", "prediction"),
        # the end of the answer, and data reported with it
        *("stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "min_tokens", "max_tokens"),
        *("max_completion_tokens", "echo", "logprobs", "top_logprobs", "prompt_logprobs", "logprob_token_ids"),
        *("skip_special_tokens", "spaces_between_special_tokens"),
        # fields that are hashed beside the tokens, or read by this router alone
        *("cache_salt", "model_name", "modelname", "lora_name", "workers", "exclude_workers", "dp_rank", "explain"),
        *("token_ids", "block_hashes", "num_tokens"),
    )
)
# All fields that decide the tokens of a message of Anthropic's API. Source: vLLM 0.32.0 and SGLang 0.5.23
# entrypoints/anthropic/serving.py.
MESSAGE_FIELDS = ("messages", "system", "tools", "tool_choice", "thinking", "output_config", "chat_template_kwargs")

# The items of a Response's input that belong to calls of functions, and those of custom tools. Source: vLLM 0.33.0
# entrypoints/openai/responses/utils.py.
CALL_ITEMS = ("function_call", "function_call_output")
CUSTOM_ITEMS = ("custom_tool_call", "custom_tool_call_output")
# The types of an item's parts that are more than text.
RESPONSE_MEDIA = ("input_image", "input_file", "input_audio")

# These fields matter if a prompt is cut so that its answer fits.
OUTPUT_LIMITS = ("max_tokens", "max_completion_tokens")
TRUNCATION = "truncate_prompt_tokens"
# Fields that only the engine can read; for example, a flag of the engine decides whether a client's template is
# refused.
LEFT_TO_THE_ENGINE = (TRUNCATION, "suffix", "chat_template", "mm_processor_kwargs", "media_io_kwargs")

# Types of a message's parts that are text. Source: vLLM 0.32.0 renderers/chat_utils.py, TEXT_PART_TYPES.
TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal", "thinking", "tool_reference"})
MEDIA_KEYS = frozenset(
    (
        *("image_url", "image_pil", "image_embeds", "input_image", "audio_url", "audio_embeds", "input_audio"),
        *("video_url", "video_embeds", "prompt_embeds"),
    )
)


class TokenRequest:
    """A request's prompt before it is tokenized."""

    def __init__(self, kind: Kind, fields: dict[str, msgspec.Raw]) -> None:
        self.kind: Kind = kind
        # The fields that decide the tokens, each as the JSON that the client wrote.
        self.fields = fields

    @property
    def size_bytes(self) -> int:
        """The size of all fields."""
        return sum(len(bytes(value)) for value in self.fields.values())

    @cached_property
    def key(self) -> bytes:
        """A digest that is equal for two requests with the same prompt.

        It is no fast hash, because a client that finds two bodies with the same key would get the tokens of another
        client's prompt.
        """
        digest = hashlib.sha256(self.kind.encode())
        for name, value in sorted(self.fields.items()):
            raw = bytes(value)
            digest.update(b"%d:%s=%d:" % (len(name), name.encode("utf-8", "surrogatepass"), len(raw)))
            digest.update(raw)
        return digest.digest()

    def has(self, name: str) -> bool:
        """Return whether the field is given and not null."""
        return is_given(self.fields, name)

    def value(self, name: str) -> Any:
        """Return the field decoded, or None if it is not given.

        Raises:
            BadQuestion: The field's JSON cannot be read.
        """
        raw = self.fields.get(name)
        return None if raw is None else _decoded(raw, name)

    @cached_property
    def messages(self) -> list[Any]:
        """The messages, decoded.

        Raises:
            BadQuestion: They are not a list of objects.
        """
        messages = self.value("messages")
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            raise BadQuestion('messages must be a list of messages: write [{"role": "user", "content": "..."}]')
        return messages

    @cached_property
    def media_at(self) -> int | None:
        """The index of the first message that has more than text, or None if none has."""
        if self.kind not in ("chat", "messages"):
            return None
        has_media = _has_media if self.kind == "chat" else message_blocks.has_media
        return next((index for index, message in enumerate(self.messages) if has_media(message)), None)

    @cached_property
    def _items(self) -> list[dict[str, Any]]:
        """The items of a Response's input."""
        return _objects(self.value("input"))

    @cached_property
    def has_media(self) -> bool:
        """Whether the request has more than text."""
        if self.kind != "responses":
            return self.media_at is not None
        contents = (item.get(name) for item in self._items for name in ("content", "output"))
        return any(part.get("type") in RESPONSE_MEDIA for content in contents for part in _objects(content))

    @property
    def text_bytes(self) -> int:
        """The size of the texts in the messages, in characters; without the images, which may have megabytes."""
        contents = [message.get("content") for message in self.messages]
        texts = [content for content in contents if isinstance(content, str)]
        parts = [part for content in contents if isinstance(content, list) for part in content]
        texts += [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
        return sum(map(len, texts))

    @cached_property
    def features(self) -> tuple[Feature, ...]:
        """The features that a way to find tokens must have for this request."""
        if self.kind == "messages":
            return self._message_features()
        if self.kind == "responses":
            return self._response_features()
        if self.kind != "chat":
            return ("text",)
        features: list[Feature] = ["chat"]
        if self.has("tools") or any(m.get("role") == "tool" or m.get("tool_calls") for m in self.messages):
            features.append("tools")
        if self.value("continue_final_message") is True:
            features.append("continued")
        return tuple(features)

    def _message_features(self) -> tuple[Feature, ...]:
        features: list[Feature] = ["messages"]
        if self.has("tools") or any(map(message_blocks.uses_tools, self.messages)):
            features.append("message tools")
        if any(map(message_blocks.is_inline_system, self.messages)):
            features.append("inline system")
        if any(map(message_blocks.has_thinking, self.messages)):
            features.append("message thinking")
        if self.thinking in (THINKING_ON, THINKING_OFF):
            features.append(self.thinking)
        output = self.value("output_config")
        if isinstance(output, dict) and output.get("effort") is not None:
            features.append("message effort")
        return tuple(features)

    def _response_features(self) -> tuple[Feature, ...]:
        features: list[Feature] = ["responses"]
        tools, items = _objects(self.value("tools")), self._items
        if tools:
            features.append("unused response tools" if self.value("tool_choice") == "none" else "response tools")
            if any(tool.get("type") != "function" for tool in tools):
                features.append("response tool kinds")
        if any(item.get("type") in CALL_ITEMS for item in items):
            features.append("response calls")
        if any(item.get("type") in CUSTOM_ITEMS or item.get("namespace") for item in items):
            features.append("response call kinds")
        return tuple(features)

    @property
    def thinking(self) -> Literal["thinking on", "thinking off", "unknown"] | None:
        """Whether a message switches thinking on or off, or None if it does not say so."""
        thinking = self.value("thinking")
        if thinking is None:
            return None
        kind = thinking.get("type") if isinstance(thinking, dict) else None
        if kind == "disabled":
            return THINKING_OFF
        return THINKING_ON if kind in ("enabled", "adaptive") else "unknown"

    def with_fields(self, **changes: Any) -> TokenRequest:
        """Return a copy with some fields replaced, or left out where the new value is None."""
        fields = {name: value for name, value in self.fields.items() if name not in changes}
        fields |= {
            name: msgspec.Raw(msgspec.json.encode(value)) for name, value in changes.items() if value is not None
        }
        return TokenRequest(self.kind, fields)


class ListRequest(NamedTuple):
    """The prompts of a list before they are tokenized."""

    # The prompts to look up, in their order; the last one is the list's last prompt.
    prompts: list[TokenRequest | NDArray[np.int64]]
    # All prompts of the list.
    whole: PromptList

    def within(self, most: int) -> ListRequest:
        """Return the list with at most this many prompts to look up: the first ones and the last one."""
        if len(self.prompts) <= most:
            return self
        return ListRequest([*self.prompts[: most - 1], self.prompts[-1]], self.whole)


def cuts_cleanly(request: TokenRequest, at: int) -> bool:
    """Return whether a prompt that ends before message `at` begins in the same way as the whole prompt.

    In Anthropic's API a later system message may move to the front, and a message with results of tools becomes
    several. SGLang passes a last text of the assistant on as the user's.
    """
    message = request.messages[at]
    return request.kind != "messages" or not (
        "inline system" in request.features or message_blocks.uses_tools(message) or message.get("role") == "assistant"
    )


def read(path: str, body: ClientBody) -> TokenRequest | NDArray[np.int64] | ListRequest | Prompt:
    """Return the request for tokens, or the ids if the client sent them (int64); for a list, all its prompts as either.

    Ids with further facts, such as the places of media among them, are returned as a `Prompt`.

    Raises:
        BadQuestion: The prompt cannot be read.
        TokensUnknown: The prompt has no tokens, or none that can be found.
    """
    fields = body.fields
    check_other_blocks(fields)
    truncated = is_given(fields, TRUNCATION)
    if path == TEXT_PATH and body.ids is not None and not truncated and "prompt_embeds" not in fields:
        return _given(body.ids)
    relevant = {
        name: value
        for name, value in fields.items()
        if name not in WITHOUT_TOKENS or (truncated and name in OUTPUT_LIMITS)
    }
    if path == CHAT_PATH:
        return _chat(relevant, fields)
    if path == TEXT_PATH:
        return _text(relevant, truncated, body.ids)
    if path == MESSAGES_PATH:
        return _message(fields)
    if path == RESPONSES_PATH:
        if is_given(fields, "previous_response_id"):
            raise TokensUnknown(
                "not_looked_up", "previous_response_id: only the engine that has the response knows its prompt"
            )
        if b"prompt_token_ids" in bytes(fields.get("kv_transfer_params", NULL)):
            raise TokensUnknown(
                "not_looked_up", "only the engine can read kv_transfer_params.prompt_token_ids of a Response"
            )
        return TokenRequest("responses", relevant)
    if path == EMBEDDINGS_PATH and "input" in relevant:
        return _input(path, relevant["input"], body.ids, truncated=truncated)
    if path in (GENERATE_PATH, SGLANG_GENERATE_PATH):
        return _generate(path, fields, body.ids)
    raise _not_looked_up(path)


def _not_looked_up(path: str, num_prompts: int = 1) -> TokensUnknown:
    problem = f"{path}: its tokens are not looked up; it is placed by load"
    return TokensUnknown("not_looked_up", problem, num_prompts=num_prompts)


def _input(
    path: str, field: msgspec.Raw, ids: NDArray[np.uint64] | None, *, truncated: bool
) -> NDArray[np.int64] | ListRequest:
    """Return the token ids of an embedding's input, or of several inputs; texts, and what is cut, are not looked up."""
    if ids is not None:
        if truncated:
            raise _not_looked_up(path)
        return _given(ids)
    inputs = prompts_of(field)
    prompts = [_one_prompt(prompt) for prompt in (inputs.prompts if isinstance(inputs, PromptList) else [inputs])]
    given: list[TokenRequest | NDArray[np.int64]] = [ids for ids in prompts if not isinstance(ids, msgspec.Raw)]
    if truncated or len(given) < len(prompts):
        raise _not_looked_up(path, inputs.num_prompts if isinstance(inputs, PromptList) else 1)
    if isinstance(inputs, PromptList):
        return ListRequest(given, inputs)
    (only,) = given
    assert not isinstance(only, TokenRequest)
    return only


def _generate(path: str, fields: dict[str, msgspec.Raw], ids: NDArray[np.uint64] | None) -> TokenRequest | Prompt:
    """Return the prompt of an engine's own path for ids, or the request of its text; a list is placed by load."""
    if path == GENERATE_PATH:
        if ids is None and not is_given(fields, "token_ids"):
            raise BadQuestion("token_ids is missing")
        return vllm_prompt(fields, _given(fields["token_ids"] if ids is None else ids))
    check_sglang_media(fields)
    if ids is not None:
        return sglang_prompt(fields, _given(ids))
    name = "input_ids" if is_given(fields, "input_ids") else "text"
    if not is_given(fields, name):
        raise BadQuestion("text and input_ids are missing: one of them is needed")
    prompts = prompts_of(fields[name])
    if isinstance(prompts, PromptList):
        # The engine returns a list of answers, each with a report about its own prompt alone.
        raise _not_looked_up(path, prompts.num_prompts)
    prompt = _one_prompt(prompts)
    if not isinstance(prompt, msgspec.Raw):
        return sglang_prompt(fields, prompt)
    if name == "input_ids":
        raise BadQuestion("input_ids is a text; send it as text")
    # The engine makes the same tokens of a text as in a completion.
    return TokenRequest("text", {"prompt": prompt})


def _chat(relevant: dict[str, msgspec.Raw], fields: dict[str, msgspec.Raw]) -> TokenRequest | NDArray[np.int64]:
    """Return the request of a chat, or the ids that replace its messages."""
    if "messages" not in relevant:
        raise BadQuestion("messages is missing: a chat completion needs them")
    transfer = bytes(fields.get("kv_transfer_params", NULL))
    # Token ids in kv_transfer_params replace the messages. Source: vLLM 0.32.0 renderers/online_renderer.py,
    # _reused_prompt_token_ids.
    if b"prompt_token_ids" in transfer:
        # The engine reports what is wrong with a value that is no object.
        params = _decoded(msgspec.Raw(transfer), "kv_transfer_params")
        ids = params.get("prompt_token_ids") if isinstance(params, dict) else None
        if isinstance(ids, list) and ids and bytes(fields.get("echo", NULL)) != b"true":
            return token_array(msgspec.Raw(msgspec.json.encode(ids)), is_msgpack=False)
    request = TokenRequest("chat", relevant)
    if not request.messages:
        raise BadQuestion("messages is empty: a chat completion needs one at least")
    return request


def _message(fields: dict[str, msgspec.Raw]) -> TokenRequest:
    """Return the request of a message of Anthropic's API."""
    if b"prompt_token_ids" in bytes(fields.get("kv_transfer_params", NULL)):
        problem = "only the engine can read kv_transfer_params.prompt_token_ids of a message"
        raise TokensUnknown("not_looked_up", problem)
    request = TokenRequest("messages", {name: fields[name] for name in MESSAGE_FIELDS if name in fields})
    if not request.messages:
        raise BadQuestion("messages is empty: send one at least")
    # This decodes the fields that decide the features, and reports now what cannot be decoded.
    request.features  # noqa: B018
    return request


def _text(
    relevant: dict[str, msgspec.Raw], truncated: bool, ids: NDArray[np.uint64] | None
) -> TokenRequest | NDArray[np.int64] | ListRequest:
    """Return the request of a completion, its ids, or its prompts."""
    if is_given(relevant, "prompt_embeds"):
        raise TokensUnknown("embeds", "prompt_embeds have no token ids, so nothing of them is known to be cached")
    if ids is None and not is_given(relevant, "prompt"):
        raise BadQuestion("prompt is missing: a completion needs one")

    def request_of(prompt: msgspec.Raw | NDArray[np.uint64]) -> TokenRequest | NDArray[np.int64]:
        read_prompt = _one_prompt(prompt)
        if isinstance(read_prompt, msgspec.Raw):
            return TokenRequest("text", relevant | {"prompt": read_prompt})
        if truncated:
            return TokenRequest("text", relevant | {"prompt": msgspec.Raw(msgspec.json.encode(read_prompt.tolist()))})
        return read_prompt

    if ids is not None:
        return request_of(ids)
    prompts = prompts_of(relevant["prompt"])
    if isinstance(prompts, PromptList):
        return ListRequest([request_of(prompt) for prompt in prompts.prompts], prompts)
    return request_of(prompts)


def _one_prompt(prompt: msgspec.Raw | NDArray[np.uint64]) -> msgspec.Raw | NDArray[np.int64]:
    """Return a prompt: its text, still as JSON, or its ids."""
    if isinstance(prompt, msgspec.Raw):
        raw = bytes(prompt).strip()
        if raw.startswith(b'"'):
            return prompt
        if not raw.startswith(b"["):
            raise BadQuestion("prompt is neither text nor token ids")
        if is_list(raw):
            raise BadQuestion("prompt is nested too deeply: write a text, token ids, or a list of either")
    return _given(prompt)


def _given(ids: NDArray[np.uint64] | msgspec.Raw) -> NDArray[np.int64]:
    """Return the client's ids as int64; raise BadQuestion if there are none."""
    token_ids = token_array(ids, is_msgpack=False)
    if not len(token_ids):
        raise BadQuestion("prompt is empty: a completion needs a token at least")
    return token_ids


def _decoded(raw: msgspec.Raw, name: str) -> Any:
    """Return the field decoded; raise BadQuestion if it cannot be read."""
    check_elements(raw, name)
    try:
        return msgspec.json.decode(raw)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BadQuestion(f"{name} cannot be read: {error}", code="malformed_body") from None


def _objects(values: Any) -> list[dict[str, Any]]:
    """Return the objects in a list; an empty list for a value that is no list."""
    return [value for value in values if isinstance(value, dict)] if isinstance(values, list) else []


def _has_media(message: dict[str, Any]) -> bool:
    content = message.get("content")
    return isinstance(content, list) and any(isinstance(part, dict) and _is_media(part) for part in content)


def _is_media(part: dict[str, Any]) -> bool:
    kind = part.get("type", "text")
    return not isinstance(kind, str) or kind not in TEXT_PARTS or not MEDIA_KEYS.isdisjoint(part)
