# SPDX-License-Identifier: Apache-2.0
"""The bytes that clients of the event feed have not taken yet. Pure.

Clients with the same filter share the bytes, and shared bytes count once.
"""

from __future__ import annotations

from collections import deque

# The most bytes handed to a connection at once. A connection copies them, so a small piece saves copying a large chunk
# for every client that reads slowly. It is asyncio's own mark above which a connection counts as full.
PIECE_BYTES = 64 * 1024


class Chunk:
    """Encoded events for one or more clients.

    A chunk holds whole events only, so a client's answer may end after any chunk.
    """

    __slots__ = ("data", "readers")

    def __init__(self, data: bytes) -> None:
        self.data = data
        # The number of backlogs that hold this chunk.
        self.readers = 0


class HeldChunks:
    """The chunks that at least one backlog holds, each counted once."""

    def __init__(self) -> None:
        self.size_bytes = 0

    def hold(self, chunk: Chunk) -> None:
        """Note that one more backlog holds the chunk; the first one adds the chunk's bytes to `size_bytes`."""
        chunk.readers += 1
        if chunk.readers == 1:
            self.size_bytes += len(chunk.data)

    def release(self, chunk: Chunk) -> None:
        """Count one backlog fewer that holds the chunk."""
        chunk.readers -= 1
        if not chunk.readers:
            self.size_bytes -= len(chunk.data)


class Backlog:
    """The chunks that one client has not been sent yet, oldest first."""

    def __init__(self, held: HeldChunks) -> None:
        self._held = held
        self._chunks: deque[Chunk] = deque()
        # How many bytes of the first chunk `take` has returned already.
        self._taken_bytes = 0
        self.size_bytes = 0

    @property
    def is_within_chunk(self) -> bool:
        """Whether the bytes taken so far end in the middle of a chunk."""
        return self._taken_bytes > 0

    def append(self, chunk: Chunk) -> None:
        """Add the newest chunk."""
        self._held.hold(chunk)
        self._chunks.append(chunk)
        self.size_bytes += len(chunk.data)

    def take(self) -> list[bytes]:
        """Return the next bytes, at most PIECE_BYTES, or an empty list if the backlog is empty."""
        parts: list[bytes] = []
        room = PIECE_BYTES
        while self._chunks and room:
            chunk = self._chunks[0]
            part = chunk.data
            if self._taken_bytes or len(part) > room:
                part = part[self._taken_bytes : self._taken_bytes + room]
            parts.append(part)
            room -= len(part)
            self._taken_bytes += len(part)
            if self._taken_bytes == len(chunk.data):
                self._drop_first()
        self.size_bytes -= PIECE_BYTES - room
        return parts

    def clear(self) -> None:
        """Drop all remaining chunks."""
        self.size_bytes = 0
        while self._chunks:
            self._drop_first()

    def _drop_first(self) -> None:
        self._held.release(self._chunks.popleft())
        self._taken_bytes = 0
