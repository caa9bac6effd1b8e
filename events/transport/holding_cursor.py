# SPDX-License-Identifier: Apache-2.0
"""What the cursors of both streams share: items on their way out, and messages held back. Pure."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from kvrouter.events.transport.held_queue import HeldQueue

Item = TypeVar("Item")
Queue = TypeVar("Queue", bound=HeldQueue[Any])


class HoldingCursor(Generic[Item, Queue]):
    """Where a reader is in a stream. Single-threaded; never raises on what the wire brings."""

    def __init__(self, held: Queue) -> None:
        self.items: list[Item] = []
        self._held = held

    @property
    def held(self) -> int:
        """Messages that wait for an answer."""
        return len(self._held)

    @property
    def held_bytes(self) -> int:
        """Payload bytes of those."""
        return self._held.size_bytes

    def take(self) -> list[Item]:
        """The items since the last call, in order."""
        items, self.items = self.items, []
        return items
