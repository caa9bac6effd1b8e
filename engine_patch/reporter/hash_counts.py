# SPDX-License-Identifier: Apache-2.0
"""The number of physical copies of each block hash in one place.

Nearly all hashes stand in a sorted array that is never written again, with their counts in a second one; the hashes
that were added since the last merge stand in a small dict. That takes a fifth of the memory of a set of Python numbers.
A snapshot shares the sorted array, where copying a set of a million would block the interpreter, and with it the
engine, for 30 ms. No I/O, clock or lock.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvrouter.events.patch.messages import DIGEST_MASK
from kvrouter.events.vllm.messages import HashArray

CountArray = npt.NDArray[np.int32]

# Both are merged when this many hashes, or a 32nd of the array, are in the dict or are in the array with a count of 0.
# A merge costs some 10 ns for each block of the array, so 0.3 us for each change; a dict entry of 150 bytes then adds
# at most 5 bytes a block.
MERGE_AT = 4_096
MERGE_SHIFT = 5


class HashCounts:
    """Counts of copies by hash; every count is at least 1, and an absent hash is not resident."""

    def __init__(self) -> None:
        # Distinct hashes.
        self.blocks = 0
        # Copies of all hashes together.
        self.copies = 0
        # Sum of the distinct hashes modulo 2**64.
        self.digest = 0
        # Counts of the hashes that were added since the last merge.
        self._fresh: dict[int, int] = {}
        # Hashes of the array with a count of 0.
        self._gone = 0
        self._adopt(np.empty(0, np.uint64), np.empty(0, np.int32))

    def add(self, hashes: HashArray) -> None:
        """Count one more copy of each hash; a hash may come twice. `hashes` is (n,) native uint64."""
        keys, counts, fresh, size = self._keys, self._key_counts, self._fresh, len(self._hashes)
        added_sum = added = 0
        for block_hash, index in zip(hashes.tolist(), self._hashes.searchsorted(hashes).tolist(), strict=True):
            if index < size and keys[index] == block_hash:
                count = counts[index]
                counts[index] = count + 1
                if count:
                    continue
                self._gone -= 1
            elif block_hash in fresh:
                fresh[block_hash] += 1
                continue
            else:
                fresh[block_hash] = 1
            added += 1
            added_sum += block_hash
        self.blocks += added
        self.copies += len(hashes)
        self.digest = (self.digest + added_sum) & DIGEST_MASK
        self._merge_if_worth()

    def remove(self, hashes: HashArray) -> int:
        """Count one copy less of each hash, and return how many hashes were not resident and so changed nothing."""
        keys, counts, fresh, size = self._keys, self._key_counts, self._fresh, len(self._hashes)
        removed_sum = removed = unknown = 0
        for block_hash, index in zip(hashes.tolist(), self._hashes.searchsorted(hashes).tolist(), strict=True):
            if index < size and keys[index] == block_hash:
                count = counts[index]
                if not count:
                    unknown += 1
                    continue
                counts[index] = count - 1
                if count > 1:
                    continue
                self._gone += 1
            else:
                count = fresh.get(block_hash, 0)
                if count > 1:
                    fresh[block_hash] = count - 1
                    continue
                if not count:
                    unknown += 1
                    continue
                del fresh[block_hash]
            removed += 1
            removed_sum += block_hash
        self.blocks -= removed
        self.copies -= len(hashes) - unknown
        self.digest = (self.digest - removed_sum) & DIGEST_MASK
        self._merge_if_worth()
        return unknown

    def freeze(self) -> tuple[HashArray, HashArray, CountArray]:
        """Return arrays that nothing changes afterwards.

        Returns:
            (all hashes, the hashes with two copies or more, the copies of the latter), with hashes in ascending order.
        """
        self._merge()
        repeated = np.flatnonzero(self._counts > 1)
        return self._hashes, self._hashes[repeated], self._counts[repeated]

    def _merge_if_worth(self) -> None:
        if len(self._fresh) + self._gone > max(MERGE_AT, len(self._hashes) >> MERGE_SHIFT):
            self._merge()

    def _merge(self) -> None:
        hashes, counts = self._hashes, self._counts
        if self._gone:
            resident = counts > 0
            hashes, counts = hashes[resident], counts[resident]
            self._gone = 0
        if self._fresh:
            fresh_hashes = np.fromiter(self._fresh, np.uint64, len(self._fresh))
            fresh_counts = np.fromiter(self._fresh.values(), np.int32, len(self._fresh))
            order = fresh_hashes.argsort()
            fresh_hashes, fresh_counts = fresh_hashes[order], fresh_counts[order]
            places = hashes.searchsorted(fresh_hashes)
            hashes, counts = np.insert(hashes, places, fresh_hashes), np.insert(counts, places, fresh_counts)
            self._fresh = {}
        self._adopt(hashes, counts)

    def _adopt(self, hashes: HashArray, counts: CountArray) -> None:
        self._hashes, self._counts = hashes, counts
        # Reading one number is three times as fast through a memoryview as through the array.
        self._keys, self._key_counts = hashes.data, counts.data
