# SPDX-License-Identifier: Apache-2.0
"""The holders of blocks that many workers have, as rows: the place bits of every worker slot side by side. Part of the
mirror's table, whose entries say which row is whose. Compiled, see `setup.py`."""

from __future__ import annotations

import numpy as np

NO_ROW = -1
BYTES_PER_CELL = 2

# A block gets a row when it has more holders than this, and than the part of all slots from which on a row takes no
# more memory than a list: walking so few records costs about as much as fetching a row.
MIN_ROW_HOLDERS = 32
ROW_SHARE = 4
# It loses it again with fewer holders than this part of those: between the two it keeps what it has.
ROW_SLACK = 2
# Cells at the end of a row: rows whose width is a power of two would all want the same few places of the processor's
# cache.
ROW_PADDING = 32


class HolderRows:
    """cells: uint16, shape (rows, slots and padding), zero where a slot does not hold the row's block. holders: of each
    row, how many slots hold it; of a free one, the next free one."""

    def __init__(self) -> None:
        self.cells = np.zeros((0, ROW_PADDING), np.uint16)
        self.holders = np.zeros(0, np.int64)
        self.slots = 0
        self.used = 0
        self.first_free = NO_ROW
        # Cells that are not zero; and rows that could not be had since the last `resize`.
        self.cells_live = 0
        self.missed = 0

    def capacity(self) -> int:
        return self.cells.shape[0]

    def room_bytes(self, rows: int, slots: int) -> int:
        """What this many rows and slots take."""
        return rows * (slots + ROW_PADDING) * BYTES_PER_CELL

    def resize(self, rows: int, slots: int) -> None:
        """Room for this many rows and slots, no fewer than there are."""
        grown = np.zeros((rows, slots + ROW_PADDING), np.uint16)
        holders = np.zeros(rows, np.int64)
        if self.cells.shape[0]:
            grown[: self.cells.shape[0], : self.slots] = self.cells[:, : self.slots]
            holders[: self.cells.shape[0]] = self.holders
        self.cells, self.holders, self.slots = grown, holders, slots
        self.missed = 0

    def threshold(self) -> int:
        """A block with more holders gets a row."""
        return max(MIN_ROW_HOLDERS, self.slots // ROW_SHARE)

    def too_few(self, row: int) -> bool:
        """Whether the row's block should have a list again."""
        return bool(self.holders[row] * ROW_SLACK < self.threshold())

    def take(self) -> int:
        """A row without holders, or NO_ROW."""
        row = self.first_free
        if row != NO_ROW:
            self.first_free = self.holders[row]
        elif self.used < self.cells.shape[0]:
            row = self.used
            self.used += 1
        else:
            self.missed += 1
            return NO_ROW
        self.holders[row] = 0
        return int(row)

    def give_back(self, row: int) -> None:
        """It has no holders left."""
        self.holders[row] = self.first_free
        self.first_free = row

    def add(self, row: int, slot: int, bits: int) -> bool:
        """Set place bits of a slot; True when it held the block nowhere before."""
        fresh: bool = self.cells[row, slot] == 0
        self.cells[row, slot] |= bits
        if fresh:
            self.holders[row] += 1
            self.cells_live += 1
        return bool(fresh)

    def discard(self, row: int, slot: int, bits: int) -> bool:
        """Clear place bits of a slot; True when with that it no longer holds the block."""
        if self.cells[row, slot] & bits == 0:
            return False
        self.cells[row, slot] &= ~bits & 0xFFFF
        if self.cells[row, slot] != 0:
            return False
        self.holders[row] -= 1
        self.cells_live -= 1
        return True
