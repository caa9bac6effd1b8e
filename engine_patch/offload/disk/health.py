# SPDX-License-Identifier: Apache-2.0
"""Decides whether the disk may be used after errors or when it is full, and when it is tried again.

Pure except for the clock. FULL: the records on disk can be read, and replaced by others, but no new space is taken; if
even a replacement found no space, nothing is written. OFF: after errors in a row nothing is read or written, and the
keys on disk are withdrawn, because nobody can rely on them. In both states the disk is tried again after a while, twice
as long after each failure.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from enum import Enum, StrEnum

# One bad sector is one error; three errors in a row without a success between them are a failing disk.
OFF_AFTER_ERRORS = 3
RETRY_S = 30.0
# Half an hour; after a longer failure the disk is unlikely to recover by itself.
MAX_RETRY_S = 1_800.0


class State(StrEnum):
    """The state of a disk tier."""

    NEW = "new"
    ON = "on"
    FULL = "full"
    OFF = "off"
    CLOSED = "closed"


class Permit(Enum):
    """The kind of write that is permitted."""

    # No write.
    NONE = 0
    # A write in place of an existing record.
    REUSE = 1
    # Also a write into new space.
    GROW = 2


class Health:
    """The state of one folder and the time of its next trial."""

    def __init__(self, where: str, log: logging.Logger, clock: Callable[[], float], retry_s: float = RETRY_S) -> None:
        """Start in the state NEW.

        Args:
            where: The folder, for the log.
            log: Receives each change of the state.
            clock: Returns monotonic seconds.
            retry_s: Seconds from the first failure to the next trial.
        """
        self.state = State.NEW
        # The reason why the state is not ON, for people.
        self.reason = ""
        self._where = where
        self._log = log
        self._clock = clock
        self._first_retry_s = retry_s
        self._retry_s = retry_s
        self._trial_at_s = 0.0
        self._errors = 0
        # Whether the state is FULL and even existing records could not be written again.
        self._no_writes = False

    def become(self, state: State, reason: str = "") -> None:
        """Enter a state; each change is logged once."""
        if state is not self.state:
            level = logging.INFO if state in (State.ON, State.CLOSED) else logging.WARNING
            self._log.log(level, "kvrouter: disk tier %s is %s%s", self._where, state, self._effect(state, reason))
        self.state, self.reason = state, reason

    def _effect(self, state: State, reason: str) -> str:
        """Return the reason of a state and its effect, for the log."""
        if state is State.FULL:
            return f" ({reason}): no new room is taken; tried again in {self._retry_s:g} s at the latest"
        if state is State.OFF:
            return f" ({reason}): it is left alone, and what it holds is withdrawn; tried again in {self._retry_s:g} s"
        return ""

    def permit(self) -> Permit:
        """Return the kind of write that is permitted now.

        While FULL, the result is GROW from time to time: a trial, which the caller should make.
        """
        if self.state is State.ON:
            return Permit.GROW
        if self.state is not State.FULL:
            return Permit.NONE
        if self.trial_due():
            self._wait()
            return Permit.GROW
        return Permit.NONE if self._no_writes else Permit.REUSE

    def trial_due(self) -> bool:
        """Return whether it is time for the next trial."""
        return self._clock() >= self._trial_at_s

    def read_well(self) -> None:
        """Note that a record was read."""
        self._errors = 0

    def wrote_well(self, took_space: bool) -> None:
        """Note that a record was written; `took_space` says whether it took new space."""
        self._errors = 0
        if self.state is State.FULL and (took_space or self._no_writes):
            self._recovered()

    def no_space(self, grows: bool, reason: str) -> None:
        """Note that a write failed for lack of space; `grows` says whether it presumably needed new space."""
        was_on = self.state is State.ON
        if was_on or self.state is State.FULL:
            self._no_writes = self._no_writes or not grows
            self.become(State.FULL, reason)
        if was_on:
            # The log names the time until the trial that is set now, which doubles the one after.
            self._wait()

    def failed(self, reason: str) -> bool:
        """Note that a read or write failed for another reason, and return whether that turned the state OFF."""
        self._errors += 1
        if self._errors < OFF_AFTER_ERRORS or self.state not in (State.ON, State.FULL):
            return False
        self.turn_off(f"{self._errors} errors in a row, the last: {reason}")
        return True

    def turn_off(self, reason: str) -> None:
        """Enter the state OFF, and set the time of the next trial."""
        self.become(State.OFF, reason)
        self._wait()

    def trial_ended(self, reason: str | None) -> None:
        """Note the result of a trial while OFF: None, or the error."""
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
