# SPDX-License-Identifier: Apache-2.0
"""The request bodies that a replica reads, as vLLM 0.32.0 takes them. Fields that change nothing here are ignored."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

TokenId = Annotated[int, msgspec.Meta(ge=0)]
AtLeastOne = Annotated[int, msgspec.Meta(ge=1)]
Salt = Annotated[str, msgspec.Meta(min_length=1)]
OnlyOne = Annotated[int, msgspec.Meta(ge=1, le=1)]

# vLLM's default of /v1/completions.
DEFAULT_MAX_TOKENS = 16
# A chat without max_tokens is answered at this length, as if the model had come to its end there.
DEFAULT_ANSWER_TOKENS = 128


class StreamOptions(msgspec.Struct):
    """What a stream carries besides the text."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class GenerationBody(msgspec.Struct, kw_only=True):
    """What completions and chats have in common."""

    model: str | None = None
    max_tokens: AtLeastOne | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: OnlyOne | None = 1
    cache_salt: Salt | None = None
    return_token_ids: bool | None = False
    kv_transfer_params: dict[str, Any] | None = None


class CompletionBody(GenerationBody, kw_only=True):
    """/v1/completions. One prompt: a text, token ids, or a list that holds one of either."""

    prompt: str | list[TokenId | str | list[TokenId]]


class ChatBody(GenerationBody, kw_only=True):
    """/v1/chat/completions."""

    messages: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1)]
    max_completion_tokens: AtLeastOne | None = None
    tools: list[Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False


class TokenizeBody(msgspec.Struct, kw_only=True):
    """/tokenize: a prompt or a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    return_token_strs: bool | None = False


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """/detokenize."""

    tokens: list[TokenId]
    model: str | None = None


def prompt_of(body: CompletionBody) -> str | list[int]:
    """The one prompt of a completion request. Raises ValueError when there are several or they are mixed."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1 and isinstance(prompt[0], str):
        return prompt[0]
    if len(prompt) == 1 and isinstance(prompt[0], list):
        return prompt[0]
    ids = [item for item in prompt if isinstance(item, int)]
    if len(ids) != len(prompt):
        raise ValueError("this replica takes one prompt a request; send a text, or one list of token ids")
    return ids
