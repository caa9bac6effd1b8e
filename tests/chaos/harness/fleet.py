# SPDX-License-Identifier: Apache-2.0
"""Many schedules at once in one loop: they wait most of the time."""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Callable, Iterable

from tests.chaos.harness.faults import FAULTS
from tests.chaos.harness.process_schedule import PROCESS_FAULTS, ProcessSchedule
from tests.chaos.harness.schedule import MIXED, Schedule
from tests.chaos.harness.stage import Outcome, Stage

# What a schedule can be about; seeds take them in turn.
KINDS = (*FAULTS, MIXED, *PROCESS_FAULTS)


def schedule(seed: int, kind: str | None = None) -> Stage:
    """The schedule of a seed; kind None: by the seed."""
    kind = kind or KINDS[seed % len(KINDS)]
    return ProcessSchedule(seed, kind) if kind in PROCESS_FAULTS else Schedule(seed, kind)


async def run_all(
    schedules: Iterable[Stage], *, at_once: int, done: Callable[[Outcome], None] = lambda outcome: None
) -> list[Outcome]:
    """Runs them all, `at_once` of them side by side; what one raises is its failure. Cancelled, it ends all of them in
    order."""
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
