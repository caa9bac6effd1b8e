# SPDX-License-Identifier: Apache-2.0
"""The holders of blocks that many workers have, as rows: the place bits of every worker slot side by side.

Rows are part of the mirror's table, whose entries name the row of a block. Compiled, see `setup.py`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvrouter.router.base.common.open_addressing import ArrayMemory

U64 = NDArray[np.uint64]

NO_ROW = -1
BYTES_PER_CELL = 2
BYTES_PER_WORD = 8

# A block gets a row when it has more holders than MIN_ROW_HOLDERS and than one in ROW_SHARE of all slots. Walking the
# records of fewer holders costs about as much as fetching a row, and a row with holders in more than that share of its
# slots takes no more memory than a list.
MIN_ROW_HOLDERS = 32
ROW_SHARE = 4
# A block loses its row with fewer holders than one in ROW_SLACK of that threshold. Between the two it keeps what it
# has.
ROW_SLACK = 2
# Unused cells at the end of a row: rows whose width is a power of two would all compete for the same few places of the
# processor's cache.
ROW_PADDING = 32


def row_words(rows: int, slots: int) -> int:
    """Return the 64-bit words that this many rows take."""
    return -(-rows * (slots + ROW_PADDING) * BYTES_PER_CELL // BYTES_PER_WORD)


def cells_in(words: U64, rows: int, slots: int) -> NDArray[np.uint16]:
    """Return the cells of this many rows in an array of words, with the shape (rows, slots and padding)."""
    cells: NDArray[np.uint16] = words.view(np.uint16)[: rows * (slots + ROW_PADDING)]
    return cells.reshape(rows, slots + ROW_PADDING)


def all_cells(words: U64, slots: int) -> NDArray[np.uint16]:
    """Return the cells of as many rows as an array of words has room for."""
    row_cells = slots + ROW_PADDING
    return cells_in(words, len(words) * BYTES_PER_WORD // BYTES_PER_CELL // row_cells, slots)


class HolderRows:
    """The rows of the blocks that many workers hold."""

    def __init__(self, memory: ArrayMemory) -> None:
        """Begin without rows; their cells will lie in this memory."""
        self.memory = memory
        self.layouts = 0
        # uint16, shape (rows, slots and padding): the place bits of each slot, zero if it does not hold the row's
        # block.
        self.cells = np.zeros((0, ROW_PADDING), np.uint16)
        # For each row, how many slots hold its block; for a free row, the next free one.
        self.holders = np.zeros(0, np.int64)
        self.slots = 0
        # How many rows were ever used, and the first free one of them.
        self.used = 0
        self.first_free = NO_ROW
        # How many cells are not zero.
        self.cells_live = 0
        # How many rows were wanted and missing since the last `resize`.
        self.missed = 0

    def capacity(self) -> int:
        """Return the number of rows for which there is room."""
        return self.cells.shape[0]

    def room_bytes(self, rows: int, slots: int) -> int:
        """Return the memory that this many rows and slots take."""
        return rows * (slots + ROW_PADDING) * BYTES_PER_CELL

    def laid_out(self, rows: int, slots: int) -> NDArray[np.uint16]:
        """Return all cells in a new array with this many rows and slots, no fewer than there are, for `take_cells`."""
        grown = cells_in(self.memory.zeros(row_words(rows, slots)), rows, slots)
        if self.cells.shape[0]:
            grown[: self.cells.shape[0], : self.slots] = self.cells[:, : self.slots]
        return grown

    def take_cells(self, laid_out: NDArray[np.uint16], slots: int) -> None:
        """Use the cells that were laid out in an array with this many slots."""
        holders = np.zeros(laid_out.shape[0], np.int64)
        holders[: self.cells.shape[0]] = self.holders
        self.cells, self.holders, self.slots = laid_out, holders, slots
        self.missed = 0
        self.layouts += 1
        self.memory.use()

    def read_from(self, cells: NDArray[np.uint16], slots: int) -> None:
        """Read the rows of another process's table, which have this many slots, from now on."""
        self.cells, self.slots = cells, slots

    def threshold(self) -> int:
        """Return the number of holders above which a block gets a row."""
        return max(MIN_ROW_HOLDERS, self.slots // ROW_SHARE)

    def too_few(self, row: int) -> bool:
        """Return whether the row's block should have a list again."""
        return bool(self.holders[row] * ROW_SLACK < self.threshold())

    def take(self) -> int:
        """Return a row without holders, or NO_ROW if there is none."""
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
        """Free a row that has no holders left."""
        self.holders[row] = self.first_free
        self.first_free = row

    def add(self, row: int, slot: int, bits: int) -> bool:
        """Set place bits of a slot, and return whether the slot held the block nowhere before."""
        fresh: bool = self.cells[row, slot] == 0
        self.cells[row, slot] |= bits
        if fresh:
            self.holders[row] += 1
            self.cells_live += 1
        return bool(fresh)

    def discard(self, row: int, slot: int, bits: int) -> bool:
        """Clear place bits of a slot, and return whether the slot thereby stopped holding the block."""
        if self.cells[row, slot] & bits == 0:
            return False
        self.cells[row, slot] &= ~bits & 0xFFFF
        if self.cells[row, slot] != 0:
            return False
        self.holders[row] -= 1
        self.cells_live -= 1
        return True
