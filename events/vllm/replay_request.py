# SPDX-License-Identifier: Apache-2.0
"""The state of a cursor's replays: the request under way, and the debt of an endpoint that did not answer. Pure."""

from __future__ import annotations

from enum import Enum, auto

import msgspec

# Answers between two readings of the whole ring. An endpoint that never sends all of the ring must not void the index
# at every check.
ANSWERS_BETWEEN_READINGS = 3


class Purpose(Enum):
    """The reason for a replay request."""

    # No batch is known: take the ring from wherever it begins.
    START = auto()
    # A batch is known: find out whether this is still the same life, and which batches were missed.
    PROVE = auto()
    # A live seq was higher than expected.
    FILL = auto()


class Request(msgspec.Struct):
    """One replay request. A new number means a new request, whose answer must not mix with an older one's."""

    number: int
    # The first requested seq.
    start: int
    purpose: Purpose
    # Whether this is a check without a known fault, for which live batches are not held.
    silent: bool = False
    # The seq at which an answer had a hole, from where it was requested again: ZMQ's ROUTER drops silently above its
    # high-water mark.
    again_at: int | None = None
    # Whether the answer's first batch was compared with the last one handed out, or there was none.
    judged: bool = False
    # Whether `ReplayDebt` has counted the answer.
    paid: bool = False
    # New batches in the whole answer, and since it was last requested again.
    batches: int = 0
    progress: int = 0


class ReplayDebt:
    """The debt for batches given up because no answer came, and the answers to await until the ring is read."""

    def __init__(self, *, owed: bool) -> None:
        self.owed = owed
        self._answers_to_wait = 0

    def is_due(self, request: Request) -> bool:
        """Count an answer to `request`. Returns whether the whole ring must be requested instead."""
        if request.purpose is Purpose.START:
            self.owed = False
        if not self.owed or request.paid:
            return False
        request.paid = True
        if self._answers_to_wait:
            self._answers_to_wait -= 1
            return False
        self._answers_to_wait = ANSWERS_BETWEEN_READINGS
        return True

    def stop_waiting(self) -> None:
        """Let the next answer count at once."""
        self._answers_to_wait = 0
