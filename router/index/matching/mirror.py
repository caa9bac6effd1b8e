# SPDX-License-Identifier: Apache-2.0
"""The index in memory: which worker holds which block in which place.

`mirror_sync.py` alone writes it: a worker that this process follows from its stream, any other from its log in Redis.
It judges no hits and knows no catalog.
Invariant: a block that a worker holds in several groups or media is one record with several place bits.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvrouter.router.base.common.ids import GPU, TIERS, Place, WorkerKey
from kvrouter.router.base.common.open_addressing import GROWTH, hashes_of
from kvrouter.router.index.matching.cache_writes import CacheWrites
from kvrouter.router.index.matching.mirror_table import BYTES_PER_LINE, BYTES_PER_RECORD, MAX_SLOTS, MirrorTable
from kvrouter.router.model.kvcache.hit_tables import BANK_BITS

# Entries, records and cells looked at in one turn of sweeping: about a millisecond, so that answers are not held up.
SWEEP_BUDGET = 32_768

FIRST_SLOTS = 16


class MirrorFull(Exception):
    """The byte budget does not allow the growth that was needed; the blocks were not added, so they earn no credit."""


class WorkerSlots(msgspec.Struct):
    """The mirror's view of one worker in one epoch: its slots (banks) and the bit index of each of its places."""

    epoch: str
    slots: list[int]
    places: dict[Place, int]
    # Blocks of this epoch that found no room, so that they earn no credit.
    refused_blocks: int = 0


