# SPDX-License-Identifier: Apache-2.0
"""The paths for token ids: vLLM's /inference/v1/generate, and /generate as SGLang has it.

A replica has both, so that a router can be tried with either. On all other paths it behaves as vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from kvrouter.simulator.cache import tokenizer
from kvrouter.simulator.http.bodies import AtLeastOne, GenerationBody, Salt, StreamOptions, TokenId
from kvrouter.simulator.http.replies import DONE, Finish

# The paths for token ids give one answer here.
OnlyOne = Annotated[int, msgspec.Meta(ge=1, le=1)]
TokenIds = Annotated[list[TokenId], msgspec.Meta(min_length=1)]


class SamplingParams(msgspec.Struct):
    """The sampling parameters that change something here."""

    max_tokens: AtLeastOne | None = None
    n: OnlyOne = 1


class GenerateBody(GenerationBody, kw_only=True):
    """Body of /inference/v1/generate."""

    token_ids: TokenIds
    sampling_params: SamplingParams


class SGLangParams(msgspec.Struct):
    """The sampling parameters of SGLang that change something here."""

    max_new_tokens: AtLeastOne | None = None
    n: OnlyOne = 1


class SGLangBody(msgspec.Struct, kw_only=True):
    """Body of SGLang's /generate, with the fields that a generation needs. It has one prompt: a text, or token ids."""

    text: str | None = None
    input_ids: TokenIds | None = None
    sampling_params: SGLangParams | None = None
    stream: bool = False
    cache_salt: Salt | None = None
    model: str | None = None
    kv_transfer_params: dict[str, Any] | None = None
    # The number of answers, which SGLang has in `sampling_params`.
    n: OnlyOne = 1
    # Each event of SGLang's streams has the usage.
    stream_options: StreamOptions | None = msgspec.field(
        default_factory=lambda: StreamOptions(include_usage=False, continuous_usage_stats=True)
    )

    def __post_init__(self) -> None:
        """Raise ValueError unless there is one prompt."""
        if (self.text is None) == (self.input_ids is None):
            raise ValueError("Either text, input_ids or input_embeds should be provided.")

    @property
    def ids(self) -> list[int]:
        """The token ids of the prompt."""
        return self.input_ids or tokenizer.encode(self.text or "")


class TokensAnswer:
    """The answer of /inference/v1/generate, in the shape of vLLM 0.33.0."""

    def __init__(self, *, request_id: str, model: str, created: int) -> None:
        self.id = request_id
        self._model = model
        self._created = created

    def whole(self, answers: Sequence[Sequence[int]], finish: Finish, usage: dict[str, Any], left: Any) -> bytes:
        """Return the whole answer."""
        body = {
            "request_id": self.id,
            "created": self._created,
            "model": self._model,
            "choices": [self._choice(tokens, finish, index) for index, tokens in enumerate(answers)],
            "usage": usage,
            "prompt_logprobs": None,
            "kv_transfer_params": left,
        }
        return msgspec.json.encode(body)

    def opening(self, usage: dict[str, Any]) -> bytes | None:
        """Return None: nothing comes before the first token."""
        return None

    def piece(self, token: int, finish: Finish | None, usage: dict[str, Any] | None, index: int) -> bytes:
        """Return the event of one token of the answer with this index."""
        return self._event([self._choice([token], finish, index)], usage)

    def closing(self, finish: Finish, usage: dict[str, Any], *, with_usage: bool) -> bytes:
        """Return the events after the last token."""
        return (self._event([], usage) if with_usage else b"") + DONE

    def _choice(self, tokens: Sequence[int], finish: Finish | None, index: int) -> dict[str, Any]:
        return {"index": index, "logprobs": None, "finish_reason": finish, "token_ids": list(tokens)}

    def _event(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None) -> bytes:
        return b"data: " + msgspec.json.encode({"request_id": self.id, "choices": choices, "usage": usage}) + b"\n\n"


class SGLangAnswer:
    """The answer of /generate, in the shape of SGLang 0.5.23: each event of a stream has all of the answer so far."""

    def __init__(self, *, request_id: str) -> None:
        self.id = request_id
        self._tokens: list[int] = []

    def whole(self, answers: Sequence[Sequence[int]], finish: Finish, usage: dict[str, Any], left: Any) -> bytes:
        """Return the whole answer; there is only one."""
        (tokens,) = answers
        return msgspec.json.encode(self._reply(tokens, finish, usage))

    def opening(self, usage: dict[str, Any]) -> bytes | None:
        """Return None: nothing comes before the first token."""
        return None

    def piece(self, token: int, finish: Finish | None, usage: dict[str, Any] | None, index: int) -> bytes:
        """Return the event of one token of the only answer, whose index is 0."""
        self._tokens.append(token)
        return b"data: " + msgspec.json.encode(self._reply(self._tokens, finish, usage or {})) + b"\n\n"

    def closing(self, finish: Finish, usage: dict[str, Any], *, with_usage: bool) -> bytes:
        """Return the end of the stream."""
        return DONE

    def _reply(self, tokens: Sequence[int], finish: Finish | None, usage: dict[str, Any]) -> dict[str, Any]:
        details = usage.get("prompt_tokens_details") or {}
        reason = None if finish is None else {"type": finish, "length": len(tokens)}
        meta_info = {
            "id": self.id,
            "finish_reason": reason,
            "prompt_tokens": usage.get("prompt_tokens"),
            "weight_version": "default",
            "completion_tokens": len(tokens),
            "cached_tokens": details.get("cached_tokens"),
        }
        return {"text": tokenizer.decode(tokens), "output_ids": list(tokens), "meta_info": meta_info}
