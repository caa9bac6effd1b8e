# SPDX-License-Identifier: Apache-2.0
"""The CPU tier's bookkeeping: which chunks it holds, which are being read or written, and which it evicts.

A chunk is one block of one group, vLLM's default. A chunk that is being written is visible but cannot be read; a chunk
that is being read is not evicted. The least recently used chunk is evicted first. A chunk becomes recent when it
arrives and again when a request that used it ends; of one request's chunks, the beginning of its text becomes the most
recent. Source: vLLM 0.32.0 kv_offload/cpu/manager.py and policies/lru.py. No I/O or clock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field

from kvrouter.simulator.cache.pool import Event, Key

# A chunk's reader count while it is being written.
WRITING = -1


@dataclass(frozen=True, slots=True)
class OffloadedChunk:
    """The event that a chunk has arrived in the CPU tier."""

    key: Key


@dataclass(frozen=True, slots=True)
class EvictedChunk:
    """The event that chunks of one group have left the CPU tier."""

    group_idx: int
    hashes: tuple[bytes, ...]


CacheEvent = Event | OffloadedChunk | EvictedChunk


@dataclass(slots=True)
class Uses:
    """The chunks that one request stored, found already stored, or loaded."""

    # Each chunk's end in the text, in tokens.
    ends: dict[Key, int] = field(default_factory=dict)

    def tail_first(self) -> list[Key]:
        """Return the keys from the end of the text to its beginning; at one position, the highest group first."""
        return sorted(self.ends, key=lambda key: (self.ends[key], key.group_idx), reverse=True)


class CpuTier:
    """A tier that holds at most `num_chunks` chunks, of any groups."""

    def __init__(self, num_chunks: int) -> None:
        if num_chunks < 1:
            raise ValueError(f"a CPU tier has room for 1 chunk at least, not {num_chunks}")
        self.num_chunks = num_chunks
        # Readers by chunk, or WRITING; least recently used first.
        self._readers: OrderedDict[Key, int] = OrderedDict()
        self._idle = 0
        # Chunks for which requests wait that name another replica as their source: they are not evicted.
        self.awaited: Container[Key] = frozenset()
        self._events: list[CacheEvent] = []

    def resident(self) -> set[Key]:
        """Return the keys that can be read now."""
        return {key for key, readers in self._readers.items() if readers != WRITING}

    def lookup(self, key: Key) -> bool | None:
        """Return True if the chunk can be read, None if it is still being written, False if the tier lacks it."""
        readers = self._readers.get(key)
        return False if readers is None else None if readers == WRITING else True

    def begin_load(self, keys: Iterable[Key]) -> None:
        """Pin chunks that are about to be read. Each of them must be readable."""
        for key in keys:
            self._idle -= self._readers[key] == 0
            self._readers[key] += 1

    def lend(self, keys: Sequence[Key]) -> None:
        """Pin chunks that another replica is about to read; the first of them becomes the most recently used."""
        self.touch(keys)
        self.begin_load(keys)

    def touch(self, keys: Sequence[Key]) -> None:
        """Make chunks that the tier holds the most recently used, the first of them most of all."""
        for key in reversed(keys):
            self._readers.move_to_end(key)

    def end_load(self, keys: Iterable[Key]) -> None:
        """Unpin chunks that have been read."""
        for key in keys:
            self._readers[key] -= 1
            self._idle += self._readers[key] == 0

    def begin_store(self, offered: dict[Key, int], uses: Uses) -> list[Key] | None:
        """Make room for those of a request's chunks that the tier lacks, and mark them as being written.

        Args:
            offered: The chunks, each with the position in tokens where it ends in the text. None of them is evicted to
                make room for the others.
            uses: The chunks that the request has used. The offered ones are added, except those already being written.

        Returns:
            The keys to write, or None if there is not enough room; then nothing is stored.
        """
        new = [key for key in offered if key not in self._readers]
        for key, end in offered.items():
            if self._readers.get(key) != WRITING:
                uses.ends.setdefault(key, end)
        missing = len(new) - (self.num_chunks - len(self._readers))
        if missing > 0 and not self._evict(missing, offered):
            return None
        for key in new:
            self._readers[key] = WRITING
        return new

    def end_store(self, keys: Iterable[Key]) -> None:
        """Mark chunks as readable, as their data has arrived."""
        for key in keys:
            self._readers[key] = 0
            self._idle += 1
            self._events.append(OffloadedChunk(key))

    def abandon(self, keys: Iterable[Key]) -> None:
        """Forget chunks that were being written, as their data does not arrive."""
        for key in keys:
            del self._readers[key]

    def used(self, uses: Uses) -> None:
        """Make an ended request's chunks the most recently used, the beginning of its text most of all."""
        for key in uses.tail_first():
            if key in self._readers:
                self._readers.move_to_end(key)

    def take_events(self) -> list[CacheEvent]:
        """Return the events of chunks that arrived in or left the tier since the last call, oldest first."""
        events, self._events = self._events, []
        return events

    def _evict(self, count: int, protected: Container[Key]) -> bool:
        if count > self._idle:
            return False
        victims = []
        for key, readers in self._readers.items():
            if readers == 0 and key not in protected and key not in self.awaited:
                victims.append(key)
                if len(victims) == count:
                    break
        else:
            return False
        by_group: dict[int, list[bytes]] = {}
        for key in victims:
            del self._readers[key]
            by_group.setdefault(key.group_idx, []).append(key.block_hash)
        self._idle -= count
        self._events += [EvictedChunk(group_idx, tuple(hashes)) for group_idx, hashes in by_group.items()]
        return True
