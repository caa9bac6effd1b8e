# SPDX-License-Identifier: Apache-2.0
"""The debt of a replay endpoint that did not answer: its whole ring, to be read when it answers again. Pure."""

from __future__ import annotations

from kvrouter.events.vllm.replay_request import Purpose, Request

# Answers between two readings of the whole ring. An endpoint that never sends all of the ring must not void the index
# at every check.
ANSWERS_BETWEEN_READINGS = 3


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
