# SPDX-License-Identifier: Apache-2.0
"""The mirror's table: the workers that hold each block, by block hash and in order (`open_addressing.py`).

An entry is 16 bytes, its key and its first record, so that a block with one holder is one memory access. A record is
one uint64: next record (upper 32 bits), worker slot (16), place bits (16). A block that many workers hold has a row of
`holder_rows.py` instead, because a list of a thousand records is a thousand cache misses. Compiled, see `setup.py`.

Another process may read the table (`shared_table.py`): it changes only between `begin` and `end`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvrouter.router.base.common.open_addressing import LINE_WORDS, TOUCHED_LINES, OrderedSlots, spread
from kvrouter.router.base.common.seqlock import Seqlock
from kvrouter.router.index.matching.holder_rows import HolderRows
from kvrouter.router.index.matching.table_memory import Header, Part, TableMemory

U64 = NDArray[np.uint64]
U16 = NDArray[np.uint16]
I32 = NDArray[np.int32]

MIN_CAPACITY = 1024
# At this load three searches in four end in the first line.
MAX_LOAD = 0.85

# Hashes with a row that are gathered together, so that their parts of the rows and the answer stay in the nearest
# cache.
TILE_HASHES = 64

BYTES_PER_LINE = 64
BYTES_PER_RECORD = 8

_LOW16 = 0xFFFF
_LOW32 = 0xFFFFFFFF
# A link to no record.
_END = 0xFFFFFFFF
_LINE = LINE_WORDS
# The lower half of an entry's word if the entry has a row, whose number is the upper half. No worker has the last slot,
# so no record looks like that.
_ROW = 0xFFFFFFFF
MAX_SLOTS = 0xFFFF


def slot_of(record: np.uint64 | int) -> int:
    """Return the worker slot of a record."""
    return int((record >> 16) & _LOW16)


def with_link(record: np.uint64 | int, link: np.uint64 | int) -> np.uint64 | int:
    """Return the record with another successor."""
    rest = record & _LOW32
    return rest | (link << 32)


class MirrorTable:
    """The entries, records and rows of the table.

    Room for entries and records must be made before blocks are added; a list that finds no row stays a list.
    """

    def __init__(self, memory: TableMemory) -> None:
        self.memory = memory
        self.lock = Seqlock(memory.header[Header.VERSION : Header.LAYOUT])
        self.slots = OrderedSlots(2, MIN_CAPACITY, MAX_LOAD, memory.arrays[Part.ENTRIES])
        self.records = memory.arrays[Part.RECORDS].zeros(MIN_CAPACITY)
        memory.arrays[Part.RECORDS].use()
        self.rows = HolderRows(memory.arrays[Part.ROWS])
        # The number of layouts that the header describes.
        self.layouts_shown = 0
        # For each worker slot, its number of blocks, and whether they are to be dropped. The arrays are the mirror's,
        # which replaces them by longer ones.
        self.slot_records = np.zeros(0, np.int64)
        self.dead = np.zeros(0, np.uint8)
        # The number of pairs of worker slot and block.
        self.entries = 0
        # `records` has those behind the first of a list: how many were ever used, how many are in use, and the first
        # free one.
        self.records_used = 0
        self.records_live = 0
        self.free_record = _END
        # Room for `gather`: for each hash its key, and the word of its entry, 0 if there is no entry.
        self.keys = np.zeros(0, np.uint64)
        self.firsts = np.zeros(0, np.uint64)
        self.begin()
        self.end()

    def begin(self) -> None:
        """Begin a section of changes, which a reader sees all or not at all."""
        self.lock.begin()

    def end(self) -> None:
        """End a section of changes."""
        if self.slots.layouts + self.rows.layouts + self.records.shape[0] != self.layouts_shown:
            self.show_layout()
        self.lock.end()

    def show_layout(self) -> None:
        """Describe the arrays in the header."""
        self.layouts_shown = self.slots.layouts + self.rows.layouts + self.records.shape[0]
        header = self.memory.header
        header[Header.LAYOUT] += np.uint64(1)
        header[Header.LINES] = self.slots.lines
        header[Header.ROW_SLOTS] = self.rows.slots
        for part, memory in self.memory.arrays.items():
            header[Header.HALVES + part] = memory.half

    def record_capacity(self) -> int:
        """Return the number of records for which there is room."""
        return int(self.records.shape[0])

    def resize(self, lines: int, records: int) -> None:
        """Make room for this many lines of entries and this many records, no fewer than there are.

        A reader goes on with the arrays that are in use while the new ones are laid out.
        """
        if lines != self.slots.lines:
            words = self.slots.laid_out(lines)
            self.begin()
            self.slots.take(words, lines)
            self.end()
        if records != self.records.shape[0]:
            memory = self.memory.arrays[Part.RECORDS]
            grown = memory.zeros(records)
            grown[: self.records.shape[0]] = self.records
            self.begin()
            self.records = grown
            memory.use()
            self.end()

    def resize_rows(self, rows: int, slots: int) -> None:
        """Make room for this many rows and worker slots, no fewer than there are, as `resize` does."""
        cells = self.rows.laid_out(rows, slots)
        self.begin()
        self.rows.take_cells(cells, slots)
        self.end()

    def read_from(self, lines: int, words: U64, records: U64, cells: U16, slots: int) -> None:
        """Look blocks up in these arrays of another process's table from now on.

        Args:
            lines: The number of lines that are the home of keys.
            words: The entries.
            records: The records.
            cells: The rows.
            slots: The worker slots of a row.
        """
        self.slots.read_from(words, lines)
        self.records = records
        self.rows.read_from(cells, slots)

    def find(self, key: np.uint64) -> int:
        """Return the word of the entry of `key`, or 0 if there is none."""
        i = self.slots.find(key)
        return int(self.slots.words[2 * i + 1]) if self.slots.has(i, key) else 0

    def add(self, slot: int, bit: int, hashes: U64) -> None:
        """Set place `bit` of worker `slot` for every hash. Room for len(hashes) entries and records must be there."""
        records = self.records
        mask = 1 << bit
        fresh = (slot << 16) | mask
        most = self.rows.threshold()
        keys = np.empty(hashes.shape[0], np.uint64)
        spread(hashes, keys)
        for start in range(0, keys.shape[0], TOUCHED_LINES):
            end = min(start + TOUCHED_LINES, keys.shape[0])
            self.slots.touch(keys, start, end)
            for h in range(start, end):
                i = self.slots.place(keys[h])
                if i < 0:
                    self.slots.words[2 * (-1 - i) + 1] = with_link(fresh, _END)
                    self.count(slot)
                    continue
                first = self.slots.words[2 * i + 1]
                if first & _LOW32 != _ROW:
                    if slot_of(first) == slot:
                        self.slots.words[2 * i + 1] = first | mask
                        continue
                    holders = 1
                    link = first >> 32
                    while link != _END and slot_of(records[link]) != slot:
                        link = records[link] >> 32
                        holders += 1
                    if link != _END:
                        records[link] |= mask
                        continue
                    if holders < most or not self.list_to_row(i):
                        at = self.take_record()
                        records[at] = with_link(fresh, first >> 32)
                        self.slots.words[2 * i + 1] = with_link(first, at)
                        self.count(slot)
                        continue
                if self.rows.add(self.slots.words[2 * i + 1] >> 32, slot, mask):
                    self.count(slot)

    def count(self, slot: int) -> None:
        """Count a block more of a worker slot."""
        self.slot_records[slot] += 1
        self.entries += 1

    def uncount(self, slot: int) -> None:
        """Count a block less of a worker slot."""
        self.slot_records[slot] -= 1
        self.entries -= 1

    def take_record(self) -> int:
        """Return a free record; there must be one."""
        at = self.free_record
        if at != _END:
            self.free_record = self.records[at] >> 32
        else:
            at = self.records_used
            self.records_used += 1
        self.records_live += 1
        return at

    def give_back(self, at: int) -> None:
        """Free a record."""
        self.records[at] = with_link(0, self.free_record)
        self.free_record = at
        self.records_live -= 1

    def list_to_row(self, index: int) -> bool:
        """Move the holders of entry `index` into a row, and return whether there was a free one."""
        row = self.rows.take()
        if row < 0:
            return False
        record = self.slots.words[2 * index + 1]
        self.rows.add(row, slot_of(record), record & _LOW16)
        link = record >> 32
        while link != _END:
            record = self.records[link]
            self.rows.add(row, slot_of(record), record & _LOW16)
            self.give_back(link)
            link = record >> 32
        self.slots.words[2 * index + 1] = with_link(_ROW, row)
        return True

    def row_to_list(self, index: int) -> None:
        """Move the holders of entry `index`, at least one, into a list, if there is room for their records."""
        row = self.slots.words[2 * index + 1] >> 32
        if self.records.shape[0] - self.records_live < self.rows.holders[row] - 1:
            return
        record = with_link(0, 0)
        for slot in range(self.rows.slots):
            bits = int(self.rows.cells[row, slot])
            if bits == 0:
                continue
            self.rows.discard(row, slot, bits)
            link = _END
            if record != 0:
                link = self.take_record()
                self.records[link] = record
            record = with_link((slot << 16) | bits, link)
        self.slots.words[2 * index + 1] = record
        self.rows.give_back(row)

    def drop_cell(self, index: int, slot: int, bits: int) -> bool:
        """Clear place bits of a slot of entry `index`, which has a row, and return whether that emptied the entry."""
        row = self.slots.words[2 * index + 1] >> 32
        if not self.rows.discard(row, slot, bits):
            return False
        self.uncount(slot)
        if self.rows.holders[row] == 0:
            self.rows.give_back(row)
            self.slots.remove(index)
            return True
        if self.rows.too_few(row):
            self.row_to_list(index)
        return False

    def drop_first(self, index: int) -> bool:
        """Drop the first record of entry `index`, and return whether that emptied the entry.

        Another entry may stand at `index` after the entry was emptied.
        """
        record = self.slots.words[2 * index + 1]
        self.uncount(slot_of(record))
        link = record >> 32
        if link == _END:
            self.slots.remove(index)
            return True
        self.slots.words[2 * index + 1] = self.records[link]
        self.give_back(link)
        return False

    def drop_record(self, index: int, before: int, at: int) -> None:
        """Drop record `at` of entry `index`, which is not its first record.

        Args:
            index: The entry.
            before: The record before, _END if that is the first one.
            at: The record.
        """
        following = self.records[at] >> 32
        self.uncount(slot_of(self.records[at]))
        self.give_back(at)
        if before == _END:
            self.slots.words[2 * index + 1] = with_link(self.slots.words[2 * index + 1], following)
        else:
            self.records[before] = with_link(self.records[before], following)

    def discard(self, slot: int, bit: int, hashes: U64) -> None:
        """Clear place `bit` of worker `slot` for every hash; absent ones are left alone."""
        records = self.records
        mask = 1 << bit
        keys = np.empty(hashes.shape[0], np.uint64)
        spread(hashes, keys)
        for start in range(0, keys.shape[0], TOUCHED_LINES):
            end = min(start + TOUCHED_LINES, keys.shape[0])
            self.slots.touch(keys, start, end)
            for h in range(start, end):
                i = self.slots.find(keys[h])
                if not self.slots.has(i, keys[h]):
                    continue
                record = self.slots.words[2 * i + 1]
                if record & _LOW32 == _ROW:
                    self.drop_cell(i, slot, mask)
                    continue
                if slot_of(record) == slot:
                    if record & _LOW16 == mask:
                        self.drop_first(i)
                    else:
                        # Not `& ~mask`, because uncompiled `~mask` is a negative int and no uint64.
                        self.slots.words[2 * i + 1] = record ^ (record & mask)
                    continue
                before = _END
                at = record >> 32
                while at != _END and slot_of(records[at]) != slot:
                    before = at
                    at = records[at] >> 32
                if at == _END:
                    continue
                if records[at] & _LOW16 == mask:
                    self.drop_record(i, before, at)
                else:
                    records[at] ^= records[at] & mask

    def sweep(self, start: int, dead_slots: NDArray[np.int64], budget: int) -> int:
        """Drop the blocks of dead slots in the entries from `start` on, and return the entry at which to continue.

        The sweep ends when `budget` entries, records and cells were looked at. An entry that shifts to before `start`
        is met in a later pass.
        """
        i = start
        while i < self.slots.end and budget > 0:
            budget -= 1
            word = self.slots.words[2 * i + 1]
            emptied = False
            if word != 0 and word & _LOW32 == _ROW:
                for d in range(dead_slots.shape[0]):
                    budget -= 1
                    emptied = self.drop_cell(i, dead_slots[d], _LOW16)
                    # The entry was emptied, or it has a list now.
                    if self.slots.words[2 * i + 1] != word:
                        break
                word = 0 if emptied else self.slots.words[2 * i + 1]
            if word != 0 and word & _LOW32 != _ROW:
                while not emptied and self.dead[slot_of(self.slots.words[2 * i + 1])]:
                    budget -= 1
                    emptied = self.drop_first(i)
                if not emptied:
                    budget -= self.sweep_list(i)
            if not emptied:
                i += 1
        return i

    def sweep_list(self, index: int) -> int:
        """Drop the dead records of entry `index` except the first, and return how many records were looked at."""
        looked = 0
        before = _END
        at = self.slots.words[2 * index + 1] >> 32
        while at != _END:
            looked += 1
            following = self.records[at] >> 32
            if self.dead[slot_of(self.records[at])]:
                self.drop_record(index, before, at)
            else:
                before = at
            at = following
        return looked

    def gather(self, hashes: U64, row_of_slot: I32, rows: U16) -> None:
        """Write the place bits of every hash into rows[row_of_slot[slot], i]; rows must be zero."""
        if hashes.shape[0] > self.firsts.shape[0]:
            self.keys = np.empty(2 * hashes.shape[0], np.uint64)
            self.firsts = np.empty(2 * hashes.shape[0], np.uint64)
        # These are the hottest loops of all, so they use locals.
        words, records, keys, firsts = self.slots.words, self.records, self.keys, self.firsts
        lines = self.slots.lines
        # In a table that another process changes meanwhile, a record may have a slot that is new, and a list may seem to
        # go on with free records.
        known = row_of_slot.shape[0]
        most = max(known, self.rows.slots)
        spread(hashes, keys)
        # This loop does the same as `touch`, without a call, and into the array that is written next.
        for h in range(hashes.shape[0]):
            firsts[h] = words[(((keys[h] >> 32) * lines) >> 32) * _LINE]
        for h in range(hashes.shape[0]):
            key = keys[h]
            i = (((key >> 32) * lines) >> 32) * _LINE
            while words[i + 1] != 0 and words[i] < key:
                i += 2
            firsts[h] = words[i + 1] if words[i] == key else 0
        has_rows = False
        for h in range(hashes.shape[0]):
            record = firsts[h]
            if record & _LOW32 == _ROW:
                has_rows = True
                continue
            left = most
            while record != 0 and left > 0:
                left -= 1
                slot = (record >> 16) & _LOW16
                row = row_of_slot[slot] if slot < known else -1
                if row >= 0:
                    rows[row, h] = record & _LOW16
                link = record >> 32
                record = 0 if link == _END else records[link]
        if has_rows:
            self.gather_rows(hashes.shape[0], row_of_slot, rows)

    def gather_rows(self, count: int, row_of_slot: I32, rows: U16) -> None:
        """Write the place bits of the hashes that have a row, after the first loops of `gather`."""
        firsts, cells = self.firsts, self.rows.cells
        slots = min(row_of_slot.shape[0], self.rows.slots)
        for start in range(0, count, TILE_HASHES):
            end = min(start + TILE_HASHES, count)
            for slot in range(slots):
                row = row_of_slot[slot]
                if row < 0:
                    continue
                for h in range(start, end):
                    if firsts[h] & _LOW32 == _ROW:
                        rows[row, h] = cells[firsts[h] >> 32, slot]

    def any_resident(self, hashes: U64, row_of_slot: I32) -> bool:
        """Return whether any worker that has a row in `row_of_slot` holds any of these blocks anywhere."""
        keys = np.empty(hashes.shape[0], np.uint64)
        spread(hashes, keys)
        for h in range(keys.shape[0]):
            record = self.find(keys[h])
            if record & _LOW32 == _ROW:
                for slot in range(min(row_of_slot.shape[0], self.rows.slots)):
                    if row_of_slot[slot] >= 0 and self.rows.cells[record >> 32, slot] != 0:
                        return True
                continue
            while record != 0:
                if row_of_slot[slot_of(record)] >= 0:
                    return True
                link = record >> 32
                record = 0 if link == _END else self.records[link]
        return False

    def members(self, slot: int, bit: int, out: U64) -> int:
        """Write the keys of the blocks of worker `slot` at place `bit` into `out`, as many as fit.

        Return how many there are.
        """
        mask = 1 << bit
        count = 0
        for i in range(self.slots.end):
            record = self.slots.words[2 * i + 1]
            bits = 0
            if record & _LOW32 == _ROW:
                bits = int(self.rows.cells[record >> 32, slot])
                record = 0
            while record != 0:
                if slot_of(record) == slot:
                    bits = int(record)
                    break
                link = record >> 32
                record = 0 if link == _END else self.records[link]
            if bits & mask != 0:
                if count < out.shape[0]:
                    out[count] = self.slots.words[2 * i]
                count += 1
        return count
