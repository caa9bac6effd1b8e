# SPDX-License-Identifier: Apache-2.0
"""Random bodies for Anthropic's `/v1/messages`, in the forms that clients send.

They contain system prompts of several blocks, Claude Code's attribution and reminders among the turns, thinking, and
tools with their results.
"""

from __future__ import annotations

import random
from typing import Any

WORDS = ["the", "cache", " of ", "an", "engine", "日本", "🙂", "Größe", "3.14159", "\n", " ", "", "keeps  two", "{}"]
BILLING = "x-anthropic-billing-header: cc_version=2; cch=1f2e3;"


def text(rng: random.Random) -> str:
    return "".join(rng.choices(WORDS, k=rng.randint(1, 9))) or "x"


def block(rng: random.Random) -> dict[str, Any]:
    text_block = {"type": "text", "text": rng.choice(["", text(rng), text(rng), text(rng)])}
    return text_block | rng.choice([{}, {}, {"cache_control": {"type": "ephemeral"}}])


def blocks(rng: random.Random, most: int = 3) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text(rng)}, *(block(rng) for _ in range(rng.randrange(most)))]


def tool(rng: random.Random, name: str) -> dict[str, Any]:
    schema: dict[str, Any] = {"properties": {"city": {"type": "string"}}, "required": ["city"]}
    definition: dict[str, Any] = {"name": name, "input_schema": rng.choice([schema, {"type": "object"} | schema, {}])}
    return definition | rng.choice([{}, {"description": text(rng)}, {"cache_control": {"type": "ephemeral"}}])


def message(rng: random.Random, *, reminders: bool = True, media: bool = False) -> dict[str, Any]:
    """Return the random body of a request.

    Args:
        rng: The source of randomness.
        reminders: Whether system messages may stand among the turns, as Claude Code sends them.
        media: Whether one user turn has an image.
    """
    body: dict[str, Any] = {"messages": _turns(rng, reminders=reminders), "max_tokens": rng.randint(1, 9)}
    if rng.random() < 0.7:
        system = [{"type": "text", "text": BILLING}] if rng.random() < 0.4 else []
        body["system"] = rng.choice([text(rng), [*system, *blocks(rng)], ""])
    if rng.random() < 0.6:
        body["tools"] = [tool(rng, name) for name in ("weather", "search")[: rng.randint(1, 2)]]
        if rng.random() < 0.5:
            body["tool_choice"] = rng.choice(
                [{"type": "none"}, {"type": "auto"}, {"type": "auto", "disable_parallel_tool_use": True}]
            )
    body |= rng.choice([{}, {}, {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 2048}])
    body |= rng.choice([{}, {}, {"chat_template_kwargs": {"enable_thinking": False}}])
    body |= rng.choice([{}, {"metadata": {"user_id": "u"}, "stop_sequences": ["x"], "temperature": 0.5, "top_k": 3}])
    if media:
        image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
        place = rng.choice([n for n, turn in enumerate(body["messages"]) if turn["role"] == "user"])
        body["messages"][place] = {"role": "user", "content": [*blocks(rng), image]}
    return body


def _turns(rng: random.Random, *, reminders: bool) -> list[dict[str, Any]]:
    turns: list[dict[str, Any]] = [{"role": "user", "content": rng.choice([text(rng), blocks(rng)])}]
    for number in range(rng.randrange(4)):
        answer: list[dict[str, Any]] = blocks(rng)
        if rng.random() < 0.4:
            answer.insert(0, {"type": "thinking", "thinking": text(rng), "signature": "s"})
        if rng.random() < 0.2:
            answer.insert(0, {"type": "redacted_thinking", "data": "aGk="})
        if rng.random() < 0.5:
            calls = [f"call_{number}_{n}" for n in range(rng.randint(1, 2))]
            answer += [
                {
                    "type": "tool_use",
                    "id": name,
                    "name": "weather",
                    "input": rng.choice([{}, {"city": text(rng), "n": 2.5}]),
                }
                for name in calls
            ]
            results = [
                {"type": "tool_result", "tool_use_id": name}
                | rng.choice([{}, {"content": text(rng)}, {"content": blocks(rng)}])
                for name in calls
            ]
            question: Any = results + (blocks(rng) if rng.random() < 0.5 else [])
        else:
            question = rng.choice([text(rng), blocks(rng)])
        turns.append(
            {"role": "assistant", "content": rng.choice([answer, answer, text(rng)]) if question is None else answer}
        )
        if reminders and rng.random() < 0.2:
            turns.append(
                {
                    "role": "system",
                    "content": rng.choice([text(rng), [*blocks(rng), {"type": "text", "text": BILLING}], BILLING]),
                }
            )
        turns.append({"role": "user", "content": question})
    return turns
