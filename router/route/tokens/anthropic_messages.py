# SPDX-License-Identifier: Apache-2.0
"""A message of Anthropic's API in the form of the chat that an engine makes of it. Pure.

`Reading` has the differences between vLLM and SGLang. Anything that an engine's versions do not all read alike, or that
depends on more than the request, is left to the engine. Probes verify that an engine reads messages in this way
(`engine/probes.py`).

Source: vLLM 0.19.1 to 0.33.0 entrypoints/anthropic/serving.py (to_chat_completion_request), SGLang 0.5.23
entrypoints/anthropic/serving.py (_convert_to_chat_completion_request).
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from kvrouter.router.model.engines.reading import VLLM_READING, Reading
from kvrouter.router.route.tokens.message_blocks import THINKING, TOOL_RESULT, TOOL_USE, is_inline_system
from kvrouter.router.route.tokens.prompt_tokens import TokensUnknown
from kvrouter.router.route.tokens.thinking import DROPPED, NO_SWITCH, ThinkingHistory, ThinkingSwitch
from kvrouter.router.route.tokens.token_request import THINKING_OFF, THINKING_ON, TokenRequest

# Claude Code's attribution, which differs in each request.
BILLING = "x-anthropic-billing-header"
TEXT, REDACTED = "text", "redacted_thinking"

# The types of tools that Anthropic's own servers run; SGLang leaves them out of the chat.
SERVER_TOOLS = ("web_search_", "computer_", "bash_", "text_editor_")


def as_chat(
    request: TokenRequest,
    *,
    merges_system: bool,
    reading: Reading = VLLM_READING,
    history: ThinkingHistory = DROPPED,
    switch: ThinkingSwitch = NO_SWITCH,
) -> TokenRequest:
    """Return the chat that an engine makes of a message.

    Args:
        request: The message.
        merges_system: Whether later system messages move to the front, because the engine's template accepts none
            elsewhere.
        reading: How the engine reads messages.
        history: The form of earlier thinking, if the engine takes thinking.
        switch: The arguments that switch thinking, if the engine takes thinking.

    Raises:
        TokensUnknown: Only the engine can read the message.
    """
    leading = _system(request.value("system"), reading)
    messages: list[dict[str, Any]] = []
    for message in request.messages:
        if not is_inline_system(message):
            messages += _messages(message, reading, history)
        elif merges_system:
            leading.append(_merged_text(message.get("content"), reading))
        else:
            messages += _inline(message.get("content"), reading)
    if texts := [text for text in leading if text]:
        messages.insert(0, {"role": "system", "content": reading.system_separator.join(texts)})
    fields: dict[str, Any] = {"messages": messages}
    if (tools := request.value("tools")) is not None and (definitions := _tools(tools, reading)):
        fields["tools"] = definitions
    if choice := _choice(request.value("tool_choice"), reading, has_tools="tools" in fields):
        fields["tool_choice"] = choice
    if (arguments := _template_arguments(request, reading, switch)) is not None:
        fields["chat_template_kwargs"] = arguments
    return TokenRequest("chat", {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in fields.items()})


def _system(system: Any, reading: Reading) -> list[str]:
    """Return the texts of the system prompt."""
    if system is None or isinstance(system, str):
        return [system] if system and (reading.drops_attribution or system.strip()) else []
    if not isinstance(system, list):
        raise _left("a system prompt that is neither text nor blocks")
    texts = _system_texts(system, reading)
    if system and not texts and reading.drops_attribution:
        raise _left("a system prompt without text")
    return texts


def _merged_text(content: Any, reading: Reading) -> str:
    """Return the text of a later system message, which moves to the front."""
    if reading.drops_attribution:
        return _system_text(content, reading)
    texts = [content] if isinstance(content, str) else _system_texts(_blocks(content), reading)
    return "\n".join(text.strip() for text in texts if text.strip())


def _inline(content: Any, reading: Reading) -> list[dict[str, Any]]:
    """Return a later system message that stays in its place, as a list of one message or none."""
    if reading.drops_attribution:
        text = _system_text(content, reading)
        return [{"role": "system", "content": text}] if text else []
    if isinstance(content, str):
        return [{"role": "system", "content": content}]
    parts = [{"type": "text", "text": _text_of(block)} for block in _blocks(content)]
    return [{"role": "system", "content": _content(parts) if parts else ""}]


def _system_text(content: Any, reading: Reading) -> str:
    """Return the text of a later system message, without the attribution."""
    if isinstance(content, str):
        return "" if content.startswith(BILLING) else content
    return "".join(_system_texts(_blocks(content), reading))


def _blocks(content: Any) -> list[Any]:
    if not isinstance(content, list):
        raise _left("a system message that is neither text nor blocks")
    return content


def _system_texts(blocks: list[Any], reading: Reading) -> list[str]:
    """Return the texts of a system prompt's blocks, without empty ones and without an attribution that is dropped."""
    texts = [_text_of(block) for block in blocks]
    return [text for text in texts if text and not (reading.drops_attribution and text.startswith(BILLING))]


def _text_of(block: Any) -> str:
    if not isinstance(block, dict) or block.get("type") != TEXT:
        raise _left("a block of a system prompt that is no text")
    return _string(block.get("text"), "a text block without its text")