class Mirror:
    """All workers' residency. Single-threaded; every method is synchronous and bounded by its arguments."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self.table = MirrorTable()
        # By slot, shared with the table: how many records, and whether they are to be dropped.
        self._slot_records = np.zeros(FIRST_SLOTS, np.int64)
        self._dead = np.zeros(FIRST_SLOTS, np.uint8)
        self._share_slots()
        self._free_slots: list[int] = []
        self._next_slot = 0
        self._workers: dict[WorkerKey, WorkerSlots] = {}
        # Slots to be dropped, and the entry at which sweeping goes on.
        self._dead_slots = np.zeros(0, np.int64)
        self._sweep_at = 0
        # How often each worker's GPU cache was written lately, for the price of what a prompt pushes out.
        self.writes = CacheWrites()
        # Changes whenever a slot or a place does, so that arrays made from them can be kept until then.
        self.version = 0

    @property
    def entries(self) -> int:
        """(worker, bank, block) in the table, those of dead epochs not yet swept included."""
        return int(self.table.entries)

    @property
    def bytes(self) -> int:
        table = self.table
        return self._bytes(table.slots.lines, table.record_capacity(), table.rows.capacity(), self.slot_count)

    def _bytes(self, lines: int, records: int, rows: int, slots: int) -> int:
        return lines * BYTES_PER_LINE + records * BYTES_PER_RECORD + self.table.rows.room_bytes(rows, slots)

    @property
    def slot_count(self) -> int:
        """One more than the largest slot in use: the length that a row_of_slot array needs."""
        return len(self._slot_records)

    def worker(self, worker: WorkerKey) -> WorkerSlots | None:
        return self._workers.get(worker)

    def begin_epoch(self, worker: WorkerKey, epoch: str) -> None:
        """Void what is known of `worker` at once and start an empty epoch; the old records are swept later."""
        self._void(worker)
        self.writes.of(worker.model).voided(worker)
        self.version += 1
        # Slots come with the first blocks, so that a table without a free one still knows the worker.
        self._workers[worker] = WorkerSlots(epoch, [], {})

    def rename_epoch(self, worker: WorkerKey, epoch: str) -> None:
        """What is known of `worker` is all that its epoch `epoch` begins with."""
        self._workers[worker].epoch = epoch
        self.version += 1

    def forget(self, worker: WorkerKey) -> None:
        """Void what is known of `worker`, which is gone, at once."""
        self._void(worker)
        self.writes.forget(worker)

    def _void(self, worker: WorkerKey) -> None:
        known = self._workers.pop(worker, None)
        if known is None:
            return
        self.version += 1
        self._dead[known.slots] = 1
        self._dead_slots = np.flatnonzero(self._dead)

    def add(self, worker: WorkerKey, place: Place, hashes: NDArray[np.uint64], *, is_news: bool = True) -> None:
        """Add blocks that became resident, or with is_news=False were so before. Media that earn no credit are not
        kept. Raises MirrorFull, having added nothing but the count of what the engine wrote."""
        if place.medium not in TIERS or not len(hashes):
            return
        if place.medium == GPU:
            writes = self.writes.of(worker.model)
            (writes.stored if is_news else writes.known)(worker, len(hashes))
        known = self._workers[worker]
        try:
            index = self._index(known, place)
            self._make_room(len(hashes))
        except MirrorFull:
            known.refused_blocks += len(hashes)
            raise
        slot = known.slots[index // BANK_BITS]
        self.table.add(slot, index % BANK_BITS, hashes)

    def _index(self, known: WorkerSlots, place: Place) -> int:
        index = known.places.get(place)
        if index is None:
            index = len(known.places)
            if index // BANK_BITS == len(known.slots):
                known.slots.append(self._take_slot())
            known.places[place] = index
            self.version += 1
        return index

    def discard(self, worker: WorkerKey, place: Place, hashes: NDArray[np.uint64]) -> None:
        """Blocks stopped being resident; unknown ones are left alone."""
        if place.medium == GPU and len(hashes):
            self.writes.of(worker.model).removed(worker, len(hashes))
        known = self._workers[worker]
        index = known.places.get(place)
        if index is None or not len(hashes):
            return
        slot = known.slots[index // BANK_BITS]
        self.table.discard(slot, index % BANK_BITS, hashes)

    def held(self, worker: WorkerKey, place: Place) -> NDArray[np.uint64]:
        """The hashes that `worker` holds at `place`, in no order. Walks the table: for inspection, not for answers."""
        known = self._workers.get(worker)
        index = None if known is None else known.places.get(place)
        if known is None or index is None:
            return np.empty(0, np.uint64)
        slot = known.slots[index // BANK_BITS]
        out = np.empty(int(self._slot_records[slot]), np.uint64)
        count = self.table.members(slot, index % BANK_BITS, out)
        return hashes_of(out[:count])

    def sweep(self) -> bool:
        """Drop a bounded number of dead records and free slots that have none left; True while more is to do."""
        if not len(self._dead_slots):
            return False
        start = self._sweep_at if self._sweep_at < self.table.slots.end else 0
        self._sweep_at = self.table.sweep(start, self._dead_slots, SWEEP_BUDGET)
        swept = self._dead_slots[self._slot_records[self._dead_slots] == 0]
        if len(swept):
            self._dead[swept] = 0
            self._dead_slots = np.flatnonzero(self._dead)
            self._free_slots += swept.tolist()
        return bool(len(self._dead_slots))

    def _take_slot(self) -> int:
        if self._free_slots:
            return self._free_slots.pop()
        slot = self._next_slot
        if slot == MAX_SLOTS:
            raise MirrorFull(f"more than {MAX_SLOTS} worker slots: fewer workers, or wait until dead epochs are swept")
        if slot == len(self._slot_records):
            table = self.table
            self._check_budget(table.slots.lines, table.record_capacity(), table.rows.capacity(), 2 * slot)
            self._slot_records = np.concatenate([self._slot_records, np.zeros_like(self._slot_records)])
            self._dead = np.concatenate([self._dead, np.zeros_like(self._dead)])
            self._share_slots()
        self._next_slot += 1
        return slot

    def _share_slots(self) -> None:
        table = self.table
        table.slot_records, table.dead = self._slot_records, self._dead
        table.rows.resize(table.rows.capacity(), self.slot_count)

    def _make_room(self, count: int) -> None:
        table = self.table
        lines = table.slots.lines_for(count)
        records = had_records = table.record_capacity()
        room = records - table.records_live
        if room < count:
            records = max(records + count - room, int(records * GROWTH))
        if (lines, records) != (table.slots.lines, had_records):
            self._check_budget(lines, records, table.rows.capacity(), self.slot_count)
            table.resize(lines, records)
        if table.rows.missed:
            self._make_rows()

    def _make_rows(self) -> None:
        """Room for the rows that were missed, unless the budget is spent: without one a block has a list."""
        table = self.table
        had = table.rows.capacity()
        rows = max(had + table.rows.missed, int(had * GROWTH))
        if self._bytes(table.slots.lines, table.record_capacity(), rows, self.slot_count) <= self._budget_bytes:
            table.rows.resize(rows, self.slot_count)

    def _check_budget(self, lines: int, records: int, rows: int, slots: int) -> None:
        """Raises MirrorFull."""
        if self._bytes(lines, records, rows, slots) > self._budget_bytes:
            raise MirrorFull(f"the mirror's budget of {self._budget_bytes} bytes is spent: raise mirror_budget_bytes")
