# SPDX-License-Identifier: Apache-2.0
"""What clients of the event feed have not taken yet. Clients that want the same hold the same bytes, which count once.
Pure."""

from __future__ import annotations

from collections import deque

# Bytes handed to a connection at once, which copies them: a large chunk is not copied for every client that reads
# slowly. Asyncio's own mark, above which a connection counts as full.
PIECE_BYTES = 64 * 1024


class Chunk:
    """Encoded events for one or more clients: whole events, so a client may end behind each chunk."""

    __slots__ = ("data", "readers")

    def __init__(self, data: bytes) -> None:
        self.data = data
        # Backlogs that hold it.
        self.readers = 0


class HeldChunks:
    """All chunks that a backlog holds, each counted once."""

    def __init__(self) -> None:
        self.size_bytes = 0

    def hold(self, chunk: Chunk) -> None:
        """Count the chunk for one more backlog."""
        chunk.readers += 1
        if chunk.readers == 1:
            self.size_bytes += len(chunk.data)

    def release(self, chunk: Chunk) -> None:
        """Count the chunk for one backlog less."""
        chunk.readers -= 1
        if not chunk.readers:
            self.size_bytes -= len(chunk.data)


class Backlog:
    """The chunks that one client has not been handed, in their order."""

    def __init__(self, held: HeldChunks) -> None:
        self._held = held
        self._chunks: deque[Chunk] = deque()
        # Bytes of the first chunk that were handed out.
        self._taken_bytes = 0
        self.size_bytes = 0

    @property
    def is_within_chunk(self) -> bool:
        """Whether the bytes handed out end in the middle of a chunk."""
        return self._taken_bytes > 0

    def append(self, chunk: Chunk) -> None:
        """Add the newest chunk."""
        self._held.hold(chunk)
        self._chunks.append(chunk)
        self.size_bytes += len(chunk.data)

    def take(self) -> list[bytes]:
        """Return the next bytes, at most PIECE_BYTES; nothing where there are none."""
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
        """Drop all that is left."""
        self.size_bytes = 0
        while self._chunks:
            self._drop_first()

    def _drop_first(self) -> None:
        self._held.release(self._chunks.popleft())
        self._taken_bytes = 0
