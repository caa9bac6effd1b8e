# SPDX-License-Identifier: Apache-2.0
"""Small prompts by which a way to find tokens is compared with the engine itself. Pure.

They contain everything in which tokenizers and templates are known to differ: other scripts, spaces at either end,
several parts in one message, a call of a tool and its result, a message that is to be continued. A way is trusted with
a feature if it makes exactly the tokens of that feature's probe that the engine makes.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvrouter.router.model.engines.reading import Reading
from kvrouter.router.route.tokens.token_request import Feature, Kind, TokenRequest

USER = {"role": "user", "content": " What is the capital of  France?\n"}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL: dict[str, Any] = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Paris", "days": 2}'},
}

_CHAT: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "You are brief."},
        USER,
        {"role": "assistant", "content": "Paris – Größe: 105 km². "},
        {"role": "user", "content": [{"type": "text", "text": " And of Japan? "}, {"type": "text", "text": "日本🙂"}]},
    ]
}
_TOOLS: dict[str, Any] = {
    "messages": [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": '{"celsius": 21}'},
    ],
    "tools": [TOOL],
    # vLLM accepts "auto" only with a parser of tool calls.
    "tool_choice": "none",
}
_CONTINUED: dict[str, Any] = {
    "messages": [USER, {"role": "assistant", "content": "It is Par"}],
    "continue_final_message": True,
    "add_generation_prompt": False,
}
_TEXT: dict[str, Any] = {"prompt": " Größe  naïve\n\n日本語 🙂 = 3.14159"}


def _probe(kind: Kind, body: dict[str, Any]) -> TokenRequest:
    """Return a probe with these fields."""
    return TokenRequest(kind, {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in body.items()})


PROBES: dict[Feature, TokenRequest] = {
    "chat": _probe("chat", _CHAT),
    "tools": _probe("chat", _TOOLS),
    "continued": _probe("chat", _CONTINUED),
    "text": _probe("text", _TEXT),
}
_SYSTEM = [{"type": "text", "text": "You are brief. "}, {"type": "text", "text": "Größe: 日本."}]
_MESSAGES: dict[str, Any] = {
    "system": _SYSTEM,
    "messages": [
        USER,
        {"role": "assistant", "content": [{"type": "text", "text": "Paris – 105 km². "}]},
        {"role": "user", "content": [{"type": "text", "text": " And of Japan? "}, {"type": "text", "text": "日本🙂"}]},
    ],
}
_MESSAGE_TOOLS: dict[str, Any] = {
    "messages": [
        USER,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I should look it up.", "signature": "s"},
                {"type": "text", "text": "One moment."},
                {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "Córdoba", "days": 2}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "call_1",
                    "content": [{"type": "text", "text": '{"celsius": 21}'}, {"type": "text", "text": "sunny"}],
                },
            ],
        },
    ],
    "tools": [
        {
            "name": "weather",
            "description": "The weather in a city",
            "input_schema": {"properties": {"city": {"type": "string"}}, "required": ["city"]},
        }
    ],
    # The engine accepts "auto" only with a parser of tool calls, as in chats.
    "tool_choice": {"type": "none"},
}
_INLINE_SYSTEM: dict[str, Any] = {
    "system": "You are brief.",
    "messages": [
        USER,
        {"role": "assistant", "content": "Paris"},
        {"role": "system", "content": [{"type": "text", "text": "Mind the date."}]},
        {"role": "user", "content": "日本?"},
    ],
}

# Thinking in a turn that is over, and in one that goes on.
_MESSAGE_THINKING: dict[str, Any] = {
    "messages": [
        USER,
        {
            "role": "assistant",
            "content": [{"type": "thinking", "thinking": "Easy.", "signature": "s"}, {"type": "text", "text": "Paris"}],
        },
        *_MESSAGE_TOOLS["messages"],
    ],
    "tools": _MESSAGE_TOOLS["tools"],
}

# Probes for messages of Anthropic's API, which engines turn into chats.
MESSAGE_PROBES: dict[Feature, TokenRequest] = {
    "messages": _probe("messages", _MESSAGES),
    "message tools": _probe("messages", _MESSAGE_TOOLS),
    "inline system": _probe("messages", _INLINE_SYSTEM),
}
# Further probes for engines that take thinking.
THINKING_PROBES: dict[Feature, TokenRequest] = {
    "message thinking": _probe("messages", _MESSAGE_THINKING),
    "thinking on": _probe("messages", _MESSAGES | {"thinking": {"type": "adaptive"}}),
    "thinking off": _probe("messages", _MESSAGES | {"thinking": {"type": "disabled"}}),
    "message effort": _probe("messages", _MESSAGES | {"output_config": {"effort": "low"}}),
}
# The probe for a template that accepts no system message, or no message of several parts.
PLAIN_CHAT = _probe(
    "chat", {"messages": [USER, {"role": "assistant", "content": "Paris"}, {"role": "user", "content": "日本?"}]}
)

# Probes for Responses, which vLLM turns into chats. The first shows whether items are merged as from 0.25 on.
_ANSWERED: list[dict[str, Any]] = [
    USER,
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "A capital."}]},
    {"role": "assistant", "content": "Paris – 105 km². "},
]
_RESPONSES: dict[str, Any] = {
    "instructions": "You are brief. Größe: 日本.",
    "input": [
        *_ANSWERED,
        {
            "role": "user",
            "content": [{"type": "input_text", "text": " And of Japan? "}, {"type": "input_text", "text": "日本"}],
        },
    ],
}
_FUNCTION: dict[str, Any] = {"type": "function"} | TOOL["function"]
_RESPONSE_CALL: dict[str, Any] = {"type": "function_call", "call_id": "call_1"} | CALL["function"]
_RESPONSE_CALLS: dict[str, Any] = {
    "input": [
        *_ANSWERED,
        _RESPONSE_CALL,
        _RESPONSE_CALL | {"call_id": "call_2"},
        {"type": "function_call_output", "call_id": "call_1", "output": '{"celsius": 21}'},
        {
            "type": "function_call_output",
            "call_id": "call_2",
            "output": [{"type": "input_text", "text": " 21 "}, {"type": "input_text", "text": "sunny"}],
        },
    ],
}
_RESPONSE_TOOL_KINDS: dict[str, Any] = {
    "input": [USER],
    "tools": [
        {"type": "custom", "name": "patch", "description": "Change a file"},
        {"type": "namespace", "name": "maps", "description": "Maps", "tools": [_FUNCTION]},
        {"type": "web_search_preview"},
    ],
}
_RESPONSE_CALL_KINDS: dict[str, Any] = {
    "input": [
        USER,
        {"type": "custom_tool_call", "call_id": "call_1", "name": "patch", "input": '"Größe"\n'},
        {"type": "custom_tool_call_output", "call_id": "call_1", "output": "done"},
        _RESPONSE_CALL | {"namespace": "maps"},
        {"type": "function_call_output", "call_id": "call_1", "output": "21"},
    ],
}
RESPONSE_PROBES: dict[Feature, TokenRequest] = {
    "responses": _probe("responses", _RESPONSES),
    "response tools": _probe("responses", {"input": [USER], "tools": [_FUNCTION]}),
    "unused response tools": _probe("responses", {"input": [USER], "tools": [_FUNCTION], "tool_choice": "none"}),
    "response tool kinds": _probe("responses", _RESPONSE_TOOL_KINDS),
    "response calls": _probe("responses", _RESPONSE_CALLS),
    "response call kinds": _probe("responses", _RESPONSE_CALL_KINDS),
}
# The probe for a template that accepts no system message, or no message of several parts.
PLAIN_RESPONSES = _probe("responses", {"input": [*_ANSWERED, {"role": "user", "content": "日本?"}]})
# The probes that replace a probe which an engine's template refuses.
PLAIN_PROBES: dict[Feature, TokenRequest] = {"chat": PLAIN_CHAT, "responses": PLAIN_RESPONSES}


def chat_probes(reading: Reading) -> dict[Feature, TokenRequest]:
    """Return the probes of chats and texts for an engine that reads in this way."""
    if not reading.drops_unused_tools:
        return dict(PROBES)
    # With the choice "none", the prompt would lack the tools that the probe is to show.
    return PROBES | {"tools": PROBES["tools"].with_fields(tool_choice=None)}


def message_probes(reading: Reading) -> dict[Feature, TokenRequest]:
    """Return the probes of messages for an engine that reads in this way."""
    if not reading.takes_thinking:
        return dict(MESSAGE_PROBES)
    turns = _MESSAGE_TOOLS["messages"]
    answer = turns[1] | {"content": [block for block in turns[1]["content"] if block["type"] != "thinking"]}
    tools = MESSAGE_PROBES["message tools"].with_fields(messages=[turns[0], answer, turns[2]], tool_choice=None)
    return MESSAGE_PROBES | {"message tools": tools} | THINKING_PROBES


# The engine's own result for a probe: the ids, or their number if it does not report them, or its refusal.
Truth = NDArray[np.int64] | int | str


def running(probe: TokenRequest) -> bytes:
    """Return the body with which an engine runs the probe for one token and returns the prompt's ids."""
    if probe.kind == "responses":
        further = {"max_output_tokens": 1, "temperature": 0, "store": False, "enable_response_messages": True}
        return msgspec.json.encode(probe.fields | further)
    return msgspec.json.encode(probe.fields | {"max_tokens": 1, "temperature": 0, "return_token_ids": True})


def agrees(truth: Truth, ids: NDArray[np.int64]) -> bool:
    """Return whether the ids equal the engine's, as far as it reports them."""
    if isinstance(truth, str):
        return False
    return len(ids) == truth if isinstance(truth, int) else np.array_equal(truth, ids)


def difference(truth: Truth, ids: NDArray[np.int64]) -> str:
    """Return a description of how the ids differ from the engine's."""
    if isinstance(truth, str):
        return f"the engine refuses it: {truth}"
    if isinstance(truth, int):
        return f"{len(ids)} tokens where the engine has {truth}"
    common = min(len(truth), len(ids))
    differences = np.flatnonzero(truth[:common] != ids[:common])
    first = int(differences[0]) if len(differences) else common
    return f"{len(ids)} tokens where the engine has {len(truth)}, equal up to token {first}"
