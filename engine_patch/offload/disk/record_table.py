# SPDX-License-Identifier: Apache-2.0
"""Which record holds which key, which one goes next, and which are in use. Pure: no I/O, no clock, one thread.

Every record is in exactly one of these states: never used; free; being written (given out, no key); held by a key; left
by its key while it was being read. A record that is being read or written is never given out.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from kvrouter.engine_patch.offload.key import OffloadKey


class Room(NamedTuple):
    """A record to be written. grows: it never was before, so it takes space; evicted: the key that had to leave for
    it."""

    record: int
    grows: bool
    evicted: OffloadKey | None


class RecordTable:
    """Keys in order of use, oldest first, over at most `max_records` records."""

    def __init__(self, max_records: int) -> None:
        self._max_records = max_records
        # Plain bytes and ints: the garbage collector has nothing to walk.
        self._held: OrderedDict[OffloadKey, int] = OrderedDict()
        # Record -> how many read it.
        self._readers: dict[int, int] = {}
        self._left: set[int] = set()
        # First in, first out: a place on the medium that just failed comes last.
        self._free: deque[int] = deque()
        # Never written, although below `_unused`.
        self._given_back: deque[int] = deque()
        self._unused = 0

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[OffloadKey]:
        """Keys, oldest first."""
        return iter(self._held)

    def get(self, key: OffloadKey) -> int | None:
        return self._held.get(key)

    def adopt(self, held: Iterable[tuple[OffloadKey, int]], count: int) -> None:
        """What is there at the start, oldest first, in a file of `count` records."""
        self._held.update(held)
        used = set(self._held.values())
        self._free.extend(index for index in range(count) if index not in used)
        self._unused = count

    def room(self, may_grow: bool) -> Room | None:
        """A record to write: a free one, or a new one, or that of the key longest not used. None: there is none."""
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
        """The record given out holds this key now, the newest."""
        self._held[key] = index

    def give_back(self, index: int, grows: bool) -> None:
        """The record given out holds nothing. grows: and takes no space."""
        (self._given_back if grows else self._free).append(index)

    def touch(self, key: OffloadKey) -> None:
        """The key is the newest now; unknown keys are ignored."""
        if key in self._held:
            self._held.move_to_end(key)

    def pin(self, index: int) -> None:
        """One more reads the record."""
        self._readers[index] = self._readers.get(index, 0) + 1

    def unpin(self, index: int) -> None:
        left = self._readers[index] - 1
        if left:
            self._readers[index] = left
            return
        del self._readers[index]
        if index in self._left:
            self._left.discard(index)
            self._free.append(index)

    def drop(self, key: OffloadKey) -> None:
        """The key leaves its record. Raises KeyError."""
        self._leave(self._held.pop(key))

    def clear(self) -> list[OffloadKey]:
        """All keys leave; returns them, oldest first. Records given out stay out."""
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
