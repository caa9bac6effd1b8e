# SPDX-License-Identifier: Apache-2.0
"""The index in memory: which worker holds which block in which place.

`mirror_sync.py` alone writes it. The blocks of a worker that this process follows come from the worker's event stream,
those of any other worker from its log in Redis. The mirror does not compute how much of a prompt a worker would reuse
(`judge.py` does), so it needs no catalog of an engine's groups.

Invariant: a block that a worker holds in several groups or media is one record with several place bits.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvrouter.contract.tiers import MEDIA
from kvrouter.router.base.common.ids import GPU, Place, WorkerKey
from kvrouter.router.base.common.open_addressing import GROWTH, hashes_of
from kvrouter.router.index.matching.cache_writes import CacheWrites
from kvrouter.router.index.matching.mirror_table import BYTES_PER_LINE, BYTES_PER_RECORD, MAX_SLOTS, MirrorTable
from kvrouter.router.index.matching.table_memory import TableMemory
from kvrouter.router.model.kvcache.hit_tables import BANK_BITS

# Entries, records and cells looked at in one turn of sweeping: about a millisecond, so that answers are not held up.
SWEEP_BUDGET = 32_768

FIRST_SLOTS = 16


class MirrorFull(Exception):
    """A growth that the mirror's bounds do not allow. The blocks were not added, so they earn no credit."""


class WorkerSlots(msgspec.Struct):
    """The mirror's view of one worker in one epoch."""

    epoch: str
    # The worker's slots, one for each bank.
    slots: list[int]
    # The index of each place of the worker (a KV cache group on a medium): bit `index % BANK_BITS` of bank
    # `index // BANK_BITS` shows that a block is resident there.
    places: dict[Place, int]
    # Blocks of this epoch that found no room, so that they earn no credit.
    refused_blocks: int = 0


