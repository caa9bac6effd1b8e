# SPDX-License-Identifier: Apache-2.0
"""Remembered prompts: bounded in bytes and in time, and gone with the source of their tokens."""

from __future__ import annotations

import numpy as np

from kvrouter.router.route.tokens.prompt_cache import LIFE_S, OVERHEAD_BYTES, PromptMemory
from kvrouter.router.route.tokens.prompt_tokens import FoundTokens


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def ids(count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.arange(count, dtype=np.int64)


def test_the_least_recently_used_tokens_are_forgotten() -> None:
    room = 3 * (4 * 100 + OVERHEAD_BYTES)
    memory = PromptMemory(Clock(), memory_bytes=room)
    for name in (b"a", b"b", b"c"):
        memory.put(("m", name, ""), FoundTokens(ids(100), "render"))
    assert memory.get(("m", b"a", "")) is not None
    memory.put(("m", b"d", ""), FoundTokens(ids(100), "render"))
    assert [memory.get(("m", name, "")) is not None for name in (b"a", b"b", b"c", b"d")] == [True, False, True, True]
    assert memory.held_bytes == room
    memory.put(("m", b"e", ""), FoundTokens(ids(10_000), "render"))
    assert memory.held_bytes == 0


def test_the_cache_returns_what_was_stored() -> None:
    memory = PromptMemory(Clock())
    memory.put(("m", b"a", ""), FoundTokens(ids(5), "tokenize"))
    memory.put(("m", b"a", ""), FoundTokens(ids(6), "render"))
    remembered = memory.get(("m", b"a", ""))
    assert remembered is not None and (remembered[0].tolist(), remembered[1]) == ([0, 1, 2, 3, 4, 5], "render")
    assert remembered[0].dtype == np.int64
    assert memory.held_bytes == 6 * 4 + OVERHEAD_BYTES
    assert memory.get(("n", b"a", "")) is None


def test_cached_tokens_expire_because_templates_may_write_dates() -> None:
    clock = Clock()
    memory = PromptMemory(clock)
    memory.put(("m", b"a", ""), FoundTokens(ids(5), "render"))
    clock.now_s = LIFE_S
    assert memory.get(("m", b"a", "")) is not None
    clock.now_s = LIFE_S + 0.1
    assert memory.get(("m", b"a", "")) is None
    assert memory.held_bytes == 0


def test_a_models_prompts_go_when_its_engines_change() -> None:
    memory = PromptMemory(Clock())
    memory.put(("m", b"a", ""), FoundTokens(ids(5), "render"))
    memory.put(("n", b"a", ""), FoundTokens(ids(5), "render"))
    memory.forget("m")
    assert memory.get(("m", b"a", "")) is None and memory.get(("n", b"a", "")) is not None
