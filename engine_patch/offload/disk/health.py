# SPDX-License-Identifier: Apache-2.0
"""Whether the disk may be used: what errors and a full disk lead to, and when it is tried again. Pure but for the
clock.

FULL: the records there can be read, and written again in place of others, but no new room is taken; where even that
found no space, nothing is written. OFF: after errors in a row nothing is read or written, and what the disk holds is
withdrawn, because nobody can count on it. In both states the disk is tried again after a while, twice as long after
each failure.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from enum import Enum, StrEnum

# One bad sector is one error; three in a row without a success between are a failing disk.
OFF_AFTER_ERRORS = 3
RETRY_S = 30.0
# Half an hour: after longer, it is unlikely to recover by itself.
MAX_RETRY_S = 1_800.0


class State(StrEnum):
    NEW = "new"
    ON = "on"
    FULL = "full"
    OFF = "off"
    CLOSED = "closed"


class Permit(Enum):
    """NONE: no write; REUSE: in place of what is there; GROW: also into new space."""

    NONE = 0
    REUSE = 1
    GROW = 2


class Health:
    """One folder's. retry_s: from a failure to the next trial. Clock: seconds, monotonic."""

    def __init__(self, where: str, log: logging.Logger, clock: Callable[[], float], retry_s: float = RETRY_S) -> None:
        self.state = State.NEW
        # For people: why it is not ON.
        self.reason = ""
        self._where = where
        self._log = log
        self._clock = clock
        self._first_retry_s = retry_s
        self._retry_s = retry_s
        self._trial_at_s = 0.0
        self._errors = 0
        # FULL, and even records that are there could not be written again.
        self._no_writes = False

    def become(self, state: State, reason: str = "") -> None:
        """Said once a change."""
        if state is not self.state:
            level = logging.INFO if state in (State.ON, State.CLOSED) else logging.WARNING
            self._log.log(level, "kvrouter: disk tier %s is %s%s", self._where, state, self._effect(state, reason))
        self.state, self.reason = state, reason

    def _effect(self, state: State, reason: str) -> str:
        """Why, and what that means until when."""
        if state is State.FULL:
            return f" ({reason}): no new room is taken; tried again in {self._retry_s:g} s at the latest"
        if state is State.OFF:
            return f" ({reason}): it is left alone, and what it holds is withdrawn; tried again in {self._retry_s:g} s"
        return ""

    def permit(self) -> Permit:
        """What may be written now. While FULL, now and then GROW: a trial, which the caller should make."""
        if self.state is State.ON:
            return Permit.GROW
        if self.state is not State.FULL:
            return Permit.NONE
        if self.trial_due():
            self._wait()
            return Permit.GROW
        return Permit.NONE if self._no_writes else Permit.REUSE

    def trial_due(self) -> bool:
        return self._clock() >= self._trial_at_s

    def read_well(self) -> None:
        """A record was read."""
        self._errors = 0

    def wrote_well(self, grew: bool) -> None:
        """A record was written; grew: and took new space."""
        self._errors = 0
        if self.state is State.FULL and (grew or self._no_writes):
            self._recovered()

    def no_space(self, grows: bool, reason: str) -> None:
        """A write failed for want of space. grows: it presumably needed new space."""
        if self.state is State.ON:
            self._wait()
        if self.state in (State.ON, State.FULL):
            self._no_writes = self._no_writes or not grows
            self.become(State.FULL, reason)

    def failed(self, reason: str) -> bool:
        """A read or write failed otherwise. Whether that was one too many: the state is OFF now."""
        self._errors += 1
        if self._errors < OFF_AFTER_ERRORS or self.state not in (State.ON, State.FULL):
            return False
        self.turn_off(f"{self._errors} errors in a row, the last: {reason}")
        return True

    def turn_off(self, reason: str) -> None:
        self.become(State.OFF, reason)
        self._wait()

    def trial_ended(self, reason: str | None) -> None:
        """The result of a trial while OFF: None, or the error."""
        if reason is None:
            self._recovered()
        else:
            self.turn_off(reason)

    def _recovered(self) -> None:
        self._errors = 0
        self._no_writes = False
        self._retry_s = self._first_retry_s
        self.become(State.ON)

    def _wait(self) -> None:
        self._trial_at_s = self._clock() + self._retry_s
        self._retry_s = min(2 * self._retry_s, MAX_RETRY_S)
