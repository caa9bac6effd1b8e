# SPDX-License-Identifier: Apache-2.0
"""Long-lived tasks, kept running: one that ends by itself is logged, counted, named in /health and started again.

The caller that started a task ends it by cancelling it. A restart calls the coroutine function again and repairs
nothing: the task must repair half-finished work at its own start. Not for tasks that their caller awaits.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeAlias

from kvrouter.router.base.common.escaping import printable
from kvrouter.router.base.common.tally import Counter

log = logging.getLogger(__name__)

# The pause before a restart doubles from the first to the last value and is spread by half, so that a task that fails
# at once neither blocks the loop nor fills the log. A run of STEADY_S resets it to the first value.
RESTART_FIRST_S = 0.1
RESTART_LAST_S = 5.0
STEADY_S = 30.0
# How long after its last failure a task is named in /health: an operator's scrape comes every 15 to 60 s.
RECENT_S = 120.0
# The length to which /health cuts an error's text; the log has all of it.
SHOWN_CHARS = 200

Run: TypeAlias = Callable[[], Coroutine[Any, Any, object]]


class _Task:
    """One task as /health shows it."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.runs = False
        self.failures = 0
        self.failed_s: float | None = None
        self.error = ""

    def problem(self, now: float) -> str | None:
        """Return the sentence that /health shows, or None if the task runs and has not failed recently."""
        if self.failed_s is None or (self.runs and now - self.failed_s > RECENT_S):
            return None
        times = "once" if self.failures == 1 else f"{self.failures} times"
        state = "runs again" if self.runs else "is about to be started again"
        return (
            f"task {self.title} failed {times}, last {now - self.failed_s:.0f} s ago ({self.error}), and {state}: "
            "a bug in the router; its log has the traceback"
        )


class TaskSupervisor:
    """A set of tasks that are kept running until they are cancelled. Belongs to one event loop."""

    def __init__(
        self,
        *,
        clock: Callable[[], float],
        rng: random.Random,
        failures: Counter | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Create a supervisor without tasks.

        Args:
            clock: Returns the current time in seconds.
            rng: Spreads the pauses before restarts.
            failures: Counts failures by the label `task`; None if no metrics are served.
            sleep: Pauses before a restart.
        """
        self._clock = clock
        self._rng = rng
        self._failures = failures
        self._sleep = sleep
        self._tasks: set[_Task] = set()

    def start(self, name: str, run: Run, of: str = "") -> asyncio.Task[None]:
        """Run `run()` forever, restarting it when it ends. The caller cancels the returned task and awaits it.

        Args:
            name: The label of the metric; one of a few values.
            run: The coroutine function.
            of: The object that the task serves, as people know it.
        """
        if self._failures is not None:
            self._failures.labels(name)
        task = _Task(f"{name} of {printable(of)}" if of else name)
        return asyncio.get_running_loop().create_task(self._keep(name, task, run), name=task.title)

    def health(self) -> list[str]:
        """Return a sentence for each task that does not run or failed recently."""
        now = self._clock()
        return sorted(problem for task in self._tasks if (problem := task.problem(now)) is not None)

    async def _keep(self, name: str, task: _Task, run: Run) -> None:
        pause_s = RESTART_FIRST_S
        self._tasks.add(task)
        try:
            while True:
                began_s, task.runs = self._clock(), True
                try:
                    await run()
                    task.error = "it ended without an error"
                    log.error("task ended, and is started again", extra={"task": task.title})
                except asyncio.CancelledError:
                    if _is_cancelled():
                        raise
                    # An awaited future or task was cancelled, not this task itself.
                    task.error = "what it waited for was cancelled"
                    log.exception("task failed, and is started again", extra={"task": task.title})
                except Exception as error:
                    task.error = printable(f"{type(error).__name__}: {error}"[:SHOWN_CHARS])
                    log.exception("task failed, and is started again", extra={"task": task.title})
                task.runs, task.failed_s = False, self._clock()
                task.failures += 1
                if self._failures is not None:
                    self._failures.labels(name).inc()
                if task.failed_s - began_s >= STEADY_S:
                    pause_s = RESTART_FIRST_S
                await self._sleep(pause_s * self._rng.uniform(0.5, 1.0))
                pause_s = min(2 * pause_s, RESTART_LAST_S)
        finally:
            self._tasks.discard(task)


def _is_cancelled() -> bool:
    """Return whether the current task itself is being cancelled.

    This is a function because a local variable in `_keep` would make the task's frame refer to the task, and the cycle
    would keep alive everything that they work with.
    """
    current = asyncio.current_task()
    return current is None or current.cancelling() > 0
