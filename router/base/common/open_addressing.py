# SPDX-License-Identifier: Apache-2.0
"""Open addressing in order: entries by 64-bit hash in one sorted array with free slots in between.

The home of an entry is a line of the processor's cache, at a position in the array proportional to the entry's key. If
the line is full, the entry moves to a later slot, and entries stay in the order of their keys. A search therefore ends
at the first greater key; in an array that is 85 % full, that is mostly in the first line. An array grows in one pass
from front to back, in small steps. Keys are `spread` hashes; `hashes_of` restores the hashes. Compiled, see `setup.py`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

U64 = NDArray[np.uint64]

# Each growth moves every entry, from front to back. In a table that only grows, an entry moves eight times in its life.
GROWTH = 1.125
# Free slots behind the last line after a growth, for entries whose home is the last line but that do not fit there.
TAIL_SLOTS = 16
LINE_WORDS = 8
# The number of lines to touch ahead: half of the nearest cache.
TOUCHED_LINES = 256

_LINE = LINE_WORDS
_LOW32 = 0xFFFFFFFF
# Odd 32-bit multipliers (golden ratio; xxHash's PRIME32_2): products stay below 2**64, so plain numpy does not warn.
_MIX1 = 0x9E3779B1
_MIX2 = 0x85EBCA77
_UNMIX1 = pow(_MIX1, -1, 1 << 32)
_UNMIX2 = pow(_MIX2, -1, 1 << 32)


def spread(hashes: U64, out: U64) -> None:
    """Write the keys of the hashes into `out`.

    The mapping is one to one. It spreads the keys evenly over all numbers even if the hashes are small integers, as in
    tests and small engines. The key of 0 is 0.
    """
    for i in range(hashes.shape[0]):
        low = hashes[i] & _LOW32
        high = (hashes[i] >> 32) ^ low
        high = (high * _MIX1) & _LOW32
        high = high ^ (high >> 15)
        high = (high * _MIX2) & _LOW32
        out[i] = (high << 32) | low


def hashes_of(keys: U64) -> U64:
    """Return the hashes of keys; the inverse of `spread`."""
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
    """Return an array of `count` zero words that begins at the start of a line of the processor's cache."""
    room = np.zeros(count + LINE_WORDS, np.uint64)
    start = (-room.ctypes.data // 8) % LINE_WORDS
    return room[start : start + count]


class ArrayMemory:
    """The memory of one array that is replaced by another when it grows: this process's own.

    Attributes:
        half: Which half of the memory has the array in use; 0 if it has no halves.
    """

    def __init__(self) -> None:
        self.half = 0

    def zeros(self, words: int) -> U64:
        """Return an array of zeros that begins at the start of a line, to replace the one in use."""
        return lined_zeros(words)

    def use(self) -> None:
        """Use the last array of `zeros` from now on, and give back the memory of the one before."""


class OrderedSlots:
    """An ordered table of entries in slots of one or two 64-bit words.

    A slot is free if its last word is 0, so with width 1 there is no entry for key 0.

    Attributes:
        words: uint64 array, `width` words for each slot. The first word of a slot is the entry's key.
        width: Words in a slot, 1 or 2.
        lines: The number of lines that are the home of keys. Behind them are slots for entries that did not fit in the
            last lines.
        end: Index behind the last slot that was ever taken in this array; the slot at `end` is free.
        layouts: How often the entries were moved into another array.
    """

    def __init__(self, width: int, slots: int, max_load: float, memory: ArrayMemory | None = None) -> None:
        """Create an empty table.

        Args:
            width: Words in a slot, 1 or 2.
            slots: The number of slots at first, a multiple of the slots in a line.
            max_load: The share of the slots that may be in use before the table grows.
            memory: The memory of the entries; None: this process's own.
        """
        self.width = width
        self.line_slots = LINE_WORDS // width
        self.max_load = max_load
        self.memory = memory or ArrayMemory()
        self.layouts = 0
        self.used = 0
        self.words = np.zeros(0, np.uint64)
        self.lines = self.most = self.end = 0
        self.touched = 0
        self.lay_out(slots // self.line_slots)

    def bytes(self) -> int:
        """Return the size of the array in bytes."""
        return int(self.words.shape[0] * 8)

    def lines_for(self, count: int) -> int:
        """Return the number of lines that the table needs for `count` more entries."""
        if self.used + count <= self.most:
            return int(self.lines)
        slots = int((self.used + count) / self.max_load) + 1
        return max(slots // self.line_slots + 1, int(self.lines * GROWTH))

    def reserve(self, count: int) -> None:
        """Make room for `count` more entries."""
        lines = self.lines_for(count)
        if lines != self.lines:
            self.lay_out(lines)

    def lay_out(self, lines: int) -> None:
        """Move all entries into an array with this many lines."""
        self.take(self.laid_out(lines), lines)

    def laid_out(self, lines: int) -> U64:
        """Return all entries in a new array with this many lines, for `take`."""
        slots = lines * self.line_slots
        end = max(self.end_with(lines), slots)
        # Reserve as many free slots again as entries have overflowed into behind the last line. Otherwise keys that
        # overflow this much would make the table grow each time.
        new = self.memory.zeros((2 * end - slots + TAIL_SLOTS) * self.width)
        self.copy_to(new, lines)
        return new

    def take(self, laid_out: U64, lines: int) -> None:
        """Use the entries that were laid out in an array with this many lines."""
        slots = lines * self.line_slots
        self.words, self.lines = laid_out, lines
        self.end = (laid_out.shape[0] // self.width - TAIL_SLOTS + slots) // 2
        self.most = int(slots * self.max_load)
        self.layouts += 1
        self.memory.use()

    def read_from(self, words: U64, lines: int) -> None:
        """Look entries up in this array, which another table has laid out with this many lines."""
        self.words, self.lines = words, lines

    def home(self, key: np.uint64) -> int:
        """Return the first slot of the home line of a key."""
        return int((((key >> 32) * self.lines) >> 32) * self.line_slots)

    def end_with(self, lines: int) -> int:
        """Return the index behind the last entry in an array with this many lines."""
        width, line_slots, end = self.width, self.line_slots, 0
        for i in range(self.end):
            if self.words[i * width + width - 1] != 0:
                home = int((((self.words[i * width] >> 32) * lines) >> 32) * line_slots)
                end = max(end, home) + 1
        return end

    def copy_to(self, new: U64, lines: int) -> None:
        """Copy all entries, in order, to their places in `new`, an array with this many lines."""
        width, line_slots, end = self.width, self.line_slots, 0
        for i in range(self.end):
            if self.words[i * width + width - 1] != 0:
                home = int((((self.words[i * width] >> 32) * lines) >> 32) * line_slots)
                end = max(end, home)
                for k in range(width):
                    new[end * width + k] = self.words[i * width + k]
                end += 1

    def touch(self, keys: U64, start: int, end: int) -> None:
        """Read the first slots at which keys[start:end] may lie, so that later searches find them in the processor's cache.

        No read depends on the result of another. The processor therefore waits for all lines at once instead of for
        each in turn.
        """
        seen = 0
        for h in range(start, end):
            seen ^= self.words[(((keys[h] >> 32) * self.lines) >> 32) * _LINE]
        self.touched = seen

    def find(self, key: np.uint64) -> int:
        """Return the slot of `key`, or the slot that it would take."""
        width, last = self.width, self.width - 1
        i = self.home(key)
        while self.words[i * width + last] != 0 and self.words[i * width] < key:
            i += 1
        return i

    def has(self, slot: int, key: np.uint64) -> bool:
        """Return whether `slot`, a result of `find`, is the slot of `key`."""
        at = slot * self.width
        return bool(self.words[at] == key and self.words[at + self.width - 1] != 0)

    def place(self, key: np.uint64) -> int:
        """Return the slot of `key` if it exists; otherwise insert it at a slot and return -1 - slot.

        The new entry consists of its key alone; its other word is 0, so the caller must set it.
        """
        slot = self.find(key)
        if self.has(slot, key):
            return slot
        if self.used >= self.most or (self.end + 2) * self.width > self.words.shape[0]:
            self.lay_out(self.lines_for(1))
            slot = self.find(key)
        self.insert(slot, key)
        return -1 - slot

    def insert(self, slot: int, key: np.uint64) -> None:
        """Insert an entry that consists of its key alone at `slot`, moving the entries in the way one slot further."""
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
        """Free the slot, and move back by one the entries behind it that are not in their home line."""
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
