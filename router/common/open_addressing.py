# SPDX-License-Identifier: Apache-2.0
"""Open addressing in order: entries by 64-bit hash in one array, sorted, with free slots between.

An entry's home is in proportion to its key; where that is taken it moves on, in order of the keys. So a search ends at
the first greater key and stays short in an array that is nine tenths full, and an array grows in one pass from front to
back, in small steps. Keys are `spread` hashes, of which the hash can be had again. Compiled, see `setup.py`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

U64 = NDArray[np.uint64]

# A growth moves every entry, front to back: eight times an entry's life in a table that only grows.
GROWTH = 1.125
# Slots behind the last home that are free after growing: entries whose homes are the last ones move on into them.
TAIL_SLOTS = 16

_LOW32 = 0xFFFFFFFF
# Odd 32-bit multipliers (golden ratio; xxHash's PRIME32_2): products stay below 2**64, so plain numpy does not warn.
_MIX1 = 0x9E3779B1
_MIX2 = 0x85EBCA77
_UNMIX1 = pow(_MIX1, -1, 1 << 32)
_UNMIX2 = pow(_MIX2, -1, 1 << 32)


def spread(hashes: U64, out: U64) -> None:
    """The keys of hashes, into `out`: one to one, and evenly over all numbers also where hashes are small integers, as
    in tests and small engines. 0 is the key of 0."""
    for i in range(hashes.shape[0]):
        low = hashes[i] & _LOW32
        high = (hashes[i] >> 32) ^ low
        high = (high * _MIX1) & _LOW32
        high = high ^ (high >> 15)
        high = (high * _MIX2) & _LOW32
        out[i] = (high << 32) | low


def hashes_of(keys: U64) -> U64:
    """The hashes of keys."""
    low = keys & np.uint64(_LOW32)
    high = ((keys >> np.uint64(32)) * np.uint64(_UNMIX2)) & np.uint64(_LOW32)
    high ^= (high >> np.uint64(15)) ^ (high >> np.uint64(30))
    high *= np.uint64(_UNMIX1)
    high &= np.uint64(_LOW32)
    high ^= low
    high <<= np.uint64(32)
    high |= low
    return high


class OrderedSlots:
    """words: uint64, `width` of them a slot. The first is the entry's key; a slot whose last is 0 is free, so with
    width 1 there is no entry of key 0. homes: how many slots are somebody's home. end: behind the last slot that was
    ever taken in this array, and free."""

    def __init__(self, width: int, homes: int, max_load: float) -> None:
        self.width = width
        self.max_load = max_load
        self.used = 0
        self.words = np.zeros(0, np.uint64)
        self.homes = self.most = self.end = 0
        self.lay_out(homes)

    def bytes(self) -> int:
        return int(self.words.shape[0] * 8)

    def homes_for(self, count: int) -> int:
        """How many homes there are to be for this many entries more."""
        if self.used + count <= self.most:
            return int(self.homes)
        return max(int((self.used + count) / self.max_load) + 1, int(self.homes * GROWTH))

    def reserve(self, count: int) -> None:
        """Room for this many entries more."""
        homes = self.homes_for(count)
        if homes != self.homes:
            self.lay_out(homes)

    def lay_out(self, homes: int) -> None:
        """Move all entries into an array with this many homes."""
        end = max(self.end_with(homes), homes)
        # As many free slots at the end again as entries moved on into: who makes that many does not pay each time.
        new = np.zeros((2 * end - homes + TAIL_SLOTS) * self.width, np.uint64)
        self.copy_to(new, homes)
        self.words, self.homes, self.end = new, homes, end
        self.most = int(homes * self.max_load)

    def home(self, key: np.uint64) -> int:
        return int(((key >> 32) * self.homes) >> 32)

    def end_with(self, homes: int) -> int:
        """Behind the last entry, in an array with this many homes."""
        width, end = self.width, 0
        for i in range(self.end):
            if self.words[i * width + width - 1] != 0:
                end = max(end, ((self.words[i * width] >> 32) * homes) >> 32) + 1
        return int(end)

    def copy_to(self, new: U64, homes: int) -> None:
        width, end = self.width, 0
        for i in range(self.end):
            if self.words[i * width + width - 1] != 0:
                end = max(end, ((self.words[i * width] >> 32) * homes) >> 32)
                for k in range(width):
                    new[end * width + k] = self.words[i * width + k]
                end += 1

    def find(self, key: np.uint64) -> int:
        """The slot of `key`, or the one that it would take."""
        width, last = self.width, self.width - 1
        i = self.home(key)
        while self.words[i * width + last] != 0 and self.words[i * width] < key:
            i += 1
        return i

    def has(self, slot: int, key: np.uint64) -> bool:
        """Whether what `find` gave is the slot of `key`."""
        at = slot * self.width
        return bool(self.words[at] == key and self.words[at + self.width - 1] != 0)

    def place(self, key: np.uint64) -> int:
        """The slot of `key` if it is there; else -1 - the slot that is now its own, and has but its key yet."""
        slot = self.find(key)
        if self.has(slot, key):
            return slot
        if self.used >= self.most or (self.end + 2) * self.width > self.words.shape[0]:
            self.lay_out(self.homes_for(1))
            slot = self.find(key)
        self.open(slot)
        self.words[slot * self.width] = key
        return -1 - slot

    def open(self, slot: int) -> None:
        """Move the entries from `slot` on to the next free one by one."""
        width, free = self.width, slot
        while self.words[free * width + width - 1] != 0:
            free += 1
        at = free * width
        while at > slot * width:
            at -= 1
            self.words[at + width] = self.words[at]
        self.end = max(self.end, free + 1)
        self.used += 1

    def remove(self, slot: int) -> None:
        """Free the slot, and move back by one the entries behind it that are not at home."""
        width = self.width
        while True:
            at = (slot + 1) * width
            if self.words[at + width - 1] == 0 or self.home(self.words[at]) == slot + 1:
                break
            for k in range(width):
                self.words[at - width + k] = self.words[at + k]
            slot += 1
        for k in range(width):
            self.words[slot * width + k] = 0
        self.used -= 1
