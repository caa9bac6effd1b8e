# SPDX-License-Identifier: Apache-2.0
"""The books of records: which holds which key, which one is used next, and which are in use.

Pure: no I/O, no clock, one thread. Every record is in exactly one of these states: never used; free; being written
(given out, no key); held by a key; left by its key while it was being read. A record that is being read or written is
never given out.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from kvrouter.engine_patch.offload.key import OffloadKey


class Room(NamedTuple):
    """A record to be written."""

    record: int
    # Whether the record was never written before, so that it takes new space.
    grows: bool
    # The key that had to leave the record.
    evicted: OffloadKey | None


class RecordTable:
    """Keys in order of use, oldest first, over at most `max_records` records."""

    def __init__(self, max_records: int) -> None:
        self._max_records = max_records
        # It holds plain bytes and ints, so the garbage collector has nothing to walk.
        self._held: OrderedDict[OffloadKey, int] = OrderedDict()
        # Record -> number of its readers; absent: none.
        self._readers: dict[int, int] = {}
        # Records that their key left while they were being read.
        self._left: set[int] = set()
        # First in, first out, so that a place on the medium that just failed comes last.
        self._free: deque[int] = deque()
        # Records that were never written, although they are below `_unused`.
        self._given_back: deque[int] = deque()
        # The lowest record that was never given out.
        self._unused = 0

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[OffloadKey]:
        """Iterate over the keys, oldest first."""
        return iter(self._held)

    def get(self, key: OffloadKey) -> int | None:
        """Return the record of a key, or None."""
        return self._held.get(key)

    def adopt(self, held: Iterable[tuple[OffloadKey, int]], count: int) -> None:
        """Take over (key, record) pairs at the start, oldest first, from a file of `count` records."""
        self._held.update(held)
        used = set(self._held.values())
        self._free.extend(index for index in range(count) if index not in used)
        self._unused = count

    def room(self, may_grow: bool) -> Room | None:
        """Give out a record to write: a free one, a new one, or that of the key longest not used; None without one."""
        if self._free:
            return Room(self._free.popleft(), False, None)
        if may_grow and self._given_back:
            return Room(self._given_back.popleft(), True, None)
        if may_grow and self._unused < self._max_records:
            self._unused += 1
            return Room(self._unused - 1, True, None)
        for key, index in self._held.items():
            if index not in self._readers:
                del self._held[key]
                return Room(index, False, key)
        return None

    def hold(self, key: OffloadKey, index: int) -> None:
        """Note that a record that was given out holds this key now, which is the newest."""
        self._held[key] = index

    def give_back(self, index: int, grows: bool) -> None:
        """Take back a record that was given out and holds nothing; `grows` says that it takes no space either."""
        (self._given_back if grows else self._free).append(index)

    def touch(self, key: OffloadKey) -> None:
        """Make the key the newest; ignore unknown keys."""
        if key in self._held:
            self._held.move_to_end(key)

    def pin(self, index: int) -> None:
        """Count one more reader of the record."""
        self._readers[index] = self._readers.get(index, 0) + 1

    def unpin(self, index: int) -> None:
        """Count one reader less, and free the record if it has no key and no reader left."""
        readers = self._readers[index] - 1
        if readers:
            self._readers[index] = readers
            return
        del self._readers[index]
        if index in self._left:
            self._left.discard(index)
            self._free.append(index)

    def drop(self, key: OffloadKey) -> None:
        """Remove a key from its record. Raise KeyError for an unknown key."""
        self._leave(self._held.pop(key))

    def clear(self) -> list[OffloadKey]:
        """Remove all keys, and return them, oldest first; records given out stay out."""
        keys = list(self._held)
        for index in self._held.values():
            self._leave(index)
        self._held.clear()
        return keys

    def _leave(self, index: int) -> None:
        if index in self._readers:
            self._left.add(index)
        else:
            self._free.append(index)
