# SPDX-License-Identifier: Apache-2.0
"""A bounded queue of items between sockets and one consumer.

The queue drops nothing; the reader stops reading while it is full. `CaughtUp` is handed out alone, and only when no
other item waits. So a consumer that needs seconds for a replay does not count as caught up while newer items wait
behind it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from kvrouter.events.transport.progress import CaughtUp, FellBehind

Item = TypeVar("Item")


class Outbox(Generic[Item]):
    """A queue in one event loop, bounded by count and bytes."""

    def __init__(
        self, max_items: int, max_bytes: int, *, size_bytes: Callable[[Item], int], on_room: Callable[[], object]
    ) -> None:
        """Create an empty queue.

        Args:
            max_items: Items that wait before the queue is full.
            max_bytes: Bytes that wait before the queue is full.
            size_bytes: Returns the size of an item, the same each time.
            on_room: Called when the queue is no longer full.
        """
        self._max_items = max_items
        self._max_bytes = max_bytes
        self._size_bytes = size_bytes
        self._on_room = on_room
        self._items: deque[Item] = deque()
        # The `CaughtUp` that is due once no other item waits.
        self._caught_up: Item | None = None
        self._bytes = 0
        self._waiter: asyncio.Future[None] | None = None
        self._end: Exception | None = None

    def __len__(self) -> int:
        return len(self._items)

    @property
    def full(self) -> bool:
        """Whether no item should be added now."""
        return len(self._items) >= self._max_items or self._bytes >= self._max_bytes

    def put(self, items: Sequence[Item]) -> None:
        """Add items, even if the queue is full: messages that were read cannot be put back."""
        for item in items:
            if isinstance(item, CaughtUp):
                self._caught_up = item
                continue
            if isinstance(item, FellBehind):
                self._caught_up = None
            self._items.append(item)
        self._bytes += sum(map(self._size_bytes, items))
        self._wake()

    def end(self, error: Exception) -> None:
        """Let `take` raise `error` after the remaining items."""
        self._end = error
        self._wake()

    def clear(self) -> None:
        """Drop all waiting items."""
        self._items.clear()
        self._caught_up = None
        self._bytes = 0

    async def take(self, most: int) -> list[Item]:
        """Return the next items, at least one, at most `most`. One caller at a time; a cancelled call loses nothing."""
        if self._waiter is not None and not self._waiter.done():
            raise RuntimeError("another task is waiting for these items")
        while not self._items:
            if self._caught_up is not None:
                caught_up, self._caught_up = self._caught_up, None
                return [caught_up]
            if self._end is not None:
                raise self._end
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        was_full = self.full
        items = [self._items.popleft() for _ in range(min(len(self._items), most))]
        self._bytes -= sum(map(self._size_bytes, items))
        if was_full and not self.full:
            self._on_room()
        return items

    def _wake(self) -> None:
        waiter = self._waiter
        has_news = self._items or self._caught_up is not None or self._end is not None
        if waiter is not None and not waiter.done() and has_news:
            waiter.set_result(None)
