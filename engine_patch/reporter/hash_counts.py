# SPDX-License-Identifier: Apache-2.0
"""How many physical copies of each block hash one place holds.

Nearly all hashes stand in a sorted array that is never written again, with their counts in a second one; those that
came since the last merge stand in a small dict. That is a fifth of the memory of a set of Python numbers; and a
snapshot shares the sorted array, where copying a set of a million would keep the interpreter, and with it the engine,
for 30 ms. No I/O, clock or lock.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvrouter.events.patch.messages import DIGEST_MASK
from kvrouter.events.vllm.messages import HashArray

CountArray = npt.NDArray[np.int32]

# Hashes that are in the dict, or in the array although gone, before both are merged: this many, or a 32nd of the array.
# A merge costs some 10 ns a block of the array, so 0.3 us a change; a dict entry of 150 bytes then adds at most 5 bytes
# a block.
MERGE_AT = 4_096
MERGE_SHIFT = 5


class HashCounts:
    """Counts of copies by hash; every count is at least 1, an absent hash is not resident."""

    def __init__(self) -> None:
        # Distinct hashes, copies of all, sum of the distinct hashes modulo 2**64.
        self.blocks = 0
        self.copies = 0
        self.digest = 0
        self._fresh: dict[int, int] = {}
        # Hashes of the array with a count of 0.
        self._gone = 0
        self._adopt(np.empty(0, np.uint64), np.empty(0, np.int32))

    def add(self, hashes: HashArray) -> None:
        """One more copy of each; a hash may come twice. hashes: (n,) native uint64."""
        keys, counts, fresh, size = self._keys, self._key_counts, self._fresh, len(self._hashes)
        came = new = 0
        for block_hash, at in zip(hashes.tolist(), self._hashes.searchsorted(hashes).tolist(), strict=True):
            if at < size and keys[at] == block_hash:
                count = counts[at]
                counts[at] = count + 1
                if count:
                    continue
                self._gone -= 1
            elif block_hash in fresh:
                fresh[block_hash] += 1
                continue
            else:
                fresh[block_hash] = 1
            new += 1
            came += block_hash
        self.blocks += new
        self.copies += len(hashes)
        self.digest = (self.digest + came) & DIGEST_MASK
        self._merge_if_worth()

    def remove(self, hashes: HashArray) -> int:
        """One copy less of each. Returns how many of them were not resident, which changes nothing."""
        keys, counts, fresh, size = self._keys, self._key_counts, self._fresh, len(self._hashes)
        went = gone = unknown = 0
        for block_hash, at in zip(hashes.tolist(), self._hashes.searchsorted(hashes).tolist(), strict=True):
            if at < size and keys[at] == block_hash:
                count = counts[at]
                if not count:
                    unknown += 1
                    continue
                counts[at] = count - 1
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
            gone += 1
            went += block_hash
        self.blocks -= gone
        self.copies -= len(hashes) - unknown
        self.digest = (self.digest - went) & DIGEST_MASK
        self._merge_if_worth()
        return unknown

    def freeze(self) -> tuple[HashArray, HashArray, CountArray]:
        """(all hashes, those with two copies or more, how many), both sorted; nothing changes them afterwards."""
        self._merge()
        several = np.flatnonzero(self._counts > 1)
        return self._hashes, self._hashes[several], self._counts[several]

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
            fresh = np.fromiter(self._fresh, np.uint64, len(self._fresh))
            fresh_counts = np.fromiter(self._fresh.values(), np.int32, len(self._fresh))
            order = fresh.argsort()
            fresh, fresh_counts = fresh[order], fresh_counts[order]
            places = hashes.searchsorted(fresh)
            hashes, counts = np.insert(hashes, places, fresh), np.insert(counts, places, fresh_counts)
            self._fresh = {}
        self._adopt(hashes, counts)

    def _adopt(self, hashes: HashArray, counts: CountArray) -> None:
        self._hashes, self._counts = hashes, counts
        # Reading one number is three times as fast through a memoryview as through the array.
        self._keys, self._key_counts = hashes.data, counts.data
