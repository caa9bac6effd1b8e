# SPDX-License-Identifier: Apache-2.0
"""What a replay endpoint owes after it did not answer: its whole ring, read when it answers again. Pure."""

from __future__ import annotations

from kvrouter.events.vllm.replay_request import Purpose, Request

# Answers between two readings of the whole ring: an endpoint that never sends all of it must not void the index at
# every check.
ANSWERS_BETWEEN_READINGS = 3


class ReplayDebt:
    """Whether batches were given up for want of an answer, and after how many answers the ring is read."""

    def __init__(self, *, owed: bool) -> None:
        self.owed = owed
        self._answers_to_wait = 0

    def is_due(self, request: Request) -> bool:
        """The endpoint answers `request`: whether the whole ring must be requested in its place."""
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
        """The next answer counts at once."""
        self._answers_to_wait = 0