def _messages(message: dict[str, Any], reading: Reading, history: ThinkingHistory) -> list[dict[str, Any]]:
    """Return the chat's messages for one message: those with results of tools, and the message itself."""
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
            if (text := _text_of(block)) or reading.keeps_empty_texts:
                parts.append({"type": "text", "text": text})
        elif kind == THINKING:
            thoughts.append(_string(block.get("thinking"), "a thinking block without its text"))
        elif kind == TOOL_USE and (role == "assistant" or not reading.takes_thinking):
            calls.append(_call(block))
        elif kind == TOOL_RESULT and role == "user":
            if parts and reading.keeps_block_order:
                results.append({"role": role, "content": _content(parts)})
                parts = []
            results.append(_result(block, reading))
        elif kind != REDACTED or reading.takes_thinking:
            raise _left(f"a block of the type {kind!r}")
    own_message: dict[str, Any] = {"role": role}
    if reading.takes_thinking:
        thoughts = [thought for thought in thoughts if thought] if role == "assistant" else []
        if thoughts and history.as_field:
            own_message["reasoning_content"] = "\n".join(thoughts)
        elif thoughts and history.marks is not None:
            begin, end = history.marks
            parts.insert(0, {"type": "text", "text": begin + "\n".join(thoughts) + end})
        if role == "assistant" and not parts and not calls:
            parts = [{"type": "text", "text": ""}]
    elif thoughts:
        own_message["reasoning"] = "".join(thoughts)
    if calls:
        own_message["tool_calls"] = calls
    if parts:
        own_message["content"] = _content(parts)
    return results if role == "user" and not parts else [*results, own_message]


def _content(parts: list[dict[str, str]]) -> str | list[dict[str, str]]:
    """Return a message's content: a single part as its text, several as parts."""
    return parts[0]["text"] if len(parts) == 1 else parts


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
    # The arguments are written as the engine writes them; the chat's own reader parses them again.
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments or {})}}


def _result(block: dict[str, Any], reading: Reading) -> dict[str, Any]:
    """Return a tool_result block as a tool message of a chat."""
    content = block.get("content")
    call_id = block.get("tool_use_id")
    if reading.result_separator is None:
        # SGLang accepts this name, too.
        call_id = call_id or block.get("id")
    if not isinstance(content, str | list | None) or not isinstance(call_id, str | None):
        raise _left("a tool_result block of another form")
    if isinstance(content, list):
        texts = [_text_of(item) for item in content]
        if reading.result_separator is None:
            content = _content([{"type": "text", "text": text} for text in texts if text])
        else:
            content = reading.result_separator.join(texts)
    return {"role": "tool", "tool_call_id": call_id or "", "content": content or ""}


def _tools(tools: Any, reading: Reading) -> list[dict[str, Any]]:
    """Return the tools of a message as tools of a chat."""
    if not isinstance(tools, list) or not (tools or reading.completes_tools):
        raise _left("tools that are no list, or an empty one")
    if reading.completes_tools:
        tools = [tool for tool in tools if not _is_of_server(tool)]
    return [_tool(tool, reading) for tool in tools]


def _is_of_server(tool: Any) -> bool:
    """Return whether Anthropic's servers would run the tool."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    return isinstance(kind, str) and kind.startswith(SERVER_TOOLS)


def _tool(tool: Any, reading: Reading) -> dict[str, Any]:
    if not isinstance(tool, dict) or not isinstance(tool.get("name"), str):
        raise _left("a tool without a name")
    schema, description = tool.get("input_schema"), tool.get("description")
    if not isinstance(schema, dict) or not isinstance(description, str | None):
        raise _left("a tool without an input_schema")
    # Engines add the default type behind the client's own keys.
    parameters = schema if "type" in schema else {**schema, "type": "object"}
    function = {"name": tool["name"], "description": description, "parameters": parameters}
    definition: dict[str, Any] = {"type": "function", "function": function}
    strict, deferred = tool.get("strict"), tool.get("defer_loading")
    if reading.completes_tools:
        if not isinstance(strict, bool | None) or not isinstance(deferred, bool | None):
            raise _left("a tool's strict or defer_loading that is no boolean")
        function |= {"description": description or "", "strict": strict is True}
        if deferred is not None:
            definition["defer_loading"] = deferred
    elif strict is not None or deferred is not None:
        raise _left("a tool's strict or defer_loading")
    return definition


def _choice(choice: Any, reading: Reading, *, has_tools: bool) -> str | dict[str, Any] | None:
    """Return the tool choice of a chat, or None if it has no influence on the prompt."""
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "none":
        return "none"
    if reading.applies_tool_choice and kind == "tool" and has_tools:
        return {"type": "function", "function": {"name": choice.get("name")}}
    return None


def _template_arguments(request: TokenRequest, reading: Reading, switch: ThinkingSwitch) -> Any:
    """Return the arguments that the message gives to the template, or None if it gives none."""
    thinking = request.thinking
    output = request.value("output_config")
    effort = output.get("effort") if isinstance(output, dict) else None
    if reading.takes_thinking:
        arguments: dict[str, Any] = {}
        if thinking in (THINKING_ON, THINKING_OFF):
            arguments = dict.fromkeys(switch.names, switch.on if thinking == THINKING_ON else switch.off)
        elif thinking is not None:
            raise _left("thinking of another form")
        if effort is not None:
            # As the field `reasoning_effort`, it would set further arguments.
            arguments["reasoning_effort"] = "max" if effort == "xhigh" else effort
        return arguments or None
    if effort is not None:
        raise _left("output_config.effort")
    if thinking == THINKING_OFF:
        # From 0.31 on vLLM tries out once which effort its template uses for disabled thinking.
        raise TokensUnknown(
            "not_looked_up", "thinking that is disabled: only the engine knows what its template makes of it"
        )
    return request.value("chat_template_kwargs") if reading.takes_template_arguments else None


def _string(text: Any, part: str) -> str:
    """Return the text, or raise TokensUnknown if it is none."""
    if not isinstance(text, str):
        raise _left(part)
    return text


def _left(part: str) -> TokensUnknown:
    """Return the error for a part of the request that only the engine reads."""
    return TokensUnknown("unsupported", f"{part} is not read here; the engine's render endpoint may read it")
