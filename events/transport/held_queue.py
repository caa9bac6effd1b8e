# SPDX-License-Identifier: Apache-2.0
"""Messages that are held back while an answer is under way. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

Message = TypeVar("Message")


class HeldQueue(Generic[Message]):
    """A queue of messages with their seq and size, bounded by count and bytes. The newest message is always held."""

    def __init__(self, max_messages: int, max_bytes: int) -> None:
        self.size_bytes = 0
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        self._messages: deque[tuple[int, Message, int]] = deque()

    def __len__(self) -> int:
        return len(self._messages)

    def __iter__(self) -> Iterator[tuple[int, Message, int]]:
        return iter(self._messages)

    def append(self, seq: int, message: Message, size_bytes: int) -> list[tuple[int, Message, int]]:
        """Hold one more message. Returns the oldest ones, which were dropped to make room."""
        self._messages.append((seq, message, size_bytes))
        self.size_bytes += size_bytes
        dropped = []
        while len(self) > 1 and (len(self) > self._max_messages or self.size_bytes > self._max_bytes):
            dropped.append(self.pop())
        return dropped

    def append_first(self, seq: int, message: Message, size_bytes: int) -> None:
        """Hold a message ahead of the others, even beyond the bounds."""
        self._messages.appendleft((seq, message, size_bytes))
        self.size_bytes += size_bytes

    def pop(self) -> tuple[int, Message, int]:
        """Remove and return the first message."""
        first = self._messages.popleft()
        self.size_bytes -= first[2]
        return first

    def clear(self) -> None:
        """Drop all messages."""
        self._messages.clear()
        self.size_bytes = 0
