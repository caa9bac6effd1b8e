# SPDX-License-Identifier: Apache-2.0
"""Comparisons of registrations: at once where changes are rare, and never for most of the time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

from kvrouter.router.app.core.registration_judge import JUDGE_PAUSE_S, JUDGE_SHARE, RegistrationJudge
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.follow.fleet.worker_registry import WorkerRegistry
from kvrouter.router.model.engines.engine_lists import EngineLists
from kvrouter.router.model.workers.registration import Registration


class Fleet:
    """Registry, lists of the engines, and follower of one worker, on a clock.

    The clock stands still, except that a comparison takes `takes_s` of it.
    """

    def __init__(self, takes_s: float) -> None:
        self.takes_s = takes_s
        self.now_s = 100.0
        self.judged_at_s: list[float] = []
        self.changed: Callable[[WorkerKey | None], None] = lambda worker: None
        self.followers: dict[WorkerKey, Any] = {WorkerKey("m", "w0", 0): self}
        self.sources: dict[str, Any] = {}
        self.served: dict[str, Any] = {}
        self.kinds: dict[str, Any] = {}
        self.refusing: dict[str, int] = {}
        self.state = self.profile = self.patch = self
        self.epoch = None

    def subscribe(self, members: Callable[[WorkerKey | None], None]) -> None:
        self.changed = members

    def registrations(self) -> tuple[Registration, ...]:
        return (Registration(WorkerKey("m", "w0", 0), "tcp://h:1"),)

    def judge(self, **found: object) -> None:
        self.judged_at_s.append(self.now_s)
        self.now_s += self.takes_s


@pytest.mark.parametrize("takes_s", [0.0, 0.001, 0.2])
def test_comparing_takes_a_share_of_the_time_and_no_change_is_forgotten(takes_s: float) -> None:
    async def change_all_the_time(fleet: Fleet) -> None:
        loop = asyncio.get_running_loop()
        timers: list[tuple[float, Callable[[], None]]] = []

        def call_later(delay_s: float, call: Callable[[], None]) -> asyncio.TimerHandle:
            timers.append((fleet.now_s + delay_s, call))
            return asyncio.TimerHandle(0.0, call, (), loop)

        loop.call_later = call_later  # type: ignore[assignment,method-assign]
        judge = RegistrationJudge(cast(WorkerRegistry, fleet), cast(EngineLists, fleet), lambda: fleet.now_s)
        judge.judge()
        for _ in range(20):
            for _ in range(3):
                fleet.changed(None)
            # However many changes came, there is one timer.
            ((due_s, call),) = timers
            timers.clear()
            fleet.now_s = due_s
            call()

    fleet = Fleet(takes_s)
    asyncio.run(change_all_the_time(fleet))
    assert len(fleet.judged_at_s) == 21
    passed_s = fleet.judged_at_s[-1] - fleet.judged_at_s[0]
    assert passed_s >= 20 * JUDGE_PAUSE_S - 1e-6
    assert 20 * takes_s <= passed_s * JUDGE_SHARE + 1e-6
    # A comparison is made at once if none was made for a while.
    assert passed_s <= 20 * max(JUDGE_PAUSE_S + takes_s, takes_s + takes_s / JUDGE_SHARE) + 1e-6
