# SPDX-License-Identifier: Apache-2.0
"""Pauses that end at the ticks of a process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from weakref import WeakKeyDictionary

import pytest

from kvrouter.router.base.common import ticks
from kvrouter.router.base.common.ticks import TICK_S


class Loop:
    """A loop of which only the clock is used."""

    def __init__(self) -> None:
        self.now_s = 1_000.013

    def time(self) -> float:
        return self.now_s


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[Loop]:
    made = Loop()
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: made)
    monkeypatch.setattr(ticks, "_first_ticks", WeakKeyDictionary())
    yield made


def test_without_a_beginning_a_pause_has_its_whole_length(loop: Loop) -> None:
    assert [ticks.pause_s(period_s) for period_s in (0.0, 0.01, 0.25, 7.3)] == [0.0, 0.01, 0.25, 7.3]


def test_pauses_end_at_ticks_and_are_at_most_a_tick_too_short(loop: Loop) -> None:
    ticks.begin(loop)  # type: ignore[arg-type]
    first_s = loop.now_s
    for delay_s in (0.0, 0.001, 0.02, 0.049, 0.31, 12.3456):
        loop.now_s = first_s + delay_s
        for period_s in (TICK_S, 0.12, 0.15, 0.25, 1.0, 4.97):
            pause_s = ticks.pause_s(period_s)
            passed = (delay_s + pause_s) / TICK_S
            assert passed == pytest.approx(round(passed), abs=1e-6)
            assert period_s - TICK_S - 1e-6 < pause_s < period_s + 0.1 * TICK_S + 1e-6
    assert ticks.pause_s(0.01) == 0.01


def test_pauses_that_follow_one_another_have_their_whole_length_though_timers_are_a_little_early(loop: Loop) -> None:
    ticks.begin(loop)  # type: ignore[arg-type]
    first_s = loop.now_s
    loop.now_s += 0.021
    loop.now_s += ticks.pause_s(0.25)
    for number, off_s in enumerate((0.0, -0.001, 0.004, 0.04), start=1):
        loop.now_s += off_s
        loop.now_s += ticks.pause_s(0.25)
        assert loop.now_s == pytest.approx(first_s + 0.25 * (number + 1))


def test_tasks_with_different_periods_wake_at_the_same_time(loop: Loop) -> None:
    ticks.begin(loop)  # type: ignore[arg-type]
    loop.now_s += 0.03
    early_s = loop.now_s + ticks.pause_s(0.25)
    loop.now_s += 0.015
    assert loop.now_s + ticks.pause_s(0.25) == pytest.approx(early_s)
