# SPDX-License-Identifier: Apache-2.0
"""Many schedules at once in one loop: they wait most of the time."""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Callable, Iterable

from kvrouter.router.warm import warm

from .schedule import Outcome, Schedule


async def run_all(
    schedules: Iterable[Schedule], *, at_once: int, done: Callable[[Outcome], None] = lambda outcome: None
) -> list[Outcome]:
    """Runs them all, `at_once` of them side by side; what one raises is its failure. Cancelled, it ends all of them in order."""
    waiting = list(reversed(list(schedules)))
    outcomes: list[Outcome] = []
    warm()

    async def work() -> None:
        while waiting:
            schedule = waiting.pop()
            begun_s = time.monotonic()
            try:
                outcome = await schedule.run()
            except Exception:
                outcome = schedule.outcome
                outcome.seconds = time.monotonic() - begun_s
                outcome.failures.append(traceback.format_exc())
            outcomes.append(outcome)
            done(outcome)

    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(work())
    return outcomes
