# SPDX-License-Identifier: Apache-2.0
"""What a replay endpoint that did not answer owes: all that it still has, read anew when it does. Pure."""

from __future__ import annotations

from kvrouter.events.vllm.replay_request import Purpose, Request

# Answered requests between two times that all is read anew: an endpoint that answers little and never all must not void
# the index at every check.
ANSWERS_BETWEEN_READINGS = 3


class ReplayDebt:
    """Whether something was given up because the endpoint did not answer, and how soon it is asked for."""

    def __init__(self, *, owed: bool) -> None:
        self.owed = owed
        self._answers_to_wait = 0

    def is_due(self, request: Request) -> bool:
        """The endpoint answers `request`: whether all is to be asked for in its place."""
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
