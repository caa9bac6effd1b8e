# SPDX-License-Identifier: Apache-2.0
"""The CPU tier's books: which chunks it holds, which are on their way in or out, and who is evicted.

A chunk is one block of one group, vLLM's default. A chunk that is being written can be seen and not read; one that is
being read is not evicted. Who was used last is kept longest: chunks are ordered when they arrive and again when a
request that used them ends, its first tokens' last. Source: vLLM 0.32.0 kv_offload/cpu/manager.py and policies/lru.py.
No I/O or clock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable
from dataclasses import dataclass, field

from kvrouter.simulator.cache.pool import Event, Key

# A chunk's reader count while it is being written.
WRITING = -1


@dataclass(frozen=True, slots=True)
class OffloadedChunk:
    """A chunk has arrived in the CPU tier."""

    key: Key


@dataclass(frozen=True, slots=True)
class EvictedChunk:
    """Chunks of one group have left the CPU tier."""

    group_idx: int
    hashes: tuple[bytes, ...]


CacheEvent = Event | OffloadedChunk | EvictedChunk


@dataclass(slots=True)
class Uses:
    """The chunks that one request stored, found stored or loaded, each with where it ends in the text, in tokens."""

    ends: dict[Key, int] = field(default_factory=dict)

    def tail_first(self) -> list[Key]:
        """From the end of the text to its beginning; at one position, the highest group first."""
        return sorted(self.ends, key=lambda key: (self.ends[key], key.group_idx), reverse=True)


class CpuTier:
    """Room for `num_chunks` chunks of any group."""

    def __init__(self, num_chunks: int) -> None:
        if num_chunks < 1:
            raise ValueError(f"a CPU tier has room for 1 chunk at least, not {num_chunks}")
        self.num_chunks = num_chunks
        # Readers by chunk, or WRITING; least recently used first.
        self._readers: OrderedDict[Key, int] = OrderedDict()
        self._idle = 0
        self._events: list[CacheEvent] = []

    def resident(self) -> set[Key]:
        """What can be read now."""
        return {key for key, readers in self._readers.items() if readers != WRITING}

    def lookup(self, key: Key) -> bool | None:
        """True: it can be read. None: it will be. False: it is not there."""
        readers = self._readers.get(key)
        return False if readers is None else None if readers == WRITING else True

    def begin_load(self, keys: Iterable[Key]) -> None:
        """Pin chunks that are about to be read; each must be readable."""
        for key in keys:
            self._idle -= self._readers[key] == 0
            self._readers[key] += 1

    def end_load(self, keys: Iterable[Key]) -> None:
        """They have been read."""
        for key in keys:
            self._readers[key] -= 1
            self._idle += self._readers[key] == 0

    def begin_store(self, offered: dict[Key, int], uses: Uses) -> list[Key] | None:
        """Make room for those that are not there, and say which. None: there is no room, and nothing is stored.

        offered: with where each ends in the text; none of them is evicted for the rest. uses: of the request that
        offers.
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
        """They have arrived."""
        for key in keys:
            self._readers[key] = 0
            self._idle += 1
            self._events.append(OffloadedChunk(key))

    def used(self, uses: Uses) -> None:
        """A request has ended: what it used is recent, the beginning of its text most of all."""
        for key in uses.tail_first():
            if key in self._readers:
                self._readers.move_to_end(key)

    def take_events(self) -> list[CacheEvent]:
        """What came and went since the last call, oldest first."""
        events, self._events = self._events, []
        return events

    def _evict(self, count: int, protected: Container[Key]) -> bool:
        if count > self._idle:
            return False
        victims = []
        for key, readers in self._readers.items():
            if readers == 0 and key not in protected:
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
