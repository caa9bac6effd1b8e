# SPDX-License-Identifier: Apache-2.0
"""A body of OpenAI's `/v1/responses` in the form of the chat that vLLM makes of it. Pure.

Source: vLLM 0.33.0 entrypoints/openai/responses/utils.py (construct_input_messages, construct_tool_dicts), and in
its protocol.py ResponsesRequest.
vLLM's versions differ in these ways, which probes show (`engine/probes.py`):

- up to 0.20, nothing is merged into the message before it, and chat_template_kwargs are ignored;
- up to 0.23, an assistant's message without parts is not merged either, and no tool is left out of the prompt;
- up to 0.25, tools are written with further keys, and with tool_choice "none" they are always left out;
- from 0.25 on, namespaces are written as functions, and from 0.32 on custom tools as well.

A part that is not converted exactly is left to the engine's render endpoint.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from kvrouter.router.route.tokens.prompt_tokens import TokensUnknown
from kvrouter.router.route.tokens.token_request import RESPONSE_MEDIA, TokenRequest

ROLES = ("user", "system", "developer")
MESSAGE_KEYS = frozenset({"type", "role", "content", "id", "status", "phase"})
# vLLM continues a last item that has one of these statuses.
UNFINISHED = ("in_progress", "incomplete")
# vLLM leaves these tools of OpenAI's out of the prompt.
UNWRITTEN_TOOLS = ("web_search", "web_search_preview", "file_search", "code_interpreter", "image_generation")
# The function as which vLLM writes a custom tool has one argument.
CUSTOM_PARAMETERS = {
    "type": "object",
    "properties": {"input": {"type": "string", "description": "The freeform text payload for this tool."}},
    "required": ["input"],
    "additionalProperties": False,
}

Message = dict[str, Any]


def as_chat(request: TokenRequest) -> TokenRequest:
    """Return the chat that an engine makes of a body of `/v1/responses`.

    Raises:
        TokensUnknown: Only the engine can read the body.
    """
    for name in ("previous_input_messages", "prompt"):
        if request.has(name):
            raise _left(name)
    if "truncation" in request.fields and request.value("truncation") != "disabled":
        raise _left("truncation")
    messages: list[Message] = []
    instructions = request.value("instructions")
    if instructions:
        messages.append({"role": "system", "content": _string(instructions, "instructions")})
    messages += _messages(request.value("input"))
    # vLLM encodes these prompts, unlike chats, with the tokenizer's special tokens.
    fields: dict[str, Any] = {"messages": messages, "add_special_tokens": True}
    if request.has("tools") and (tools := _tools(request.value("tools"))):
        fields["tools"] = tools
    if request.value("tool_choice") == "none":
        fields["tool_choice"] = "none"
    if request.has("chat_template_kwargs"):
        fields["chat_template_kwargs"] = request.fields["chat_template_kwargs"]
    reasoning = request.value("reasoning")
    if isinstance(reasoning, dict) and reasoning.get("effort") is not None:
        fields["reasoning_effort"] = reasoning["effort"]
    return TokenRequest("chat", {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in fields.items()})


def _messages(items: Any) -> list[Message]:
    """Return the chat's messages for the input."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise _left("input that is neither a text nor a list of items")
    if items and items[-1].get("status") in UNFINISHED and items[-1].get("type", "message") in ("message", "reasoning"):
        raise _left("input that ends with an unfinished item")
    messages: list[Message] = []
    for item in items:
        kind = item.get("type", "message")
        if kind == "message" and item.get("role") != "assistant":
            messages.append(_message(item))
        elif kind == "message":
            _extend(messages, "content", _assistant_text(item.get("content")))
        elif kind == "reasoning":
            _extend(messages, "reasoning", _reasoning(item))
        elif kind in ("function_call", "custom_tool_call"):
            _add_call(messages, _call(item))
        elif kind in ("function_call_output", "custom_tool_call_output"):
            messages.append(_output(item))
        else:
            raise _left(f"an item of the type {kind!r}")
    return messages


def _extend(messages: list[Message], name: str, text: str) -> None:
    """Add the text to the assistant's last message if that has no such text yet, else as a message of its own."""
    if messages and messages[-1]["role"] == "assistant" and name not in messages[-1]:
        messages[-1][name] = text
    else:
        messages.append({"role": "assistant", name: text})


