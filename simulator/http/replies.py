# SPDX-License-Identifier: Apache-2.0
"""The bodies that a replica answers with, in the shapes of vLLM 0.32.0: whole answers and the chunks of a stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from aiohttp import web

from kvrouter.simulator.cache import tokenizer

DONE = b"data: [DONE]\n\n"

Finish = Literal["length", "stop"]


class Answer:
    """The shape of one request's answer, written piece by piece or as a whole."""

    def __init__(self, *, request_id: str, model: str, created: int, chat: bool, with_token_ids: bool) -> None:
        self.id = ("chatcmpl-" if chat else "cmpl-") + request_id
        self._chat = chat
        self._with_token_ids = with_token_ids
        kind = "chat.completion" if chat else "text_completion"
        self._head = {"id": self.id, "created": created, "model": model}
        self._whole = kind
        self._piece = "chat.completion.chunk" if chat else kind

    def opening(self, usage: dict[str, Any]) -> bytes | None:
        """Return the chunk before the first token: for a chat, the role; otherwise None."""
        if not self._chat:
            return None
        choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return self._event({"choices": [choice]})

    def piece(self, token: int, finish: Finish | None, usage: dict[str, Any] | None, index: int) -> bytes:
        """Return the chunk of one token of the answer with this index."""
        text = tokenizer.decode((token,))
        choice: dict[str, Any] = {"index": index, "logprobs": None, "finish_reason": finish, "stop_reason": None}
        if self._chat:
            choice["delta"] = {"content": text}
        else:
            choice["text"] = text
        if self._with_token_ids:
            choice["token_ids"] = [token]
        return self._event({"choices": [choice]} if usage is None else {"choices": [choice], "usage": usage})

    def closing(self, finish: Finish, usage: dict[str, Any], *, with_usage: bool) -> bytes:
        """Return the chunks after the last token."""
        return self._event({"choices": [], "usage": usage}) + DONE if with_usage else DONE

    def whole(
        self, answers: Sequence[Sequence[int]], finish: Finish, usage: dict[str, Any], transfer: dict[str, Any] | None
    ) -> bytes:
        """Return all answers to the request as one body."""
        choices = [self._choice(index, tokens, finish) for index, tokens in enumerate(answers)]
        body = {"object": self._whole, **self._head, "choices": choices, "usage": usage}
        return msgspec.json.encode(body if transfer is None else {**body, "kv_transfer_params": transfer})

    def _choice(self, index: int, tokens: Sequence[int], finish: Finish) -> dict[str, Any]:
        text = tokenizer.decode(tokens)
        choice: dict[str, Any] = {"index": index, "logprobs": None, "finish_reason": finish, "stop_reason": None}
        if self._chat:
            choice["message"] = {"role": "assistant", "content": text, "tool_calls": []}
        else:
            choice["text"] = text
        if self._with_token_ids:
            choice["token_ids"] = list(tokens)
        return choice

    def _event(self, body: dict[str, Any]) -> bytes:
        return b"data: " + msgspec.json.encode({"object": self._piece, **self._head, **body}) + b"\n\n"


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int | None) -> dict[str, Any]:
    """Return the usage of a request.

    `cached_tokens` is how many tokens of the prompt were not computed, or None to leave that out of the reply, as vLLM
    does without --enable-prompt-tokens-details.
    """
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": None if cached_tokens is None else {"cached_tokens": cached_tokens},
    }


_KINDS = {400: "BadRequestError", 404: "NotFoundError"}


def json_response(body: object, status: int = 200) -> web.Response:
    """Return a response with `body` as JSON."""
    return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json")


def error(status: int, message: str) -> dict[str, Any]:
    """Return an error body as vLLM writes it."""
    kind = _KINDS.get(status, "InternalServerError")
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}
