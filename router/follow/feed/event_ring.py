# SPDX-License-Identifier: Apache-2.0
"""The last events of this process, for clients that come back. Pure.

Bounded by bytes and by events: the oldest go first. Numbers rise by one, so that a client's last one says what it has
missed.
"""

from __future__ import annotations

from collections import deque

from kvrouter.router.follow.feed.fleet_event import FleetEvent, NumberedEvent
from kvrouter.router.index.ingest.net_changes import Hashes

# Some seconds of a fleet that stores 50,000 blocks a second, hours of a quiet one: a client that comes back after a
# lost connection is there within seconds.
RING_BYTES = 4 * 1024**2
# What an event takes without its hashes: measured 350 to 450.
EVENT_BYTES = 512


class EventRing:
    """max_bytes: an estimate, by EVENT_BYTES and the hashes."""

    def __init__(self, max_bytes: int = RING_BYTES) -> None:
        self._max_bytes = max_bytes
        self._kept: deque[NumberedEvent] = deque()
        self._bytes = 0
        # Of the newest event; 0: there was none.
        self.number = 0

    def add(self, event: FleetEvent, hashes: Hashes | None = None) -> NumberedEvent:
        self.number += 1
        added = NumberedEvent(self.number, event, hashes)
        self._kept.append(added)
        self._bytes += _size(added)
        while self._bytes > self._max_bytes:
            self._bytes -= _size(self._kept.popleft())
        return added

    def since(self, number: int) -> tuple[list[NumberedEvent], int]:
        """The events after this one that are still kept, and how many are not. Raises ValueError for a number that was
        not given out yet."""
        if not 0 <= number <= self.number:
            raise ValueError(f"event {number} is not one of the {self.number} so far")
        first = self.number - len(self._kept) + 1
        missed = max(0, first - number - 1)
        left = self.number - number - missed
        # From the end: who comes back has missed few.
        return [self._kept[len(self._kept) - left + i] for i in range(left)], missed


def _size(one: NumberedEvent) -> int:
    return EVENT_BYTES if one.hashes is None else EVENT_BYTES + one.hashes.nbytes
