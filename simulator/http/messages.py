# SPDX-License-Identifier: Apache-2.0
"""Anthropic's `/v1/messages` as vLLM 0.32.0 serves it: the chat that a body becomes, and the answers and events."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec

from kvrouter.simulator.cache import tokenizer
from kvrouter.simulator.http.bodies import AtLeastOne, GenerationBody
from kvrouter.simulator.http.replies import Finish

BILLING = "x-anthropic-billing-header"
Blocks = str | list[dict[str, Any]]


class Message(msgspec.Struct):
    """A message of a body."""

    role: Literal["user", "assistant", "system"]
    content: Blocks


class CountBody(msgspec.Struct, kw_only=True):
    """Body of /v1/messages/count_tokens."""

    model: str
    messages: Annotated[list[Message], msgspec.Meta(min_length=1)]
    system: Blocks | None = None
    tools: list[dict[str, Any]] | None = None


class MessagesBody(GenerationBody, kw_only=True):
    """Body of /v1/messages."""

    model: str
    max_tokens: AtLeastOne
    messages: Annotated[list[Message], msgspec.Meta(min_length=1)]
    system: Blocks | None = None
    tools: list[dict[str, Any]] | None = None


def chat_of(body: CountBody | MessagesBody) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """Return messages and tools of the chat. This replica's template takes system messages anywhere."""
    messages: list[dict[str, Any]] = []
    if body.system:
        text = body.system if isinstance(body.system, str) else _joined(body.system)
        messages.append({"role": "system", "content": text})
    for message in body.messages:
        if isinstance(message.content, str):
            messages.append({"role": message.role, "content": message.content})
        elif message.role == "system":
            messages.append({"role": "system", "content": _joined(message.content)})
        else:
            messages += _messages(message.role, message.content)
    return messages, None if body.tools is None else [_tool(tool) for tool in body.tools]


def _joined(blocks: list[dict[str, Any]]) -> str:
    texts = [str(block.get("text") or "") for block in blocks]
    return "".join(text for text in texts if not text.startswith(BILLING))


def _messages(role: str, blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    for block in blocks:
        kind = block.get("type")
        if kind == "text" and block.get("text"):
            parts.append({"type": "text", "text": block["text"]})
        elif kind == "tool_use":
            arguments = json.dumps(block.get("input") or {})
            function = {"name": block.get("name"), "arguments": arguments}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result":
            content = block.get("content") or ""
            if not isinstance(content, str):
                content = "\n".join(str(part.get("text", "")) for part in content)
            messages.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content})
        elif kind == "image":
            parts.append({"type": "image_url"})
    if parts or role != "user":
        message: dict[str, Any] = {"role": role, "content": parts or None}
        messages.append(message | ({"tool_calls": calls} if calls else {}))
    return messages


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    parameters = {**tool["input_schema"]} if isinstance(tool.get("input_schema"), dict) else {}
    parameters.setdefault("type", "object")
    function = {"name": tool.get("name"), "description": tool.get("description"), "parameters": parameters}
    return {"type": "function", "function": function}


class MessageAnswer:
    """The answer to one request, as `replies.Answer` is for OpenAI's paths."""

    def __init__(self, *, request_id: str, model: str) -> None:
        self.id = "chatcmpl-" + request_id
        self._model = model

    def opening(self, usage: dict[str, Any]) -> bytes:
        """Return the events before the first token."""
        message = {**self._head(), "content": [], "stop_reason": None, "stop_sequence": None}
        began = _event("message_start", message={**message, "usage": _usage({**usage, "completion_tokens": 0})})
        return began + _event("content_block_start", index=0, content_block={"type": "text", "text": ""})

    def piece(self, token: int, finish: Finish | None, usage: dict[str, Any] | None, index: int) -> bytes:
        """Return one token's event."""
        delta = {"type": "text_delta", "text": tokenizer.decode((token,))}
        return _event("content_block_delta", index=0, delta=delta)

    def closing(self, finish: Finish, usage: dict[str, Any], *, with_usage: bool) -> bytes:
        """Return the events after the last token, which always include the usage."""
        delta = {"stop_reason": _reason(finish), "stop_sequence": None}
        ended = _event("content_block_stop", index=0) + _event("message_delta", delta=delta, usage=_usage(usage))
        return ended + _event("message_stop")

    def whole(
        self, answers: Sequence[Sequence[int]], finish: Finish, usage: dict[str, Any], transfer: dict[str, Any] | None
    ) -> bytes:
        """Return the only answer as one body."""
        content = [{"type": "text", "text": tokenizer.decode(answers[0])}]
        body = {**self._head(), "content": content, "stop_reason": _reason(finish), "usage": _usage(usage)}
        return msgspec.json.encode(body if transfer is None else {**body, "kv_transfer_params": transfer})

    def _head(self) -> dict[str, Any]:
        return {"id": self.id, "type": "message", "role": "assistant", "model": self._model}


def _reason(finish: Finish) -> str:
    return "max_tokens" if finish == "length" else "end_turn"


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    """Return Anthropic's usage, whose input is the tokens that were not read from the cache."""
    cached = (usage["prompt_tokens_details"] or {"cached_tokens": 0})["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "output_tokens": usage["completion_tokens"],
        "cache_read_input_tokens": cached,
    }


def _event(kind: str, **fields: Any) -> bytes:
    data = msgspec.json.encode({"type": kind, **fields})
    return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"


def message_error(kind: str, message: str) -> dict[str, Any]:
    """Return vLLM's error body on these paths."""
    return {"type": "error", "error": {"type": kind, "message": message}}
