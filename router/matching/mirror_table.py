# SPDX-License-Identifier: Apache-2.0
"""The mirror's table: open addressing on 64-bit block hashes, linear probing, no tombstones.

An entry is a key and its head: the first of its records, or a row of `holder_rows.py`. A record is one uint64, so that
visiting it is one memory access: next record (upper 32 bits), worker slot (16), place bits (16). A block that many
workers hold has a row, because a list of a thousand records is a thousand cache misses. Compiled, see `setup.py`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvrouter.router.common.open_addressing import close_gap, home, homes
from kvrouter.router.matching.holder_rows import HolderRows

U64 = NDArray[np.uint64]
U16 = NDArray[np.uint16]
I32 = NDArray[np.int32]

EMPTY = -1
# Heads from here down are rows: the first, the second ...
FIRST_ROW = -2
MIN_CAPACITY = 1024

# Hashes with a row that are gathered together: what they need of rows and answer stays in the nearest cache.
TILE_HASHES = 64

BYTES_PER_KEY = 12
BYTES_PER_RECORD = 8

_LOW16 = 0xFFFF
_LOW32 = 0xFFFFFFFF
_HIGH32 = 0xFFFFFFFF00000000
_END = 0xFFFFFFFF


def record_next(record: np.uint64) -> int:
    """The record after this one, or EMPTY."""
    link = record >> 32
    return EMPTY if link == _END else int(link)


def record_slot(record: np.uint64) -> int:
    return int((record >> 16) & _LOW16)


def link_to(record: np.uint64 | int, following: int) -> np.uint64 | int:
    """The record with another successor; EMPTY ends the list."""
    rest = record & _LOW32
    if following == EMPTY:
        return rest | _HIGH32
    link = following
    return rest | (link << 32)


class MirrorTable:
    """Keys, records and rows. Room for keys and records must be made before blocks are added; a list that finds no row
    stays a list."""

    def __init__(self) -> None:
        self.keys = np.zeros(MIN_CAPACITY, np.uint64)
        self.heads = np.full(MIN_CAPACITY, EMPTY, np.int32)
        self.records = np.zeros(MIN_CAPACITY, np.uint64)
        self.rows = HolderRows()
        # By slot: how many records and cells, and whether they are to be dropped. The mirror's, which lets them grow.
        self.slot_records = np.zeros(0, np.int64)
        self.dead = np.zeros(0, np.uint8)
        self.keys_used = 0
        self.records_used = 0
        # Those of lists; `entries` has the cells of rows too.
        self.records_live = 0
        self.free_head = EMPTY
        # Room for `gather`: the first record of each hash.
        self.firsts = np.zeros(0, np.int64)

    def key_capacity(self) -> int:
        return self.keys.shape[0]

    def record_capacity(self) -> int:
        return self.records.shape[0]

    def entries(self) -> int:
        """Pairs of slot and block."""
        return self.records_live + self.rows.cells_live

    def resize(self, keys: int, records: int) -> None:
        """Room for this many entries and records, no fewer than there are."""
        if keys != self.keys.shape[0]:
            old_keys, old_heads = self.keys, self.heads
            self.keys = np.empty(keys, np.uint64)
            self.heads = np.full(keys, EMPTY, np.int32)
            self.take_over(old_keys, old_heads)
        if records != self.records.shape[0]:
            grown = np.empty(records, np.uint64)
            grown[: self.records.shape[0]] = self.records
            self.records = grown

    def take_over(self, old_keys: U64, old_heads: I32) -> None:
        """Move all entries into the empty arrays; records stay where they are."""
        capacity = self.keys.shape[0]
        for j in range(old_keys.shape[0]):
            if old_heads[j] == EMPTY:
                continue
            i = self.probe(old_keys[j], home(old_keys[j], capacity))
            self.keys[i] = old_keys[j]
            self.heads[i] = old_heads[j]

    def probe(self, key: np.uint64, i: int) -> int:
        """From its home `i` on: the index of `key`, or of the free entry where it would go."""
        capacity = self.keys.shape[0]
        while self.heads[i] != EMPTY and self.keys[i] != key:
            i += 1
            if i == capacity:
                i = 0
        return i

    def find(self, key: np.uint64) -> int:
        """The head of the entry of `key`, or EMPTY."""
        return int(self.heads[self.probe(key, home(key, self.keys.shape[0]))])

    def add(self, slot: int, bit: int, hashes: U64) -> None:
        """Set place `bit` of worker `slot` for every hash. Room for len(hashes) keys and records must be there."""
        heads, records = self.heads, self.records
        capacity = self.keys.shape[0]
        mask = 1 << bit
        fresh = (slot << 16) | mask
        most = self.rows.threshold()
        for h in range(hashes.shape[0]):
            key = hashes[h]
            i = self.probe(key, home(key, capacity))
            first = int(heads[i])
            if first == EMPTY:
                self.keys[i] = key
                self.keys_used += 1
            at = first
            holders = 0
            while at > EMPTY and record_slot(records[at]) != slot:
                at = record_next(records[at])
                holders += 1
            if at > EMPTY:
                records[at] |= mask
                continue
            if first <= FIRST_ROW or (holders >= most and self.list_to_row(i)):
                if self.rows.add(FIRST_ROW - heads[i], slot, mask):
                    self.slot_records[slot] += 1
                continue
            at = self.take_record()
            records[at] = link_to(fresh, first)
            heads[i] = at
            self.slot_records[slot] += 1

    def take_record(self) -> int:
        """A record that nobody uses; there must be one."""
        at = self.free_head
        if at != EMPTY:
            self.free_head = record_next(self.records[at])
        else:
            at = self.records_used
            self.records_used += 1
        self.records_live += 1
        return at

    def free_record(self, at: int) -> None:
        self.records[at] = link_to(self.records[at], self.free_head)
        self.free_head = at
        self.records_live -= 1

    def list_to_row(self, index: int) -> bool:
        """Move the holders of entry `index` into a row; False: there is none."""
        row = self.rows.take()
        if row < 0:
            return False
        at = int(self.heads[index])
        while at != EMPTY:
            record = self.records[at]
            following = record_next(record)
            self.rows.add(row, record_slot(record), record & _LOW16)
            self.free_record(at)
            at = following
        self.heads[index] = FIRST_ROW - row
        return True

    def row_to_list(self, index: int) -> None:
        """Move the holders of entry `index` into a list, if there is room for their records."""
        row = FIRST_ROW - self.heads[index]
        if self.records.shape[0] - self.records_live < self.rows.holders[row]:
            return
        first = EMPTY
        for slot in range(self.rows.slots):
            bits = int(self.rows.cells[row, slot])
            if bits != 0:
                self.rows.discard(row, slot, bits)
                at = self.take_record()
                self.records[at] = link_to((slot << 16) | bits, first)
                first = at
        self.heads[index] = first
        self.rows.give_back(row)

    def drop_cell(self, index: int, slot: int, bits: int) -> bool:
        """Clear place bits of a slot of entry `index`, which has a row; True when that emptied the entry."""
        row = FIRST_ROW - self.heads[index]
        if not self.rows.discard(row, slot, bits):
            return False
        self.slot_records[slot] -= 1
        if self.rows.holders[row] == 0:
            self.rows.give_back(row)
            self.drop_entry(index)
            return True
        if self.rows.too_few(row):
            self.row_to_list(index)
        return False

    def drop_record(self, index: int, before: int, at: int) -> bool:
        """Unlink record `at` of entry `index`; True when that emptied the entry (another may now stand there)."""
        record = self.records[at]
        following = record_next(record)
        self.free_record(at)
        self.slot_records[record_slot(record)] -= 1
        if before != EMPTY:
            self.records[before] = link_to(self.records[before], following)
            return False
        self.heads[index] = following
        if following != EMPTY:
            return False
        self.drop_entry(index)
        return True

    def drop_entry(self, index: int) -> None:
        close_gap(self.keys, self.heads, EMPTY, index)
        self.keys_used -= 1

    def discard(self, slot: int, bit: int, hashes: U64) -> None:
        """Clear place `bit` of worker `slot` for every hash; absent ones are left alone."""
        records = self.records
        capacity = self.keys.shape[0]
        mask = 1 << bit
        for h in range(hashes.shape[0]):
            i = self.probe(hashes[h], home(hashes[h], capacity))
            before = EMPTY
            at = int(self.heads[i])
            if at <= FIRST_ROW:
                self.drop_cell(i, slot, mask)
                continue
            while at != EMPTY and record_slot(records[at]) != slot:
                before = at
                at = record_next(records[at])
            if at == EMPTY or records[at] & mask == 0:
                continue
            records[at] ^= mask
            if records[at] & _LOW16 == 0:
                self.drop_record(i, before, at)

    def sweep(self, start: int, dead_slots: NDArray[np.int64], budget: int) -> int:
        """Drop what dead slots hold in the entries from `start` on, until `budget` entries, records and cells were
        looked at; returns where to go on. An entry shifted to before `start` is met in a later pass."""
        i = start
        capacity = self.keys.shape[0]
        while i < capacity and budget > 0:
            head = int(self.heads[i])
            budget -= 1
            before = EMPTY
            emptied = False
            if head <= FIRST_ROW:
                for d in range(dead_slots.shape[0]):
                    budget -= 1
                    emptied = self.drop_cell(i, dead_slots[d], _LOW16)
                    # Emptied, or a list now.
                    if self.heads[i] != head:
                        break
            at = EMPTY if emptied else int(self.heads[i])
            while at > EMPTY:
                budget -= 1
                following = record_next(self.records[at])
                if self.dead[record_slot(self.records[at])]:
                    emptied = self.drop_record(i, before, at)
                    if emptied:
                        break
                else:
                    before = at
                at = following
            if not emptied:
                i += 1
        return i

    def gather(self, hashes: U64, row_of_slot: I32, rows: U16) -> None:
        """Write the place bits of every hash into rows[row_of_slot[slot], i]; rows must be zero."""
        if hashes.shape[0] > self.firsts.shape[0]:
            self.firsts = np.empty(2 * hashes.shape[0], np.int64)
        # The hottest loops of all. Entries first, then records: so the processor waits for many of them at once.
        records, firsts = self.records, self.firsts
        homes(hashes, self.keys.shape[0], firsts)
        for h in range(hashes.shape[0]):
            firsts[h] = self.heads[self.probe(hashes[h], firsts[h])]
        has_rows = False
        for h in range(hashes.shape[0]):
            if firsts[h] < 0:
                has_rows = has_rows or firsts[h] != EMPTY
                continue
            link = firsts[h]
            while link != _END:
                record = records[link]
                row = row_of_slot[(record >> 16) & _LOW16]
                if row >= 0:
                    rows[row, h] = record & _LOW16
                link = record >> 32
        if has_rows:
            self.gather_rows(hashes.shape[0], row_of_slot, rows)

    def gather_rows(self, count: int, row_of_slot: I32, rows: U16) -> None:
        """The part of `gather` that stands in rows, after its first loops."""
        firsts, cells = self.firsts, self.rows.cells
        slots = min(row_of_slot.shape[0], self.rows.slots)
        for start in range(0, count, TILE_HASHES):
            end = min(start + TILE_HASHES, count)
            for slot in range(slots):
                row = row_of_slot[slot]
                if row < 0:
                    continue
                for h in range(start, end):
                    if firsts[h] <= FIRST_ROW:
                        rows[row, h] = cells[FIRST_ROW - firsts[h], slot]

    def any_resident(self, hashes: U64, row_of_slot: I32) -> bool:
        """Whether any worker that has a row holds any of these blocks anywhere."""
        for h in range(hashes.shape[0]):
            at = self.find(hashes[h])
            if at <= FIRST_ROW:
                for slot in range(min(row_of_slot.shape[0], self.rows.slots)):
                    if row_of_slot[slot] >= 0 and self.rows.cells[FIRST_ROW - at, slot] != 0:
                        return True
            while at > EMPTY:
                if row_of_slot[record_slot(self.records[at])] >= 0:
                    return True
                at = record_next(self.records[at])
        return False

    def members(self, slot: int, bit: int, out: U64) -> int:
        """Write the hashes that worker `slot` holds at place `bit` into `out`, as many as fit; returns how many there
        are."""
        mask = 1 << bit
        count = 0
        for i in range(self.keys.shape[0]):
            at = int(self.heads[i])
            bits = 0
            if at <= FIRST_ROW:
                bits = int(self.rows.cells[FIRST_ROW - at, slot])
            while at > EMPTY:
                record = self.records[at]
                if record_slot(record) == slot:
                    bits = int(record)
                    break
                at = record_next(record)
            if bits & mask != 0:
                if count < out.shape[0]:
                    out[count] = self.keys[i]
                count += 1
        return count
