# SPDX-License-Identifier: Apache-2.0
"""A message of Anthropic's API in the form of the chat that vLLM makes of it. Pure.

Source: vLLM 0.19.1 to 0.33.0 entrypoints/anthropic/serving.py (to_chat_completion_request). Anything that these
versions do not all read alike, or that depends on more than the request, is left to the engine's render endpoint.
Probes verify that an engine reads messages in this way (`engine/probes.py`).
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from kvrouter.router.route.tokens.message_blocks import TOOL_RESULT, TOOL_USE, is_inline_system
from kvrouter.router.route.tokens.prompt_tokens import TokensUnknown
from kvrouter.router.route.tokens.token_request import TokenRequest

# Claude Code's attribution, which differs in each request; vLLM leaves such a block out of a system prompt.
BILLING = "x-anthropic-billing-header"
TEXT, THINKING, REDACTED = "text", "thinking", "redacted_thinking"


def as_chat(request: TokenRequest, *, merges_system: bool) -> TokenRequest:
    """Return the chat that an engine makes of a message.

    With `merges_system`, later system messages move to the front, because the engine's template accepts none elsewhere.

    Raises:
        TokensUnknown: Only the engine can read the message.
    """
    effort = request.value("output_config")
    if isinstance(effort, dict) and effort.get("effort") is not None:
        raise _left("output_config.effort")
    leading = _system(request.value("system"))
    messages: list[dict[str, Any]] = []
    for message in request.messages:
        if is_inline_system(message):
            text = _system_text(message.get("content"))
            if merges_system:
                leading.append(text)
            elif text:
                messages.append({"role": "system", "content": text})
        else:
            messages += _messages(message)
    if any(leading):
        messages.insert(0, {"role": "system", "content": "".join(leading)})
    fields: dict[str, Any] = {"messages": messages}
    if (tools := request.value("tools")) is not None:
        fields["tools"] = _tools(tools)
    choice = request.value("tool_choice")
    if isinstance(choice, dict) and choice.get("type") == "none":
        fields["tool_choice"] = "none"
    if (arguments := request.value("chat_template_kwargs")) is not None:
        fields["chat_template_kwargs"] = arguments
    return TokenRequest("chat", {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in fields.items()})


def _system(system: Any) -> list[str]:
    """Return the texts of the system prompt."""
    if system is None or isinstance(system, str):
        return [system] if system else []
    if not isinstance(system, list):
        raise _left("a system prompt that is neither text nor blocks")
    texts = _system_texts(system)
    if system and not texts:
        raise _left("a system prompt without text")
    return texts


def _system_text(content: Any) -> str:
    """Return the text of a system message among the others."""
    if isinstance(content, str):
        return "" if content.startswith(BILLING) else content
    if not isinstance(content, list):
        raise _left("a system message that is neither text nor blocks")
    return "".join(_system_texts(content))


def _system_texts(blocks: list[Any]) -> list[str]:
    """Return the texts of a system prompt's blocks, without empty ones and the attribution."""
    texts = [_text_of(block) for block in blocks]
    return [text for text in texts if text and not text.startswith(BILLING)]


def _text_of(block: Any) -> str:
    if not isinstance(block, dict) or block.get("type") != TEXT:
        raise _left("a block of a system prompt that is no text")
    return _string(block.get("text"), "a text block without its text")


def _messages(message: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the chat's messages for one message: those with results of tools, then the message itself."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant"):
        raise _left(f"the role {role!r}")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise _left("content that is neither text nor blocks")
    results: list[dict[str, Any]] = []
    parts: list[dict[str, str]] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == TEXT:
            if text := _text_of(block):
                parts.append({"type": "text", "text": text})
        elif kind == THINKING:
            thoughts.append(_string(block.get("thinking"), "a thinking block without its text"))
        elif kind == TOOL_USE:
            calls.append(_call(block))
        elif kind == TOOL_RESULT and role == "user":
            results.append(_result(block))
        elif kind != REDACTED:
            raise _left(f"a block of the type {kind!r}")
    own_message: dict[str, Any] = {"role": role}
    if thoughts:
        own_message["reasoning"] = "".join(thoughts)
    if calls:
        own_message["tool_calls"] = calls
    if parts:
        own_message["content"] = parts[0]["text"] if len(parts) == 1 else parts
    return results if role == "user" and not parts else [*results, own_message]


def _call(block: dict[str, Any]) -> dict[str, Any]:
    """Return a tool_use block as a tool call of a chat."""
    call_id, name, arguments = block.get("id"), block.get("name"), block.get("input")
    if (
        not call_id
        or not isinstance(call_id, str)
        or not isinstance(name, str)
        or not isinstance(arguments, dict | None)
    ):
        raise _left("a tool_use block of another form")
    # The arguments are written as vLLM writes them; the chat's own reader parses them again.
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments or {})}}


def _result(block: dict[str, Any]) -> dict[str, Any]:
    """Return a tool_result block as a tool message of a chat."""
    content = block.get("content")
    if isinstance(content, list):
        content = "\n".join(_text_of(item) for item in content)
    call_id = block.get("tool_use_id")
    if not isinstance(content, str | None) or not isinstance(call_id, str | None):
        raise _left("a tool_result block of another form")
    return {"role": "tool", "tool_call_id": call_id or "", "content": content or ""}


def _tools(tools: Any) -> list[dict[str, Any]]:
    """Return the tools of a message as tools of a chat."""
    if not isinstance(tools, list) or not tools:
        raise _left("tools that are no list, or an empty one")
    return [_tool(tool) for tool in tools]


def _tool(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict) or not isinstance(tool.get("name"), str):
        raise _left("a tool without a name")
    schema, description = tool.get("input_schema"), tool.get("description")
    if not isinstance(schema, dict) or not isinstance(description, str | None):
        raise _left("a tool without an input_schema")
    if tool.get("strict") is not None or tool.get("defer_loading") is not None:
        raise _left("a tool's strict or defer_loading")
    # vLLM adds the default type behind the client's own keys.
    parameters = schema if "type" in schema else {**schema, "type": "object"}
    return {
        "type": "function",
        "function": {"name": tool["name"], "description": description, "parameters": parameters},
    }


def _string(text: Any, part: str) -> str:
    """Return the text, or raise TokensUnknown if it is none."""
    if not isinstance(text, str):
        raise _left(part)
    return text


def _left(part: str) -> TokensUnknown:
    """Return the error for a part of the request that only the engine's render endpoint reads."""
    return TokensUnknown("unsupported", f"{part} is read by the engine's render endpoint alone")
