# SPDX-License-Identifier: Apache-2.0
"""The request bodies that a replica reads, and refuses as vLLM 0.32.0 does. Most fields change nothing here.

`tests/engine/test_request_checks.py` compares the answers with vLLM's; docs/reference/simulator.md lists the requests
that only this simulator accepts.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

# vLLM refuses ids outside its model's vocabulary. Prompts here may be for any model, so this bound is above every
# vocabulary.
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
AtLeastOne = Annotated[int, msgspec.Meta(ge=1)]
# vLLM 0.33.0 (VLLM_MAX_N_SEQUENCES).
Answers = Annotated[int, msgspec.Meta(ge=1, le=16_384)]
NotEmpty = Annotated[str, msgspec.Meta(min_length=1)]
# vLLM 0.32.0 entrypoints/generate/base/protocol.py (validate_cache_salt).
Salt = Annotated[str, msgspec.Meta(pattern=r"\A[^@/\\\x00]{1,128}\Z")]
# vLLM 0.32.0 sampling_params.py (_verify_args).
Temperature = Annotated[float, msgspec.Meta(ge=0, le=2)]
TopP = Annotated[float, msgspec.Meta(gt=0, le=1)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]
Logprobs = Annotated[int, msgspec.Meta(ge=-1)]
Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]

Messages = Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1)]

# vLLM's default of /v1/completions.
DEFAULT_MAX_TOKENS = 16
# A chat without max_tokens gets an answer of this length, as if the model had come to its end there.
DEFAULT_ANSWER_TOKENS = 128


class StreamOptions(msgspec.Struct):
    """Options of a stream. An unset field counts as not wanted.

    As with vLLM, a request without a stream must not set any.
    """

    include_usage: bool | msgspec.UnsetType | None = msgspec.UNSET
    continuous_usage_stats: bool | msgspec.UnsetType | None = msgspec.UNSET


class GenerationBody(msgspec.Struct, kw_only=True):
    """The fields that completions and chats share."""

    model: str | None = None
    max_tokens: AtLeastOne | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: Answers | None = 1
    cache_salt: Salt | None = None
    return_token_ids: bool | None = False
    kv_transfer_params: dict[str, Any] | None = None
    # vLLM's checks apply to these fields, which have no other effect here.
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: Logprobs | None = None
    min_p: Share | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0)] | None = None
    min_tokens: TokenId = 0
    prompt_logprobs: Logprobs | None = None
    stop: NotEmpty | list[NotEmpty] | None = None
    stop_token_ids: list[int] | None = None
    logit_bias: dict[str, float] | None = None
    ignore_eos: bool = False
    seed: Int64 | None = None
    priority: Int64 = 0
    request_id: str | None = None
    user: str | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for fields that vLLM does not accept together."""
        if not self.stream and self.stream_options not in (None, StreamOptions()):
            raise ValueError("Stream options can only be defined when `stream=True`.")
        if self.stream and self.prompt_logprobs:
            raise ValueError("`prompt_logprobs` are not available when `stream=True`.")
        if self.most_tokens is not None and self.min_tokens > self.most_tokens:
            raise ValueError(f"min_tokens must be less than or equal to max_tokens={self.most_tokens}")

    @property
    def most_tokens(self) -> int | None:
        """Limit of the answer in tokens; None if the request has none."""
        return self.max_tokens


class CompletionBody(GenerationBody, kw_only=True):
    """Body of /v1/completions. Its prompt is a text, token ids, or a list of either."""

    prompt: str | list[TokenId | str | list[TokenId]]
    logprobs: Logprobs | None = None
    echo: bool | None = False
    suffix: str | None = None

    @property
    def most_tokens(self) -> int:
        """Limit of the answer in tokens."""
        return self.max_tokens or DEFAULT_MAX_TOKENS


class ResponseFormat(msgspec.Struct):
    """A response format, as far as it is checked."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("When response_format type is 'json_schema', the 'json_schema' field must be provided.")


class ChatBody(GenerationBody, kw_only=True):
    """Body of /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: AtLeastOne | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    logprobs: bool | None = False
    top_logprobs: Logprobs | None = None
    response_format: ResponseFormat | None = None

    def __post_init__(self) -> None:
        GenerationBody.__post_init__(self)
        check_chat(self.messages, self.tools, self.add_generation_prompt, self.continue_final_message)
        _check_choice(self.tools, self.tool_choice)
        if self.top_logprobs and not self.logprobs:
            raise ValueError("when using `top_logprobs`, `logprobs` must be set to true.")

    @property
    def most_tokens(self) -> int | None:
        """Limit of the answer in tokens; None if the request has none."""
        return self.max_completion_tokens or self.max_tokens


class TokenizeBody(msgspec.Struct, kw_only=True):
    """Body of /tokenize: a prompt or a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    return_token_strs: bool | None = False

    def __post_init__(self) -> None:
        if self.messages is not None:
            check_chat(self.messages, None, self.add_generation_prompt, self.continue_final_message)


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """Body of /detokenize."""

    tokens: list[TokenId]
    model: str | None = None


def prompts_of(body: CompletionBody) -> list[str | list[int]]:
    """Return the prompts of a completion request. Raises ValueError if there are none or they are mixed."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    texts = [item for item in prompt if isinstance(item, str)]
    of_ids = [item for item in prompt if isinstance(item, list)]
    ids = [item for item in prompt if isinstance(item, int)]
    if len(prompt) not in (len(texts), len(of_ids), len(ids)):
        raise ValueError("the prompts of a list must be of one kind: texts, or lists of token ids")
    if not prompt:
        raise ValueError("Either prompt or prompt_embeds must be provided and non-empty.")
    return [*texts, *of_ids] if texts or of_ids else [ids]


def check_chat(
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    add_generation_prompt: bool,
    continue_final_message: bool,
) -> None:
    """Raise ValueError for a chat that vLLM refuses."""
    for message in messages:
        role = message.get("role")
        if not isinstance(role, str):
            raise ValueError("each message needs a `role`, which is a text")
        if role != "assistant" and message.get("content", "") is None:
            raise ValueError(f"the `content` of a message of {role!r} must not be null")
    if continue_final_message and add_generation_prompt:
        raise ValueError("Cannot set both `continue_final_message` and `add_generation_prompt` to True.")
    if tools == []:
        raise ValueError("`tools` must not be an empty array.")
    for tool in tools or ():
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ValueError("each tool needs a `function` with a `name`")


def _check_choice(tools: list[dict[str, Any]] | None, choice: str | dict[str, Any] | None) -> None:
    """Raise ValueError for a `tool_choice` that does not match the tools."""
    if choice is None or choice == "none":
        return
    if tools is None:
        raise ValueError("When using `tool_choice`, `tools` must be set.")
    if isinstance(choice, str):
        if choice not in ("auto", "required"):
            raise ValueError(f"Invalid value for `tool_choice`: {choice}!")
        return
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not any(tool["function"]["name"] == name for tool in tools):
        raise ValueError("The tool specified in `tool_choice` does not match any of the specified `tools`")
