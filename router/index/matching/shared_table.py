# SPDX-License-Identifier: Apache-2.0
"""The mirror's table as a process reads it that another process writes (ADR 64). Compiled, see `setup.py`.

A reader takes no lock. It looks its hashes up with the code of the writer's own look-ups, and again if the table changed
meanwhile. What it reads of a table that is changing is wrong, and thrown away, but never outside the arrays: every word
in them was written whole, names a record, a row or a slot that existed, and a half of the memory has room for all.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvrouter.router.base.common.seqlock import Seqlock
from kvrouter.router.index.matching.holder_rows import all_cells
from kvrouter.router.index.matching.mirror_table import MirrorTable
from kvrouter.router.index.matching.table_memory import Header, SharedMemory, TableMemory

U64 = NDArray[np.uint64]
U16 = NDArray[np.uint16]
I32 = NDArray[np.int32]

# The look-ups without success after which a reader asks for a pause, and after which it takes the writer for dead: a
# second, because a machine that is busy may not run a process for that long.
TRIES_BEFORE_A_PAUSE = 4
MAX_TRIES = 20_000

LAYOUT = int(Header.LAYOUT)


class WriterSilent(Exception):
    """A section of changes that does not end: its writer died or stands still."""


class SharedTable:
    """A table that another process writes."""

    def __init__(self, memory: SharedMemory) -> None:
        self.memory = memory
        self.header = memory.header
        self.lock = Seqlock(memory.header[Header.VERSION : Header.LAYOUT])
        # Its arrays are those of the memory, once the first layout is known.
        self.table = MirrorTable(TableMemory())
        self.layout = 0
        # How often a look-up was repeated, because the table changed meanwhile.
        self.repeated = 0

    def gather(self, hashes: U64, row_of_slot: I32, rows: U16) -> None:
        """Write the place bits of every hash into rows, as `MirrorTable.gather` does. Raises WriterSilent."""
        for tries in range(1, MAX_TRIES):
            if self.try_gather(hashes, row_of_slot, rows):
                return
            if tries % TRIES_BEFORE_A_PAUSE == 0:
                self.lock.ask_for_a_pause()
            self.lock.pause(tries)
        raise WriterSilent("the process that writes the index stopped in the middle of a change")

    def try_gather(self, hashes: U64, row_of_slot: I32, rows: U16) -> bool:
        """Do as `gather` does, once; return whether the table was the same all the time. If not, rows are zero again."""
        version = self.lock.version()
        if version & 1:
            return False
        layout = self.header[LAYOUT]
        if layout != self.layout:
            self.use_arrays()
        self.table.gather(hashes, row_of_slot, rows)
        if self.lock.is_at(version):
            # Not before: words of two layouts may have been read.
            self.layout = layout
            return True
        rows[:] = 0
        self.repeated += 1
        return False

    def use_arrays(self) -> None:
        """Read from the arrays that the header describes from now on."""
        header = self.memory.header
        entries, records, rows = [
            memory.all_of(int(header[Header.HALVES + part])) for part, memory in self.memory.parts.items()
        ]
        slots = int(header[Header.ROW_SLOTS])
        self.table.read_from(int(header[Header.LINES]), entries, records, all_cells(rows, slots), slots)
