# SPDX-License-Identifier: Apache-2.0
"""When a peer's silence counts. The time is an argument."""

from __future__ import annotations

import math


class Deadline:
    """The time by which something must be heard; never, until `due_s` is set."""

    def __init__(self, grace_s: float) -> None:
        """grace_s: a caller that looks later than this has stalled itself."""
        self.due_s = math.inf
        self._grace_s = grace_s

    def has_passed(self, now_s: float) -> bool:
        """Whether it counts as missed; to be called only when all that has come is read."""
        if now_s < self.due_s:
            return False
        if now_s - self.due_s > self._grace_s:
            # What the peer sent in time may still be in ZMQ's hands.
            self.due_s = now_s + self._grace_s
            return False
        return True
