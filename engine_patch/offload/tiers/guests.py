# SPDX-License-Identifier: Apache-2.0
"""Chunks that are read from disk so that another engine can borrow them. No I/O, no lock."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from kvrouter.engine_patch.offload.key import OffloadKey
from kvrouter.engine_patch.offload.tiers.cpu_tier import ChunkState, CpuTier

# Bytes that are read at once, and for which a request of this engine that needs the disk waits at most: 32 ms at 500 MB/s.
READ_BYTES = 16 << 20
# One of READ_SHARE slots at most is filled at once: half of those that may wait for the disk in all.
READ_SHARE = 8


class Guests:
    """The chunks in CPU memory that readers had fetched from disk, the oldest first: `max_chunks` at most.

    Beyond that, each new one takes the slot of an old one, so that readers displace no more of what requests stored.
    """

    def __init__(self, cpu: CpuTier, max_chunks: int, chunk_bytes: int) -> None:
        """Start without guests.

        Args:
            cpu: The CPU tier.
            max_chunks: The number of guests at most.
            chunk_bytes: Bytes of a chunk.
        """
        self._cpu = cpu
        self._max_chunks = max_chunks
        self._max_reads = max(1, min(READ_BYTES // chunk_bytes, cpu.num_slots // READ_SHARE))
        self._chunks: dict[OffloadKey, None] = {}
        # Chunks that are being read, and some whose read has ended.
        self._reading: set[OffloadKey] = set()

    def is_coming(self, key: OffloadKey) -> bool:
        """Return whether a chunk is being read to be lent."""
        return key in self._reading and self._cpu.state(key) is ChunkState.WRITING

    def may_read(self) -> bool:
        """Return whether one more read may begin now."""
        if len(self._reading) >= self._max_reads:
            self._reading = set(filter(self.is_coming, self._reading))
        return len(self._reading) < self._max_reads

    def make_room(self, protected: AbstractSet[OffloadKey]) -> list[OffloadKey] | None:
        """Return the old guests that leave for a new one, or None if none of them can leave now.

        Args:
            protected: Keys that must not leave.
        """
        if len(self._chunks) < self._max_chunks:
            return []
        for key in list(self._chunks):
            if self._cpu.state(key) is ChunkState.ABSENT:
                del self._chunks[key]
                return []
            if key not in protected and self._cpu.discard(key):
                del self._chunks[key]
                return [key]
        return None

    def admit(self, key: OffloadKey) -> None:
        """Note that the read of a new guest has begun."""
        self._chunks.pop(key, None)
        self._chunks[key] = None
        self._reading.add(key)

    def clear(self) -> None:
        """Forget all guests."""
        self._chunks.clear()
        self._reading.clear()