def _add_call(messages: list[Message], call: Message) -> None:
    """Add a tool call to the assistant's last message, or as a message of its own after a message of another role."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant"})
    messages[-1].setdefault("tool_calls", []).append(call)


def _message(item: Message) -> Message:
    """Return the message of a user, a developer or the system."""
    role = item.get("role")
    if role not in ROLES:
        raise _left(f"the role {role!r}")
    if further := item.keys() - MESSAGE_KEYS:
        raise _left(f"a message's {', '.join(sorted(further))}")
    return {"role": role, "content": _content(item.get("content"), "a message")}


def _content(content: Any, owner: str) -> str | list[Message]:
    """Return a text, or its parts as those of a chat."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _left(f"{owner} whose content is neither a text nor parts")
    parts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in RESPONSE_MEDIA:
            raise TokensUnknown(
                "media", f"{owner} has a part of the type {kind!r}, which only an engine's render endpoint reads"
            )
        if kind != "input_text" or not part.keys() <= {"type", "text"}:
            raise _left(f"{owner} with a part of the type {kind!r}")
        parts.append({"type": "text", "text": _string(part.get("text"), "a part without its text")})
    return parts


def _assistant_text(content: Any) -> str:
    """Return the text of an assistant's message; of several parts, vLLM reads the first alone."""
    if isinstance(content, str):
        return content
    part = content[0] if isinstance(content, list) and content else None
    if not isinstance(part, dict) or part.get("type") not in ("output_text", "input_text"):
        raise _left("an assistant's message that does not begin with a text")
    return _string(part.get("text"), "a part without its text")


def _reasoning(item: Message) -> str:
    """Return the text of a reasoning item: the first part of its content, or else of its summary."""
    if item.get("encrypted_content"):
        raise _left("encrypted_content")
    parts = item.get("content") or item.get("summary")
    if parts == []:
        return ""
    part = parts[0] if isinstance(parts, list) else None
    return _string(part.get("text") if isinstance(part, dict) else None, "a reasoning item without its text")


def _call(item: Message) -> Message:
    """Return a call of a tool as a chat has it."""
    name = _string(item.get("name"), "a call without its name")
    if item["type"] == "custom_tool_call":
        payload = _string(item.get("input") or "", "a custom tool's input that is no text")
        arguments = json.dumps({"input": payload}, ensure_ascii=False)
    else:
        arguments = _string(item.get("arguments"), "a call without its arguments")
        if item.get("namespace"):
            name = _in_namespace(item["namespace"], name)
    return {
        "id": _string(item.get("call_id"), "a call without its call_id"),
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _output(item: Message) -> Message:
    """Return a tool's output as the tool message of a chat."""
    call_id = _string(item.get("call_id"), "a tool's output without its call_id")
    return {"role": "tool", "tool_call_id": call_id, "content": _content(item.get("output"), "a tool's output")}


def _tools(tools: Any) -> list[Message]:
    """Return the tools as those of a chat, without those that vLLM leaves out."""
    if not isinstance(tools, list):
        raise _left("tools that are no list")
    definitions = []
    for tool in tools:
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind == "function":
            definitions.append(_function(tool, tool.get("name")))
        elif kind == "custom":
            definitions.append(_function(tool | {"parameters": CUSTOM_PARAMETERS, "strict": None}, tool.get("name")))
        elif kind == "namespace":
            definitions += _namespace(tool)
        elif kind not in UNWRITTEN_TOOLS:
            raise _left(f"a tool of the type {kind!r}")
    return definitions


def _namespace(namespace: Message) -> list[Message]:
    """Return the functions of a namespace."""
    tools = namespace.get("tools")
    if not isinstance(tools, list) or not all(
        isinstance(tool, dict) and tool.get("type") == "function" for tool in tools
    ):
        raise _left("a namespace with tools that are no functions")
    return [_function(tool, _in_namespace(namespace.get("name"), tool.get("name"))) for tool in tools]


def _in_namespace(namespace: Any, name: Any) -> str:
    """Return the name that a function of a namespace has in the prompt."""
    return f"{_string(namespace, 'a namespace without its name')}__{_string(name, 'a tool without its name')}"


def _function(tool: Message, name: Any) -> Message:
    """Return a function as a tool of a chat."""
    description, parameters, strict = tool.get("description"), tool.get("parameters"), tool.get("strict")
    if not isinstance(description, str | None) or not isinstance(parameters, dict | None):
        raise _left("a tool of another form")
    if tool.get("defer_loading") is not None:
        raise _left("a tool's defer_loading")
    function = {
        "name": _string(name, "a tool without its name"),
        "description": description,
        "parameters": parameters,
    }
    if strict is not None:
        function["strict"] = strict
    return {"type": "function", "function": function}


def _string(text: Any, part: str) -> str:
    """Return the text, or raise TokensUnknown if it is none."""
    if not isinstance(text, str):
        raise _left(part)
    return text


def _left(part: str) -> TokensUnknown:
    """Return the error for a part of the body that only the engine's render endpoint reads."""
    return TokensUnknown("unsupported", f"{part} is read by the engine's render endpoint alone")
