# SPDX-License-Identifier: Apache-2.0
"""How many physical copies of each block one worker holds in one place.

vLLM announces one Stored and one Removed for every copy, so a block is resident until its last copy is gone (a plain
set was wrong on 82 of 824 probes, docs/reference/wire.md). Invariant: a hash is in the table exactly when its count is
at least
1. No I/O.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvrouter.router.ingest import copy_kernels as kernels

# As in the mirror: short probes and few bytes an entry.
MAX_LOAD = 0.8
GROWTH = 1.5
MIN_CAPACITY = 1024


class CopyTable:
    """Copies by block hash; 10 bytes an entry over its load."""

    __slots__ = ("_counts", "_keys", "_used")

    def __init__(self) -> None:
        self._keys = np.zeros(MIN_CAPACITY, np.uint64)
        self._counts = np.zeros(MIN_CAPACITY, np.uint16)
        self._used = 0

    def __len__(self) -> int:
        return self._used

    @property
    def bytes(self) -> int:
        return self._keys.nbytes + self._counts.nbytes

    def add_copies(self, hashes: NDArray[np.uint64]) -> NDArray[np.uint16]:
        """One copy more of each hash, in order; returns the new counts: 1 means that it became resident."""
        self._make_room(len(hashes))
        now = np.empty(len(hashes), np.uint16)
        self._used += kernels.count_up(self._keys, self._counts, hashes, now)
        return now

    def remove_copies(self, hashes: NDArray[np.uint64]) -> NDArray[np.uint16]:
        """One copy less of each hash, in order; returns the old counts: 1 means that it is gone, 0 that it never was
        here."""
        was = np.empty(len(hashes), np.uint16)
        self._used -= kernels.count_down(self._keys, self._counts, hashes, was)
        return was

    def set(self, hashes: NDArray[np.uint64], counts: NDArray[np.uint16]) -> None:
        """Set counts of at least 1, as read back from Redis."""
        self._make_room(len(hashes))
        self._used += kernels.count_set(self._keys, self._counts, hashes, counts)

    def hashes(self) -> NDArray[np.uint64]:
        """All hashes with at least one copy, in no order."""
        return np.compress(self._counts != 0, self._keys)

    def multiples(self) -> NDArray[np.uint64]:
        """The hashes with two copies or more, in no order."""
        return np.compress(self._counts >= 2, self._keys)

    def copied(self) -> dict[int, int]:
        """The copies of the hashes that have two or more."""
        several = self._counts >= 2
        return dict(zip(self._keys[several].tolist(), self._counts[several].tolist(), strict=True))

    def _make_room(self, count: int) -> None:
        wanted = int((self._used + count) / MAX_LOAD) + 1
        if wanted <= len(self._keys):
            return
        old_keys, old_counts = self._keys, self._counts
        capacity = max(wanted, int(len(old_keys) * GROWTH))
        self._keys = np.zeros(capacity, np.uint64)
        self._counts = np.zeros(capacity, np.uint16)
        kernels.count_rehash(old_keys, old_counts, self._keys, self._counts)
