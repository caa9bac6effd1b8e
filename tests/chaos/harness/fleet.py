# SPDX-License-Identifier: Apache-2.0
"""Many schedules that run concurrently in one event loop, as they wait most of the time."""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Callable, Iterable

from tests.chaos.harness.faults import FAULTS
from tests.chaos.harness.process_schedule import PROCESS_FAULTS, ProcessSchedule
from tests.chaos.harness.schedule import MIXED, Schedule
from tests.chaos.harness.stage import Outcome, Stage

# The kinds of schedules; seeds take them in turn.
KINDS = (*FAULTS, MIXED, *PROCESS_FAULTS)


def schedule(seed: int, kind: str | None = None) -> Stage:
    """Return the schedule of a seed; without a kind, the seed determines it."""
    kind = kind or KINDS[seed % len(KINDS)]
    return ProcessSchedule(seed, kind) if kind in PROCESS_FAULTS else Schedule(seed, kind)


async def run_all(
    schedules: Iterable[Stage], *, at_once: int, done: Callable[[Outcome], None] = lambda outcome: None
) -> list[Outcome]:
    """Run all schedules, at most `at_once` of them concurrently, and return their outcomes.

    An exception of a schedule is recorded as its failure. A cancellation ends all schedules in an orderly way.

    Args:
        schedules: The schedules.
        at_once: The number of schedules that run concurrently.
        done: Called with the outcome of each schedule.
    """
    waiting = list(reversed(list(schedules)))
    outcomes: list[Outcome] = []

    async def work() -> None:
        while waiting:
            stage = waiting.pop()
            begun_s = time.monotonic()
            try:
                outcome = await stage.run()
            except Exception:
                outcome = stage.outcome
                outcome.seconds = time.monotonic() - begun_s
                outcome.failures.append(traceback.format_exc())
            outcomes.append(outcome)
            done(outcome)

    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(work())
    return outcomes
