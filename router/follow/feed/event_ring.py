# SPDX-License-Identifier: Apache-2.0
"""The last events of this process, for clients that reconnect. Pure.

The ring is bounded by an estimate of its bytes, and drops the oldest events first. Numbers rise by one, so the last
number that a client received shows which events it has missed.
"""

from __future__ import annotations

from collections import deque

from kvrouter.contract.fleet_event import FleetEvent
from kvrouter.router.follow.feed.fleet_event import NumberedEvent
from kvrouter.router.index.ingest.net_changes import Hashes

# Holds some seconds of events of a fleet that stores 50,000 blocks a second, and hours of a quiet fleet's. A client that
# lost its connection reconnects within seconds.
RING_BYTES = 4 * 1024**2
# The memory of an event without its hashes, in bytes. Measured: 350 to 450.
EVENT_BYTES = 512


class EventRing:
    """The newest events, in the order of their numbers.

    Invariant: the kept numbers have no gap and end with `number`.
    """

    def __init__(self, max_bytes: int = RING_BYTES) -> None:
        """Begin without events.

        Args:
            max_bytes: The most memory that the kept events take, estimated as EVENT_BYTES and the hashes of each.
        """
        self._max_bytes = max_bytes
        self._events: deque[NumberedEvent] = deque()
        self._bytes = 0
        # The number of the newest event, 0 if there was none.
        self.number = 0

    def add(self, event: FleetEvent, hashes: Hashes | None = None) -> NumberedEvent:
        """Keep the event under the next number, dropping the oldest ones for lack of room, and return it numbered."""
        self.number += 1
        added = NumberedEvent(self.number, event, hashes)
        self._events.append(added)
        self._bytes += _size(added)
        while self._bytes > self._max_bytes:
            self._bytes -= _size(self._events.popleft())
        return added

    def since(self, number: int) -> tuple[list[NumberedEvent], int]:
        """Return the kept events after this number, and how many after it are no longer kept.

        Raises ValueError for a number that no event has had yet.
        """
        if not 0 <= number <= self.number:
            raise ValueError(f"event {number} is not one of the {self.number} so far")
        first = self.number - len(self._events) + 1
        missed = max(0, first - number - 1)
        left = self.number - number - missed
        # Index from the end, because a client that reconnects has missed few events.
        return [self._events[len(self._events) - left + i] for i in range(left)], missed


def _size(numbered: NumberedEvent) -> int:
    return EVENT_BYTES if numbered.hashes is None else EVENT_BYTES + numbered.hashes.nbytes
