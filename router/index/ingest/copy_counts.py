# SPDX-License-Identifier: Apache-2.0
"""How many physical copies of each block one worker holds in one place.

vLLM announces one Stored and one Removed for every copy, so a block is resident until its last copy is gone (a plain
set was wrong on 82 of 824 probes, docs/reference/wire.md). Nearly all blocks have one copy: so all are in a set, and
those that have more are counted beside it. No I/O. Compiled, see `setup.py`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvrouter.router.base.common.open_addressing import TOUCHED_LINES, OrderedSlots, hashes_of, spread

U64 = NDArray[np.uint64]
U16 = NDArray[np.uint16]

# Fuller, a new key would move too many others on.
MAX_LOAD = 0.85
MIN_HELD = 256
MIN_COUNTED = 16

# A count above this stays there; the removals that follow then reach zero early, which can only under-credit.
MAX_COPIES = 65_535
# The loops' own; compiled, it is no name that others could import.
_MOST = MAX_COPIES


class CopyTable:
    """Invariant: `held` has the key of each block with a copy, `counted` key and count of each with two or more.
    8 bytes a block over its load, and 16 for each that is counted. `zeros`: copies of the block whose key is 0, which
    `held` has no entry for."""

    def __init__(self) -> None:
        self.held = OrderedSlots(1, MIN_HELD, MAX_LOAD)
        self.counted = OrderedSlots(2, MIN_COUNTED, MAX_LOAD)
        self.zeros = 0
        # Of the hashes counted last: how many have two copies or more, before or after; how many had none to lose.
        self.several = 0
        self.absent = 0

    def __len__(self) -> int:
        return int(self.held.used) + (self.zeros > 0)

    @property
    def bytes(self) -> int:
        return int(self.held.bytes() + self.counted.bytes())

    def add_copies(self, hashes: U64) -> U16:
        """One copy more of each hash, in order; returns the new counts: 1 means that it became resident."""
        keys, now = np.empty(len(hashes), np.uint64), np.empty(len(hashes), np.uint16)
        self.count_up(hashes, keys, now)
        return now

    def remove_copies(self, hashes: U64) -> U16:
        """One copy less of each hash, in order; returns the old counts: 1 means that it is gone, 0 that it never was
        here."""
        keys, was = np.empty(len(hashes), np.uint64), np.empty(len(hashes), np.uint16)
        self.count_down(hashes, keys, was)
        return was

    def set(self, hashes: U64, counts: U16) -> None:
        """Set counts of at least 1, as read back from Redis."""
        self.held.reserve(len(hashes))
        self.count_set(hashes, np.empty(len(hashes), np.uint64), counts)

    def hashes(self) -> U64:
        """All hashes with at least one copy, in no order."""
        keys = np.asarray(self.held.words)
        found = hashes_of(keys[keys != 0])
        return np.append(found, np.uint64(0)) if self.zeros else found

    def multiples(self) -> U64:
        """The hashes with two copies or more, in no order."""
        return np.fromiter(self.copied(), np.uint64)

    def copied(self) -> dict[int, int]:
        """The copies of the hashes that have two or more."""
        entries = np.asarray(self.counted.words).reshape(-1, 2)
        entries = entries[entries[:, 1] != 0]
        copied = dict(zip(hashes_of(entries[:, 0]).tolist(), entries[:, 1].tolist(), strict=True))
        if self.zeros >= 2:
            copied[0] = self.zeros
        return copied

    def count_up(self, hashes: U64, keys: U64, now: U16) -> None:
        """keys: room for those of the hashes."""
        self.several = 0
        spread(hashes, keys)
        for start in range(0, keys.shape[0], TOUCHED_LINES):
            end = min(start + TOUCHED_LINES, keys.shape[0])
            self.held.touch(keys, start, end)
            for h in range(start, end):
                now[h] = self.add_one(keys[h])
                if now[h] >= 2:
                    self.several += 1

    def count_down(self, hashes: U64, keys: U64, was: U16) -> None:
        self.several = self.absent = 0
        spread(hashes, keys)
        for start in range(0, keys.shape[0], TOUCHED_LINES):
            end = min(start + TOUCHED_LINES, keys.shape[0])
            self.held.touch(keys, start, end)
            for h in range(start, end):
                was[h] = self.remove_one(keys[h])
                if was[h] == 0:
                    self.absent += 1
                elif was[h] >= 2:
                    self.several += 1

    def count_set(self, hashes: U64, keys: U64, counts: U16) -> None:
        """A count of 0 is passed over."""
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
        """The copies that there are now."""
        if key == 0:
            self.zeros = min(self.zeros + 1, _MOST)
            return self.zeros
        if self.held.place(key) < 0:
            return 1
        copies = min(self.copies(key) + 1, _MOST)
        self.count(key, copies)
        return copies

    def remove_one(self, key: np.uint64) -> int:
        """The copies that there were."""
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
        """Of a block that is held."""
        if self.counted.used == 0:
            return 1
        slot = self.counted.find(key)
        return int(self.counted.words[2 * slot + 1]) if self.counted.has(slot, key) else 1

    def count(self, key: np.uint64, copies: int) -> None:
        """Of a block that is held, its copies from now on."""
        if copies >= 2:
            slot = self.counted.place(key)
            self.counted.words[2 * (slot if slot >= 0 else -1 - slot) + 1] = copies
            return
        slot = self.counted.find(key)
        if self.counted.has(slot, key):
            self.counted.remove(slot)
