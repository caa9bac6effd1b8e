# SPDX-License-Identifier: Apache-2.0
"""The number of physical copies that one worker holds of each block in one place.

vLLM announces one Stored and one Removed for every copy, so a block is resident until its last copy is gone (a plain
set was wrong on 82 of 824 probes, docs/reference/wire.md). Nearly all blocks have one copy, so one table is a set of
all blocks, and another counts only the blocks with more copies. No I/O. Compiled, see `setup.py`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvrouter.router.base.common.open_addressing import TOUCHED_LINES, OrderedSlots, hashes_of, spread

U64 = NDArray[np.uint64]
U16 = NDArray[np.uint16]

# In a fuller table, a new key would shift too many others.
MAX_LOAD = 0.85
MIN_HELD = 256
MIN_COUNTED = 16

# The largest count. A block with more copies counts as this many, so its removals reach zero too early, which can only
# give too little credit.
MAX_COPIES = 65_535
# The bound as the loops use it. Compiled, it is a C variable, which other modules could not import.
_MOST = MAX_COPIES


class CopyTable:
    """The copies of every block in one place.

    Invariant: `held` has the key of each block with a copy, and `counted` has the key and the count of each block with
    two or more. A block takes 8 bytes divided by the load of its table, and 16 more if it is counted.
    """

    def __init__(self) -> None:
        self.held = OrderedSlots(1, MIN_HELD, MAX_LOAD)
        self.counted = OrderedSlots(2, MIN_COUNTED, MAX_LOAD)
        # The copies of the block whose key is 0, for which `held` can have no entry.
        self.zeros = 0
        # In the last call: the hashes with two copies or more, after an addition or before a removal.
        self.multiple = 0
        # In the last removal: the hashes that had no copy to remove.
        self.absent = 0

    def __len__(self) -> int:
        return int(self.held.used) + (self.zeros > 0)

    @property
    def bytes(self) -> int:
        """Memory of both tables."""
        return int(self.held.bytes() + self.counted.bytes())

    def add_copies(self, hashes: U64) -> U16:
        """Add one copy of each hash, in order, and return the new counts; 1 means that the block became resident."""
        keys, now = np.empty(len(hashes), np.uint64), np.empty(len(hashes), np.uint16)
        self.count_up(hashes, keys, now)
        return now

    def remove_copies(self, hashes: U64) -> U16:
        """Remove one copy of each hash, in order, and return the old counts.

        An old count of 1 means that the block is gone now, and 0 that it was not here.
        """
        keys, was = np.empty(len(hashes), np.uint64), np.empty(len(hashes), np.uint16)
        self.count_down(hashes, keys, was)
        return was

    def set(self, hashes: U64, counts: U16) -> None:
        """Set the count of each hash, at least 1, as read back from Redis."""
        self.held.reserve(len(hashes))
        self.count_set(hashes, np.empty(len(hashes), np.uint64), counts)

    def hashes(self) -> U64:
        """Return all hashes with at least one copy, in no order."""
        keys = np.asarray(self.held.words)
        found = hashes_of(keys[keys != 0])
        return np.append(found, np.uint64(0)) if self.zeros else found

    def multiples(self) -> U64:
        """Return the hashes with two copies or more, in no order."""
        return np.fromiter(self.copied(), np.uint64)

    def copied(self) -> dict[int, int]:
        """Return the number of copies of each hash that has two or more."""
        entries = np.asarray(self.counted.words).reshape(-1, 2)
        entries = entries[entries[:, 1] != 0]
        copied = dict(zip(hashes_of(entries[:, 0]).tolist(), entries[:, 1].tolist(), strict=True))
        if self.zeros >= 2:
            copied[0] = self.zeros
        return copied

    def count_up(self, hashes: U64, keys: U64, now: U16) -> None:
        """Add one copy of each hash and write the new counts.

        Args:
            hashes: The hashes, in order.
            keys: Receives the key of each hash.
            now: Receives the new count of each hash.
        """
        self.multiple = 0
        spread(hashes, keys)
        for start in range(0, keys.shape[0], TOUCHED_LINES):
            end = min(start + TOUCHED_LINES, keys.shape[0])
            self.held.touch(keys, start, end)
            for h in range(start, end):
                now[h] = self.add_one(keys[h])
                if now[h] >= 2:
                    self.multiple += 1

    def count_down(self, hashes: U64, keys: U64, was: U16) -> None:
        """Remove one copy of each hash and write the old counts.

        Args:
            hashes: The hashes, in order.
            keys: Receives the key of each hash.
            was: Receives the old count of each hash.
        """
        self.multiple = self.absent = 0
        spread(hashes, keys)
        for start in range(0, keys.shape[0], TOUCHED_LINES):
            end = min(start + TOUCHED_LINES, keys.shape[0])
            self.held.touch(keys, start, end)
            for h in range(start, end):
                was[h] = self.remove_one(keys[h])
                if was[h] == 0:
                    self.absent += 1
                elif was[h] >= 2:
                    self.multiple += 1

    def count_set(self, hashes: U64, keys: U64, counts: U16) -> None:
        """Set the count of each hash; a count of 0 is skipped.

        Args:
            hashes: The hashes, in order.
            keys: Receives the key of each hash.
            counts: The count of each hash.
        """
        spread(hashes, keys)
        for h in range(keys.shape[0]):
            if counts[h] == 0:
                continue
            if keys[h] == 0:
                self.zeros = int(counts[h])
                continue
            self.held.place(keys[h])
            self.count(keys[h], counts[h])

    def add_one(self, key: np.uint64) -> int:
        """Add one copy of a block and return its new number of copies."""
        if key == 0:
            self.zeros = min(self.zeros + 1, _MOST)
            return self.zeros
        if self.held.place(key) < 0:
            return 1
        copies = min(self.copies(key) + 1, _MOST)
        self.count(key, copies)
        return copies

    def remove_one(self, key: np.uint64) -> int:
        """Remove one copy of a block and return its old number of copies."""
        if key == 0:
            copies = self.zeros
            self.zeros = max(copies - 1, 0)
            return copies
        slot = self.held.find(key)
        if not self.held.has(slot, key):
            return 0
        copies = self.copies(key)
        if copies == 1:
            self.held.remove(slot)
        else:
            self.count(key, copies - 1)
        return copies

    def copies(self, key: np.uint64) -> int:
        """Return the number of copies of a block that is held."""
        if self.counted.used == 0:
            return 1
        slot = self.counted.find(key)
        return int(self.counted.words[2 * slot + 1]) if self.counted.has(slot, key) else 1

    def count(self, key: np.uint64, copies: int) -> None:
        """Record the number of copies of a block that is held."""
        if copies >= 2:
            slot = self.counted.place(key)
            self.counted.words[2 * (slot if slot >= 0 else -1 - slot) + 1] = copies
            return
        slot = self.counted.find(key)
        if self.counted.has(slot, key):
            self.counted.remove(slot)
