# SPDX-License-Identifier: Apache-2.0
"""A chat's messages and tools in the form in which an engine passes them to the chat template. Pure.

Source: vLLM 0.32.0 renderers/chat_utils.py (parse_chat_messages), entrypoints/openai/chat_completion/protocol.py; the
order of a tool call's keys is that of OpenAI's types, by which vLLM reads it. SGLang 0.5.23
entrypoints/openai/serving_chat.py (_apply_jinja_template), entrypoints/openai/protocol.py. Anything that may be read
differently there is left to the engine.
"""

from __future__ import annotations

import json
from typing import Any

from kvrouter.router.model.engines.reading import Reading
from kvrouter.router.route.tokens.anthropic_messages import BILLING
from kvrouter.router.route.tokens.engine.wire import RenderQuirks, drops_tools, with_reasoning
from kvrouter.router.route.tokens.prompt_tokens import TokensUnknown
from kvrouter.router.route.tokens.token_request import TokenRequest

ROLES = frozenset({"system", "user", "assistant", "tool", "developer"})
TOOL_KEYS = frozenset({"type", "function"})
FUNCTION_KEYS = ("name", "description", "parameters", "strict")


def conversation(request: TokenRequest, quirks: RenderQuirks) -> list[dict[str, Any]]:
    """Return the messages.

    Raises:
        TokensUnknown: Only the engine can read the messages.
    """
    messages = [_message(message, quirks) for message in request.messages]
    if messages and quirks.reading.turns_last_answer and request.value("continue_final_message") is not True:
        last_message = messages[-1]
        if last_message["role"] == "assistant" and isinstance(last_message["content"], str):
            messages[-1] = {"role": "user", "content": last_message["content"]}
    return messages


def _message(message: dict[str, Any], quirks: RenderQuirks) -> dict[str, Any]:
    """Return one message as the engine passes it to the template."""
    reading = quirks.reading
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise _left(f"the role {role!r}")
    content = _content(message.get("content"), reading, as_parts=quirks.content_parts and role != "tool")
    if role == "system" and reading.drops_attribution and BILLING in str(content):
        raise _left("a billing line in a system message")
    rendered: dict[str, Any] = {"role": role, "content": content}
    if role == "assistant":
        calls = message.get("tool_calls")
        if calls is not None and not isinstance(calls, list):
            raise _left("tool_calls that are no list")
        if calls:
            rendered["tool_calls"] = [_tool_call(call, quirks) for call in calls]
        reasoning = (
            with_reasoning(message).get("reasoning") if reading.names_reasoning else message.get("reasoning_content")
        )
        if reasoning is not None:
            if not isinstance(reasoning, str):
                raise _left("reasoning that is no text")
            rendered["reasoning_content"] = reasoning
            if reading.names_reasoning:
                rendered["reasoning"] = reasoning
    elif role == "tool" and "tool_call_id" in message:
        rendered["tool_call_id"] = message["tool_call_id"]
    if isinstance(message.get("name"), str):
        rendered["name"] = message["name"]
    if "task" in message:
        raise _left("a message's task")
    if role == "developer":
        rendered["tools"] = message.get("tools")
    return rendered


def _content(content: Any, reading: Reading, *, as_parts: bool) -> str | list[dict[str, str]]:
    """Return the content as one text or as parts with text, whichever the template expects."""
    if reading.keeps_texts and isinstance(content, str | None):
        return content or ""
    if content is None:
        texts: list[str] = []
    elif isinstance(content, str):
        texts = [content]
    elif isinstance(content, list):
        texts = [_text_of(part) for part in content]
    else:
        raise _left("content that is neither text nor parts")
    return [{"type": "text", "text": text} for text in texts] if as_parts else reading.part_separator.join(texts)


def _text_of(part: Any) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict) or part.keys() != {"type", "text"} or part["type"] != "text":
        raise _left("a part that is more than a text")
    text = part["text"]
    if not isinstance(text, str):
        raise _left("a part without its text")
    return text


def _tool_call(call: Any, quirks: RenderQuirks) -> dict[str, Any]:
    """Return a tool call with its arguments decoded."""
    if not isinstance(call, dict) or call.keys() != {"id", "type", "function"} or call["type"] != "function":
        raise _left("a tool call of another form")
    function = call["function"]
    if not isinstance(function, dict) or function.keys() != {"name", "arguments"}:
        raise _left("a tool call of another form")
    if not all(isinstance(text, str) for text in (call["id"], *function.values())):
        raise _left("a tool call of another form")
    if quirks.reading.completes_calls:
        function = {"name": function["name"], "arguments": _arguments(function["arguments"])}
        return {"id": call["id"], "index": None, "type": "function", "function": function}
    written = {"name": function["name"]} if quirks.name_first else {}
    written |= {"arguments": _arguments(function["arguments"]), "name": function["name"]}
    return {
        "id": call["id"],
        "function": written,
        "type": "function",
    }


def _arguments(text: str) -> dict[str, Any]:
    """Return the arguments as the object that templates expect; empty if the text is no object."""
    if not text:
        return {}
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return arguments if isinstance(arguments, dict) else {}


def tools(request: TokenRequest, quirks: RenderQuirks) -> list[dict[str, Any]] | None:
    """Return the tools as the engine's own types write them, or None if the prompt has none.

    Raises:
        TokensUnknown: Only the engine can read the tools.
    """
    definitions = request.value("tools")
    if definitions is None or drops_tools(request, quirks):
        return None
    if not isinstance(definitions, list) or not definitions:
        raise _left("tools that are no list")
    named = None
    if quirks.reading.drops_unused_tools:
        choice = request.value("tool_choice")
        if choice == "none":
            return None
        if isinstance(choice, dict):
            function = choice.get("function")
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                raise _left("a tool_choice of another form")
            named = function["name"]
    written = [_tool(tool, quirks.reading) for tool in definitions]
    return [tool for tool in written if named is None or tool["function"]["name"] == named] or None


def _tool(tool: Any, reading: Reading) -> dict[str, Any]:
    if not isinstance(tool, dict) or not tool.keys() <= TOOL_KEYS or tool.get("type", "function") != "function":
        raise _left("a tool of another form")
    function = tool.get("function")
    if not isinstance(function, dict) or not function.keys() <= set(FUNCTION_KEYS) or "name" not in function:
        raise _left("a tool of another form")
    if reading.completes_calls:
        # The client's own keys come first, in the client's order.
        definition = {"description": None, "parameters": None} | function
        order = [*function, *(name for name in definition if name not in function)]
        definition = {name: definition[name] for name in order if name != "strict" or definition[name] is not None}
        return {"type": "function", "function": definition, "defer_loading": None}
    definition = {name: function.get(name) for name in FUNCTION_KEYS}
    if definition["strict"] is None:
        del definition["strict"]
    return {"type": "function", "function": definition}


def _left(part: str) -> TokensUnknown:
    """Return the error for a part of the request that is left to the engine."""
    return TokensUnknown("unsupported", f"{part} is not read by the tokenizer here; the engine reads it")
