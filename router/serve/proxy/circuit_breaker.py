# SPDX-License-Identifier: Apache-2.0
"""The circuit breaker of a worker: it decides from the last requests whether to send more now.

Pure: the time is passed in.

Only failures that the worker causes count: failed connections, silence, answers of 5xx, answers that break off. A
client's error (4xx) is an ordinary answer, and a client that hangs up proves nothing about the worker.

Requests without an answer and answers that break off are counted separately. A stream lasts for minutes, so the end of
one that began before the failures must not excuse them; and the first byte of an answer does not promise its end.
"""

from __future__ import annotations

from enum import StrEnum

# One failure may be an accident (an engine that restarts its HTTP server, a request that no engine can answer). After
# five in a row without any answer, or without any whole one, the sixth request is better sent elsewhere.
FAILURES_TO_OPEN = 5
# An engine that restarts is away for a minute. The first pauses are short, for failures that mend themselves. The last
# pause is short enough that one request in half a minute finds the engine again where no health check does.
PAUSE_FIRST_S = 1.0
PAUSE_LAST_S = 30.0
# How long a trial request keeps all other requests away. It is judged at its end, but a long answer takes minutes, in
# which an engine that came back would compute nothing else. This is as long as the longest pause.
TRIAL_S = PAUSE_LAST_S


class BreakerState(StrEnum):
    """The state of a breaker."""

    # All requests are sent to the worker.
    CLOSED = "closed"
    # No request is sent to it.
    OPEN = "open"
    # One trial request is sent, and its outcome decides.
    HALF_OPEN = "half_open"


class Breaker:
    """The breaker of one worker.

    Each request is announced by `begun`, then by `answered` if an answer below 500 begins, and at its end by one of
    `ended`, `failed`, `spoiled` and `unknown`. All times are in seconds of one monotonic clock.
    """

    def __init__(self) -> None:
        # Requests in a row without an answer, and answers in a row that began well but were useless.
        self._unanswered = 0
        self._spoiled = 0
        self._pause_s = PAUSE_FIRST_S
        self._problem = ""
        # When the worker may be tried again, or None while the breaker is closed.
        self.until_s: float | None = None
        # Whether the health check gets no answers. The worker is not tried until the health check has answers again.
        self._lost = False
        # The time from which another trial request may be sent, or None if no trial request is under way.
        self._trial_until_s: float | None = None

    def state(self, now: float) -> BreakerState:
        """Return the state at this time."""
        if self.until_s is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if self._lost or now < self.until_s else BreakerState.HALF_OPEN

    def problem(self, now: float) -> str | None:
        """Return why the worker takes no requests now, or None if it does."""
        match self.state(now):
            case BreakerState.CLOSED:
                return None
            case BreakerState.HALF_OPEN:
                tries = self._trial_until_s is not None and now < self._trial_until_s
                return f"being tried again with one request, after {self._problem}" if tries else None
            case BreakerState.OPEN if self._lost:
                return f"not tried until it answers its health check: {self._problem}"
            case _:
                left_s = (self.until_s or now) - now
                return f"not tried for {left_s:.1f} s more, after {self._problem}"

    def begun(self, now: float) -> bool:
        """Note a request to the worker, and return whether it is the trial request."""
        tries = self.state(now) is BreakerState.HALF_OPEN
        if tries:
            self._trial_until_s = now + TRIAL_S
        return tries

    def answered(self) -> None:
        """Note an answer that began with a status below 500."""
        self._unanswered = 0

    def ended(self, *, tried: bool = False, is_client_error: bool = False) -> None:
        """Note that an answer with a status below 500 is complete.

        Args:
            tried: Whether this was the trial request, as `begun` returned.
            is_client_error: Whether the status is a 4xx, for which the engine computed nothing.
        """
        if not is_client_error:
            self._spoiled = 0
        if tried:
            self._trial_until_s = None
            if not self._lost:
                self.until_s = None
                self._pause_s = PAUSE_FIRST_S

    def failed(self, problem: str, now: float, *, tried: bool = False) -> None:
        """Note a request without an answer, or with a 5xx."""
        self._unanswered += 1
        many = "failure" if self._unanswered == 1 else "failures"
        self._judge(f"{self._unanswered} {many} in a row, the last: {problem}", self._unanswered, now, tried)

    def spoiled(self, problem: str, now: float, *, tried: bool = False) -> None:
        """Note an answer that began well, but broke off or lacks the part that it was requested for."""
        self._spoiled += 1
        many = "answer" if self._spoiled == 1 else "answers"
        self._judge(f"{self._spoiled} useless {many} in a row, the last: {problem}", self._spoiled, now, tried)

    def unknown(self, *, tried: bool = False) -> None:
        """Note a request that ended for reasons outside the worker."""
        if tried:
            self._trial_until_s = None

    def lost(self, problem: str, now: float) -> None:
        """Note that the health check no longer gets answers: the breaker stays open."""
        self._lost = True
        self._problem = problem
        self.until_s = now

    def found(self) -> None:
        """Note that the health check has answers again: one request may try."""
        self._lost = False

    def _judge(self, problem: str, in_a_row: int, now: float, tried: bool) -> None:
        """Open the breaker after enough failures in a row, or again after a failed trial request."""
        state = self.state(now)
        if tried:
            self._trial_until_s = None
        if state is BreakerState.CLOSED:
            if in_a_row < FAILURES_TO_OPEN:
                return
        elif state is BreakerState.HALF_OPEN and tried:
            self._pause_s = min(2 * self._pause_s, PAUSE_LAST_S)
        else:
            # Requests that were under way when the breaker opened fail too, and show nothing new.
            return
        self._problem = problem
        self.until_s = now + self._pause_s
