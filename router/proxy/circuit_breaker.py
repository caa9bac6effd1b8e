# SPDX-License-Identifier: Apache-2.0
"""Whether one worker is sent requests now, judged by how the last ones went. Pure: the time is passed in.

Only failures that the worker causes count: failed connections, silence, answers of 5xx. A client's error (4xx) is an
ordinary answer, and a client that hangs up proves nothing about the worker.
"""

from __future__ import annotations

from enum import StrEnum

# One failure may be an accident (an engine that restarts its HTTP server, a request that no engine can answer). After
# five in a row without any answer, the sixth request is better sent elsewhere.
FAILURES_TO_OPEN = 5
# An engine that restarts is away for a minute: the first pauses are short for what mends itself, and the last is short
# enough for one request in half a minute to find it again where no health check does.
PAUSE_FIRST_S = 1.0
PAUSE_LAST_S = 30.0


class BreakerState(StrEnum):
    """closed: requests go there. open: none do. half_open: one does, and decides."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Breaker:
    """One worker's. Who sends a request says `begun`, and then exactly one of `answered`, `failed` and `unknown`.

    failures: in a row. until_s: when it may be tried again, None while it is closed."""

    def __init__(self) -> None:
        self.failures = 0
        self._pause_s = PAUSE_FIRST_S
        self._problem = ""
        self.until_s: float | None = None
        # The health check says so: not tried before it says otherwise.
        self._lost = False
        self._trying = False

    def state(self, now: float) -> BreakerState:
        if self.until_s is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if self._lost or now < self.until_s else BreakerState.HALF_OPEN

    def problem(self, now: float) -> str | None:
        """Why the worker takes no requests now; None if it does."""
        match self.state(now):
            case BreakerState.CLOSED:
                return None
            case BreakerState.HALF_OPEN:
                return f"being tried again with one request, after {self._problem}" if self._trying else None
            case BreakerState.OPEN if self._lost:
                return f"not tried until it answers its health check: {self._problem}"
            case _:
                left_s = (self.until_s or now) - now
                return f"not tried for {left_s:.1f} s more, after {self._problem}"

    def begun(self, now: float) -> None:
        """A request goes there."""
        if self.state(now) is BreakerState.HALF_OPEN:
            self._trying = True

    def answered(self) -> None:
        """It answered, whatever the status below 500."""
        self.failures = 0
        self._trying = False
        if not self._lost:
            self.until_s = None
            self._pause_s = PAUSE_FIRST_S

    def failed(self, problem: str, now: float) -> None:
        """It did not answer, or with 5xx."""
        self.failures += 1
        self._trying = False
        state = self.state(now)
        if state is BreakerState.HALF_OPEN:
            self._pause_s = min(2 * self._pause_s, PAUSE_LAST_S)
        # Requests under way when it opened fail too, and say nothing new.
        elif state is BreakerState.OPEN or self.failures < FAILURES_TO_OPEN:
            return
        self._problem = f"{self.failures} failures in a row, the last: {problem}"
        self.until_s = now + self._pause_s

    def unknown(self) -> None:
        """The request ended for reasons that are not the worker's."""
        self._trying = False

    def lost(self, problem: str, now: float) -> None:
        """The health check no longer gets answers."""
        self._lost = True
        self._problem = problem
        self.until_s = now

    def found(self) -> None:
        """The health check has answers again: one request may try."""
        self._lost = False
