# SPDX-License-Identifier: Apache-2.0
"""Random chats and completions as clients send them, with every kind of field that affects the prompt's tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from random import Random
from typing import Any

WORDS = (
    *("the", "router", "sends", "weather", "Paris", "engine", "blocks", "naïve", "Größe", "cache", "12", "3.5"),
    *(
        "Привет",
        "мир",
        "你好",
        "世界",
        "こんにちは",
        "🙂",
        "🚀",
        "e\u0301",
        "\u200b",
        "a\u00a0b",
        "İ",
        "ﬁ",
        "\t",
        "<b>",
        "&amp;",
    ),
    *(
        '{"a": [1, 2]}',
        "def f(x):",
        "return x",
        "\n\n",
        "  ",
        "...",
        "?!",
        "http://x.y/z?q=1",
        "<|im_start|>",
        "</think>",
    ),
)
TOOLS: tuple[dict[str, Any], ...] = (
    {
        "type": "function",
        "function": {"name": "weather", "description": "Wetter in Köln", "parameters": {"type": "object"}},
    },
    {
        "type": "function",
        "function": {
            "name": "search",
            "parameters": {
                "properties": {"q": {"type": "string"}, "n": {"default": 3}},
                "type": "object",
                "required": ["q"],
            },
            "strict": True,
        },
    },
    {"type": "function", "function": {"name": "now"}},
)


def text(rng: Random, most_words: int = 30) -> str:
    words = [rng.choice(WORDS) for _ in range(rng.randint(1, most_words))]
    return rng.choice(("", "", " ", "\n")) + rng.choice((" ", " ", "")).join(words) + rng.choice(("", "", " ", "\n"))


def content(rng: Random) -> Any:
    """Return the content of a message: one text, or several parts."""
    if rng.random() < 0.75:
        return text(rng)
    parts: list[Any] = [{"type": "text", "text": text(rng, 8)} for _ in range(rng.randint(1, 3))]
    if rng.random() < 0.2:
        parts.append(text(rng, 4))
    return parts


def _call(rng: Random, number: int) -> dict[str, Any]:
    arguments = rng.choice(('{"city": "Köln", "days": 2}', "{}", "", "[1]", "not json", '{"z": 1, "a": {"c": null}}'))
    return {
        "id": f"call_{number}",
        "type": "function",
        "function": {"name": rng.choice(("weather", "search")), "arguments": arguments},
    }


def chat(rng: Random) -> dict[str, Any]:
    """Return the body of a chat completion, with only the fields that affect the prompt's tokens."""
    messages: list[dict[str, Any]] = []
    if rng.random() < 0.6:
        messages.append({"role": "system", "content": content(rng)})
    for turn in range(rng.randint(1, 4)):
        messages.append({"role": "user", "content": content(rng)})
        if rng.random() < 0.15:
            messages[-1]["name"] = rng.choice(("anna", "bob"))
        answer: dict[str, Any] = {"role": "assistant", "content": content(rng)}
        if rng.random() < 0.3:
            answer[rng.choice(("reasoning", "reasoning_content"))] = text(rng, 10)
        if rng.random() < 0.3:
            answer["tool_calls"] = [_call(rng, 10 * turn + n) for n in range(rng.randint(1, 2))]
            if rng.random() < 0.5:
                answer["content"] = None
        messages.append(answer)
        for call in answer.get("tool_calls", ()):
            messages.append(
                {"role": "tool", "tool_call_id": call["id"], "content": json.dumps({"ok": rng.randint(0, 9)})}
            )
    body: dict[str, Any] = {"messages": messages}
    ending = rng.random()
    if ending < 0.6:
        messages.append({"role": "user", "content": content(rng)})
    elif ending < 0.8:
        messages.append({"role": "assistant", "content": "It is " + rng.choice(WORDS[:9]) + rng.choice(("", " "))})
        body |= {"continue_final_message": True, "add_generation_prompt": False}
    if rng.random() < 0.35:
        body["tools"] = rng.sample(TOOLS, rng.randint(1, len(TOOLS)))
        if rng.random() < 0.4:
            body["tool_choice"] = "none"
    if rng.random() < 0.1:
        body.setdefault("add_generation_prompt", False)
    if rng.random() < 0.2:
        body["chat_template_kwargs"] = {"enable_thinking": rng.random() < 0.5, "unheard_of": [1]}
    if rng.random() < 0.1:
        body["reasoning_effort"] = rng.choice(("none", "low", "high"))
    if rng.random() < 0.1:
        body["documents"] = [{"title": "t", "text": text(rng, 5)}]
    if rng.random() < 0.1:
        body["add_special_tokens"] = True
    return body


def completion(rng: Random) -> dict[str, Any]:
    """Return the body of a completion of one text."""
    body: dict[str, Any] = {"prompt": text(rng, 60)}
    if rng.random() < 0.3:
        body["add_special_tokens"] = rng.random() < 0.5
    return body


def requests(rng: Random, count: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the path and the body of each request, with about four chats for each completion."""
    for _ in range(count):
        if rng.random() < 0.8:
            yield "/v1/chat/completions", chat(rng)
        else:
            yield "/v1/completions", completion(rng)
