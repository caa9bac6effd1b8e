# SPDX-License-Identifier: Apache-2.0
"""Open addressing in order: entries by 64-bit hash in one array, sorted, with free slots between.

An entry's home is a line of the processor's cache, in proportion to its key; where that is full it moves on, in order
of the keys. So a search ends at the first greater key, in an array that is 85 % full mostly in its first line, and an
array grows in one pass from front to back, in small steps. Keys are `spread` hashes, of which the hash can be
had again. Compiled, see `setup.py`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

U64 = NDArray[np.uint64]

# A growth moves every entry, front to back: eight times an entry's life in a table that only grows.
GROWTH = 1.125
# Slots behind the last line that are free after growing: entries whose home it is move on into them.
TAIL_SLOTS = 16
LINE_WORDS = 8
# Lines that are touched ahead: half of the nearest cache.
TOUCHED_LINES = 256

_LINE = LINE_WORDS
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


def lined_zeros(count: int) -> U64:
    """That many words; the first is at the start of a line of the processor's cache."""
    room = np.zeros(count + LINE_WORDS, np.uint64)
    start = (-room.ctypes.data // 8) % LINE_WORDS
    return room[start : start + count]


class OrderedSlots:
    """words: uint64, `width` of them a slot, 1 or 2. The first is the entry's key; a slot whose last is 0 is free, so with
    width 1 there is no entry of key 0. lines: how many are somebody's home. end: behind the last slot that was ever
    taken in this array, and free."""

    def __init__(self, width: int, slots: int, max_load: float) -> None:
        """slots: at first, a multiple of what a line has."""
        self.width = width
        self.line_slots = LINE_WORDS // width
        self.max_load = max_load
        self.used = 0
        self.words = np.zeros(0, np.uint64)
        self.lines = self.most = self.end = 0
        self.touched = 0
        self.lay_out(slots // self.line_slots)

    def bytes(self) -> int:
        return int(self.words.shape[0] * 8)

    def lines_for(self, count: int) -> int:
        """How many lines there are to be for this many entries more."""
        if self.used + count <= self.most:
            return int(self.lines)
        slots = int((self.used + count) / self.max_load) + 1
        return max(slots // self.line_slots + 1, int(self.lines * GROWTH))

    def reserve(self, count: int) -> None:
        """Room for this many entries more."""
        lines = self.lines_for(count)
        if lines != self.lines:
            self.lay_out(lines)

    def lay_out(self, lines: int) -> None:
        """Move all entries into an array with this many lines."""
        slots = lines * self.line_slots
        end = max(self.end_with(lines), slots)
        # As many free slots at the end again as entries moved on into: who makes that many does not pay each time.
        new = lined_zeros((2 * end - slots + TAIL_SLOTS) * self.width)
        self.copy_to(new, lines)
        self.words, self.lines, self.end = new, lines, end
        self.most = int(slots * self.max_load)

    def home(self, key: np.uint64) -> int:
        return int((((key >> 32) * self.lines) >> 32) * self.line_slots)

    def end_with(self, lines: int) -> int:
        """Behind the last entry, in an array with this many lines."""
        width, line_slots, end = self.width, self.line_slots, 0
        for i in range(self.end):
            if self.words[i * width + width - 1] != 0:
                home = int((((self.words[i * width] >> 32) * lines) >> 32) * line_slots)
                end = max(end, home) + 1
        return end

    def copy_to(self, new: U64, lines: int) -> None:
        width, line_slots, end = self.width, self.line_slots, 0
        for i in range(self.end):
            if self.words[i * width + width - 1] != 0:
                home = int((((self.words[i * width] >> 32) * lines) >> 32) * line_slots)
                end = max(end, home)
                for k in range(width):
                    new[end * width + k] = self.words[i * width + k]
                end += 1

    def touch(self, keys: U64, start: int, end: int) -> None:
        """Read the homes of keys[start:end], with nothing that hangs on what is found there: so the processor waits for
        all of them at once, and not for one after another when they are searched."""
        seen = 0
        for h in range(start, end):
            seen ^= self.words[(((keys[h] >> 32) * self.lines) >> 32) * _LINE]
        self.touched = seen

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
            self.lay_out(self.lines_for(1))
            slot = self.find(key)
        self.insert(slot, key)
        return -1 - slot

    def insert(self, slot: int, key: np.uint64) -> None:
        """Put an entry with nothing but its key at `slot`, and each that stands in the way a slot further."""
        words, rest = self.words, 0
        if self.width == 1:
            while key != 0:
                following = words[slot]
                words[slot] = key
                key = following
                slot += 1
        else:
            while True:
                following, beside = words[2 * slot], words[2 * slot + 1]
                words[2 * slot], words[2 * slot + 1] = key, rest
                slot += 1
                if beside == 0:
                    break
                key, rest = following, beside
        self.end = max(self.end, slot)
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
