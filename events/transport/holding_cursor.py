# SPDX-License-Identifier: Apache-2.0
"""The part that the cursors of both streams share: items to hand out, and messages held back. Pure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Generic, TypeVar

from kvrouter.events.transport.held_queue import HeldQueue

Item = TypeVar("Item")
Queue = TypeVar("Queue", bound=HeldQueue[Any])


class HoldingCursor(ABC, Generic[Item, Queue]):
    """The position of a reader in a stream. Single-threaded; never raises, whatever the wire brings."""

    def __init__(self, held: Queue) -> None:
        self.items: list[Item] = []
        self._held = held
        # Whether the live socket may have messages that were not read yet.
        self._unread = False

    @property
    def held(self) -> int:
        """Number of messages that are held until an answer is complete."""
        return len(self._held)

    @property
    def held_bytes(self) -> int:
        """Payload bytes of the held messages."""
        return self._held.size_bytes

    def set_unread(self, unread: bool) -> None:
        """Note whether the live socket has unread messages; while it has, the stream is not caught up."""
        self._unread = unread
        self._catch_up()

    @abstractmethod
    def _catch_up(self) -> None:
        """Announce `CaughtUp` if it is due."""

    @abstractmethod
    def flooded(self, reason: str, *, is_live: bool) -> None:
        """Report that a connection was closed because of the bytes that it brought.

        `is_live` says whether it was the connection of the stream itself.
        """

    def take(self) -> list[Item]:
        """Return the items since the last call, in order."""
        items, self.items = self.items, []
        return items