class Mirror:
    """The residency of all workers.

    It is single-threaded; every method is synchronous and bounded by its arguments.
    """

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self.table = MirrorTable(TableMemory())
        # For each slot, shared with the table: its number of records, and whether they are to be dropped.
        self._slot_records = np.zeros(FIRST_SLOTS, np.int64)
        self._dead = np.zeros(FIRST_SLOTS, np.uint8)
        self._share_slots()
        self._free_slots: list[int] = []
        self._next_slot = 0
        self._workers: dict[WorkerKey, WorkerSlots] = {}
        # The slots to be dropped, and the entry at which sweeping continues.
        self._dead_slots = np.zeros(0, np.int64)
        self._sweep_at = 0
        # How often each worker's GPU cache was written lately, for the price of the blocks that a prompt pushes out.
        self.writes = CacheWrites()
        # A number that changes whenever a slot or a place does, so that arrays made from them can be kept until then.
        self.version = 0

    @property
    def entries(self) -> int:
        """Number of records in the table: one for each block, worker and bank (a group of 16 of its places).

        The records of ended epochs count until they are swept.
        """
        return int(self.table.entries)

    @property
    def bytes(self) -> int:
        """Memory of the table, as compared with the budget."""
        table = self.table
        return self._bytes(table.slots.lines, table.record_capacity(), table.rows.capacity(), self.slot_count)

    def _bytes(self, lines: int, records: int, rows: int, slots: int) -> int:
        return lines * BYTES_PER_LINE + records * BYTES_PER_RECORD + self.table.rows.room_bytes(rows, slots)

    @property
    def slot_count(self) -> int:
        """Length that a row_of_slot array needs, which exceeds the largest slot in use."""
        return len(self._slot_records)

    def worker(self, worker: WorkerKey) -> WorkerSlots | None:
        """Return the mirror's view of a worker, or None if the mirror does not have the worker."""
        return self._workers.get(worker)

    def begin_epoch(self, worker: WorkerKey, epoch: str) -> None:
        """Void the blocks of `worker` at once and start an empty epoch. The old records are swept later."""
        self._void(worker)
        self.writes.of(worker.model).voided(worker)
        self.version += 1
        # A worker gets its slots with its first blocks, so the mirror knows it even while the table has no free slot.
        self._workers[worker] = WorkerSlots(epoch, [], {})

    def rename_epoch(self, worker: WorkerKey, epoch: str) -> None:
        """Take the known blocks of `worker` as the ones with which its epoch `epoch` begins."""
        self._workers[worker].epoch = epoch
        self.version += 1

    def forget(self, worker: WorkerKey) -> None:
        """Void the blocks of `worker`, which is gone, at once."""
        self._void(worker)
        self.writes.forget(worker)

    def _void(self, worker: WorkerKey) -> None:
        worker_slots = self._workers.pop(worker, None)
        if worker_slots is None:
            return
        self.version += 1
        self._dead[worker_slots.slots] = 1
        self._dead_slots = np.flatnonzero(self._dead)

    def add(self, worker: WorkerKey, place: Place, hashes: NDArray[np.uint64], *, is_news: bool = True) -> None:
        """Add blocks that became resident, or with is_news=False that were resident before.

        Media that earn no credit are not kept. Raises MirrorFull, in which case nothing is added except the count of
        blocks that the engine wrote.
        """
        if place.medium not in MEDIA or not len(hashes):
            return
        if place.medium == GPU:
            writes = self.writes.of(worker.model)
            (writes.stored if is_news else writes.known)(worker, len(hashes))
        worker_slots = self._workers[worker]
        try:
            index = self._index(worker_slots, place)
            self._make_room(len(hashes))
        except MirrorFull:
            worker_slots.refused_blocks += len(hashes)
            raise
        slot = worker_slots.slots[index // BANK_BITS]
        self.table.begin()
        self.table.add(slot, index % BANK_BITS, hashes)
        self.table.end()

    def _index(self, worker_slots: WorkerSlots, place: Place) -> int:
        """Return the bit index of a place, which is new if the place is."""
        index = worker_slots.places.get(place)
        if index is None:
            index = len(worker_slots.places)
            if index // BANK_BITS == len(worker_slots.slots):
                worker_slots.slots.append(self._take_slot())
            worker_slots.places[place] = index
            self.version += 1
        return index

    def discard(self, worker: WorkerKey, place: Place, hashes: NDArray[np.uint64]) -> None:
        """Remove blocks that stopped being resident; unknown ones are left alone."""
        if place.medium == GPU and len(hashes):
            self.writes.of(worker.model).removed(worker, len(hashes))
        worker_slots = self._workers[worker]
        index = worker_slots.places.get(place)
        if index is None or not len(hashes):
            return
        slot = worker_slots.slots[index // BANK_BITS]
        self.table.begin()
        self.table.discard(slot, index % BANK_BITS, hashes)
        self.table.end()

    def held(self, worker: WorkerKey, place: Place) -> NDArray[np.uint64]:
        """Return the hashes that `worker` holds at `place`, in no order.

        This walks the table, so use it for inspection, not for answers.
        """
        worker_slots = self._workers.get(worker)
        index = None if worker_slots is None else worker_slots.places.get(place)
        if worker_slots is None or index is None:
            return np.empty(0, np.uint64)
        slot = worker_slots.slots[index // BANK_BITS]
        out = np.empty(int(self._slot_records[slot]), np.uint64)
        count = self.table.members(slot, index % BANK_BITS, out)
        return hashes_of(out[:count])

    def sweep(self) -> bool:
        """Drop a bounded number of dead records and free slots that have none left; return whether more is to do."""
        if not len(self._dead_slots):
            return False
        start = self._sweep_at if self._sweep_at < self.table.slots.end else 0
        self.table.begin()
        self._sweep_at = self.table.sweep(start, self._dead_slots, SWEEP_BUDGET)
        self.table.end()
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
            raise MirrorFull(
                f"more than {MAX_SLOTS} worker slots are needed: register fewer workers, or wait until those "
                "of ended epochs are free again"
            )
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
        table.resize_rows(table.rows.capacity(), self.slot_count)

    def _make_room(self, count: int) -> None:
        table = self.table
        lines = table.slots.lines_for(count)
        records = capacity = table.record_capacity()
        room = records - table.records_live
        if room < count:
            records = max(records + count - room, int(records * GROWTH))
        if (lines, records) != (table.slots.lines, capacity):
            self._check_budget(lines, records, table.rows.capacity(), self.slot_count)
            table.resize(lines, records)
        if table.rows.missed:
            self._make_rows()

    def _make_rows(self) -> None:
        """Make room for the rows that were missing, unless the budget is spent; a block without a row has a list."""
        table = self.table
        capacity = table.rows.capacity()
        rows = max(capacity + table.rows.missed, int(capacity * GROWTH))
        if self._bytes(table.slots.lines, table.record_capacity(), rows, self.slot_count) <= self._budget_bytes:
            table.resize_rows(rows, self.slot_count)

    def _check_budget(self, lines: int, records: int, rows: int, slots: int) -> None:
        """Raise MirrorFull if a table of this size exceeds the budget."""
        if self._bytes(lines, records, rows, slots) > self._budget_bytes:
            raise MirrorFull(f"the mirror's budget of {self._budget_bytes} bytes is spent: raise mirror_budget_bytes")
