# SPDX-License-Identifier: Apache-2.0
"""The time at which a peer's silence counts. The current time is an argument."""

from __future__ import annotations

import math


class Deadline:
    """The time by which something must arrive. There is none until `due_s` is set."""

    def __init__(self, grace_s: float) -> None:
        """Create a deadline; a caller that looks more than `grace_s` late has itself stalled."""
        self.due_s = math.inf
        self._grace_s = grace_s

    def has_passed(self, now_s: float) -> bool:
        """Return whether the deadline is missed. Call this only when all messages that arrived have been read."""
        if now_s < self.due_s:
            return False
        if now_s - self.due_s > self._grace_s:
            # Messages that the peer sent in time may still be in ZMQ's queues.
            self.due_s = now_s + self._grace_s
            return False
        return True
