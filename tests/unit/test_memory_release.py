# SPDX-License-Identifier: Apache-2.0
"""When memory is given back to the system, and that it is."""

from __future__ import annotations

import asyncio
import os

import pytest

from kvrouter.router.server import memory_release
from kvrouter.router.server.memory_release import (
    MIN_RISE_BYTES,
    STANDS_BYTES,
    ReleaseRule,
    release_memory,
    resident_bytes,
    trim_function,
)

MIB = 1024**2


def test_a_release_is_due_when_memory_rose_and_rises_no_more() -> None:
    rule = ReleaseRule()
    looks = [100 * MIB, 120 * MIB, 140 * MIB, 140 * MIB + STANDS_BYTES - 1]
    assert [rule.is_due(one) for one in looks] == [False, False, False, True]


def test_a_release_that_gave_nothing_back_is_not_repeated() -> None:
    rule = ReleaseRule()
    rule.is_due(100 * MIB)
    assert not rule.is_due(140 * MIB) and rule.is_due(140 * MIB)
    rule.begin(140 * MIB)
    assert not any(rule.is_due(140 * MIB + MIN_RISE_BYTES - 1) for _ in range(3))


def test_a_fall_counts_for_the_next_rise() -> None:
    rule = ReleaseRule()
    for one in (140, 100, 117):
        assert not rule.is_due(one * MIB)
    assert rule.is_due(117 * MIB)


def test_a_large_process_needs_a_larger_rise() -> None:
    rule = ReleaseRule()
    for one in (1_000, 1_090, 1_090, 1_101):
        assert not rule.is_due(one * MIB)
    assert rule.is_due(1_101 * MIB)


def test_what_malloc_keeps_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    trim = trim_function()
    if trim is None:
        pytest.skip("needs glibc and /proc")
    monkeypatch.setattr(memory_release, "LOOK_S", 0.05)

    async def check() -> None:
        task = asyncio.create_task(release_memory(trim))
        await asyncio.sleep(0.2)
        before_bytes = resident_bytes()
        # Larger than what Python has its own places for; with some kept all over, malloc gives nothing back by itself.
        pieces = [os.urandom(3_000) for _ in range(20_000)]
        kept = pieces[::50]
        del pieces
        assert resident_bytes() - before_bytes > 40 * MIB
        async with asyncio.timeout(20):
            while resident_bytes() - before_bytes > 15 * MIB:
                await asyncio.sleep(0.05)
        task.cancel()
        assert len(kept) == 400

    asyncio.run(check())
