# SPDX-License-Identifier: Apache-2.0
"""Random bodies for OpenAI's `/v1/responses`, in the forms that clients send.

They contain instructions, reasoning, calls of tools with their outputs, and tools of several kinds. Images are left out.
"""

from __future__ import annotations

import random
from typing import Any

from tests.support.anthropic_bodies import text

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def parts(rng: random.Random, kind: str = "input_text") -> list[dict[str, Any]]:
    return [{"type": kind, "text": text(rng)} for _ in range(rng.randint(1, 3))]


def function(rng: random.Random, name: str) -> dict[str, Any]:
    tool = {"type": "function", "name": name, "parameters": rng.choice([SCHEMA, {}, SCHEMA])}
    return tool | rng.choice([{}, {"description": text(rng)}]) | rng.choice([{}, {"strict": rng.random() < 0.5}])


def tools(rng: random.Random, *, kinds: bool) -> list[dict[str, Any]]:
    """Return one or two functions, and with `kinds` perhaps other tools."""
    some = [function(rng, name) for name in ("weather", "search")[: rng.randint(1, 2)]]
    if kinds and rng.random() < 0.5:
        some.append({"type": "custom", "name": "patch"} | rng.choice([{}, {"description": text(rng)}]))
    if kinds and rng.random() < 0.4:
        some.append({"type": "namespace", "name": "maps", "description": "Maps", "tools": [function(rng, "find")]})
    if kinds and rng.random() < 0.4:
        some.insert(0, {"type": rng.choice(["web_search", "web_search_preview"])})
    return some


def response(rng: random.Random, *, kinds: bool = True) -> dict[str, Any]:
    """Return the random body of a request.

    Args:
        rng: The source of randomness.
        kinds: Whether there may be tools that are no functions, and calls of them.
    """
    body: dict[str, Any] = {"input": text(rng) if rng.random() < 0.1 else _items(rng, kinds=kinds)}
    if rng.random() < 0.6:
        body["instructions"] = rng.choice([text(rng), ""])
    if rng.random() < 0.6:
        body["tools"] = tools(rng, kinds=kinds)
        body |= rng.choice([{}, {"tool_choice": rng.choice(["auto", "none"])}, {"parallel_tool_calls": True}])
    body |= rng.choice([{}, {}, {"reasoning": {"effort": rng.choice(["none", "low", "high"]), "summary": "auto"}}])
    body |= rng.choice([{}, {}, {"chat_template_kwargs": {"enable_thinking": False}}])
    body |= rng.choice([{}, {"truncation": "disabled", "metadata": {"user": "u"}, "temperature": 0.5, "top_p": 0.9}])
    return body | rng.choice([{}, {"include": ["reasoning.encrypted_content"], "prompt_cache_key": "k"}])


def malformed(rng: random.Random, body: dict[str, Any]) -> dict[str, Any]:
    """Return the body with one place changed to something that clients should not send."""
    name = rng.choice(list(body))
    return body | {name: _changed(rng, body[name])}


def _changed(rng: random.Random, value: Any) -> Any:
    if isinstance(value, dict) and value and rng.random() < 0.9:
        name = rng.choice(list(value))
        return value | {name: _changed(rng, value[name])}
    if isinstance(value, list) and value and rng.random() < 0.9:
        place = rng.randrange(len(value))
        return [*value[:place], _changed(rng, value[place]), *value[place + 1 :]]
    return rng.choice([None, 3, "x", [], {}, [3], {"type": []}, [None], True])


def _items(rng: random.Random, *, kinds: bool) -> list[dict[str, Any]]:
    items = [_message(rng, rng.choice(["developer", "system"]))] if rng.random() < 0.3 else []
    items.append(_message(rng, "user"))
    for number in range(rng.randrange(4)):
        items += _answer(rng, number, kinds=kinds)
        if rng.random() < 0.8:
            items.append(_message(rng, "user"))
    return items


def _message(rng: random.Random, role: str) -> dict[str, Any]:
    message = {"role": role, "content": rng.choice([text(rng), parts(rng)])}
    return rng.choice([{}, {"type": "message"}]) | message


def _answer(rng: random.Random, number: int, *, kinds: bool) -> list[dict[str, Any]]:
    """Return the items of one answer: reasoning, a text, and calls with their outputs, each of them or not."""
    answer: list[dict[str, Any]] = []
    if rng.random() < 0.5:
        reasoning: dict[str, Any] = {"type": "reasoning", "summary": []}
        if rng.random() < 0.3:
            reasoning["summary"] = [{"type": "summary_text", "text": text(rng)} for _ in range(rng.randint(1, 2))]
        if rng.random() < 0.8:
            reasoning["content"] = parts(rng, "reasoning_text")
        answer.append(reasoning | rng.choice([{}, {"id": f"rs_{number}"}, {"id": f"rs_{number}", "content": None}]))
    if rng.random() < 0.7:
        message: dict[str, Any] = {"type": "message", "role": "assistant", "content": parts(rng, "output_text")}
        message = rng.choice([message, message | {"id": "msg_1", "status": "completed"}])
        answer.append(rng.choice([message, message, {"role": "assistant", "content": text(rng)}]))
    calls = [_call(rng, f"call_{number}_{n}", kinds=kinds) for n in range(rng.choice([0, 0, 1, 2]))]
    answer += calls
    if rng.random() < 0.1:
        rng.shuffle(answer)
    answer += [_output(rng, call) for call in calls]
    return answer


def _call(rng: random.Random, call_id: str, *, kinds: bool) -> dict[str, Any]:
    if kinds and rng.random() < 0.2:
        return {"type": "custom_tool_call", "call_id": call_id, "name": "patch", "input": text(rng)}
    arguments = rng.choice(["{}", '{"city": "Córdoba", "days": 2}', ""])
    call = {"type": "function_call", "call_id": call_id, "name": "weather", "arguments": arguments}
    call |= rng.choice([{}, {"id": f"fc_{call_id}", "status": "completed"}])
    return call | ({"namespace": "maps"} if kinds and rng.random() < 0.2 else {})


def _output(rng: random.Random, call: dict[str, Any]) -> dict[str, Any]:
    output = {
        "type": f"{call['type']}_output",
        "call_id": call["call_id"],
        "output": rng.choice([text(rng), parts(rng)]),
    }
    return output | rng.choice([{}, {"id": f"out_{call['call_id']}", "status": "completed"}])
