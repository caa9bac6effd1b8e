# SPDX-License-Identifier: Apache-2.0
"""How many physical copies of each block one worker holds in one place.

vLLM announces one Stored and one Removed for every copy, so a block is resident until its last copy is gone (a plain
set was wrong on 82 of 824 probes, docs/reference/wire.md). Invariant: a hash is in the table exactly when its count is
at least 1. No I/O. Compiled, see `setup.py`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvrouter.router.common.open_addressing import close_gap, home

U64 = NDArray[np.uint64]
U16 = NDArray[np.uint16]

# As in the mirror: short probes and few bytes an entry.
MAX_LOAD = 0.8
GROWTH = 1.5
MIN_CAPACITY = 1024

# A count above this stays there; the removals that follow then reach zero early, which can only under-credit.
MAX_COPIES = 65_535
# The loops' own; compiled, it is no name that others could import.
_MOST = MAX_COPIES


class CopyTable:
    """Copies by block hash; 10 bytes an entry over its load. A count of 0 marks a free place."""

    def __init__(self) -> None:
        self.keys = np.zeros(MIN_CAPACITY, np.uint64)
        self.counts = np.zeros(MIN_CAPACITY, np.uint16)
        self.used = 0
        # Of the hashes counted last: how many have two copies or more, before or after; how many had none to lose.
        self.several = 0
        self.absent = 0

    def __len__(self) -> int:
        return self.used

    @property
    def bytes(self) -> int:
        return self.keys.nbytes + self.counts.nbytes

    def add_copies(self, hashes: U64) -> U16:
        """One copy more of each hash, in order; returns the new counts: 1 means that it became resident."""
        self.make_room(len(hashes))
        now = np.empty(len(hashes), np.uint16)
        self.count_up(hashes, now)
        return now

    def remove_copies(self, hashes: U64) -> U16:
        """One copy less of each hash, in order; returns the old counts: 1 means that it is gone, 0 that it never was
        here."""
        was = np.empty(len(hashes), np.uint16)
        self.count_down(hashes, was)
        return was

    def set(self, hashes: U64, counts: U16) -> None:
        """Set counts of at least 1, as read back from Redis."""
        self.make_room(len(hashes))
        self.count_set(hashes, counts)

    def hashes(self) -> U64:
        """All hashes with at least one copy, in no order."""
        return np.compress(np.asarray(self.counts) != 0, np.asarray(self.keys))

    def multiples(self) -> U64:
        """The hashes with two copies or more, in no order."""
        return np.compress(np.asarray(self.counts) >= 2, np.asarray(self.keys))

    def copied(self) -> dict[int, int]:
        """The copies of the hashes that have two or more."""
        counts = np.asarray(self.counts)
        several = counts >= 2
        return dict(zip(np.asarray(self.keys)[several].tolist(), counts[several].tolist(), strict=True))

    def make_room(self, count: int) -> None:
        wanted = int((self.used + count) / MAX_LOAD) + 1
        if wanted <= len(self.keys):
            return
        old_keys, old_counts = self.keys, self.counts
        capacity = max(wanted, int(len(old_keys) * GROWTH))
        self.keys = np.zeros(capacity, np.uint64)
        self.counts = np.zeros(capacity, np.uint16)
        self.used = 0
        self.count_set(old_keys, old_counts)

    def place_of(self, key: np.uint64) -> int:
        """Where `key` is, or the free place where it would go."""
        capacity = self.keys.shape[0]
        i = home(key, capacity)
        while self.counts[i] != 0 and self.keys[i] != key:
            i += 1
            if i == capacity:
                i = 0
        return i

    def count_up(self, hashes: U64, now: U16) -> None:
        self.several = 0
        for h in range(hashes.shape[0]):
            i = self.place_of(hashes[h])
            if self.counts[i] == 0:
                self.keys[i] = hashes[h]
                self.used += 1
            if self.counts[i] < _MOST:
                self.counts[i] += 1
            now[h] = self.counts[i]
            if self.counts[i] >= 2:
                self.several += 1

    def count_down(self, hashes: U64, was: U16) -> None:
        self.several = self.absent = 0
        for h in range(hashes.shape[0]):
            i = self.place_of(hashes[h])
            was[h] = self.counts[i]
            if self.counts[i] == 0:
                self.absent += 1
                continue
            if self.counts[i] >= 2:
                self.several += 1
            self.counts[i] -= 1
            if self.counts[i] == 0:
                self.used -= 1
                close_gap(self.keys, self.counts, 0, i)

    def count_set(self, hashes: U64, counts: U16) -> None:
        """A count of 0 is passed over."""
        for h in range(hashes.shape[0]):
            if counts[h] == 0:
                continue
            i = self.place_of(hashes[h])
            if self.counts[i] == 0:
                self.keys[i] = hashes[h]
                self.used += 1
            self.counts[i] = counts[h]
