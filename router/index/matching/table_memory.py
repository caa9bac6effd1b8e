# SPDX-License-Identifier: Apache-2.0
"""The memory of the mirror's table: this process's own, or memory that other processes read (ADR 64).

Shared memory is one file without a name (`memfd_create`), so it needs no space in /dev/shm and is gone with the last
process that has it. Each kind of array has two halves, of which one is in use. A table that grows is laid out in the
other half while readers go on in the first. The file is as long as the largest table and its copy can be. Only pages
that were written take memory, and those of a half that is no longer in use are given back.
"""

from __future__ import annotations

import mmap
import os
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from kvrouter.router.base.common.open_addressing import ArrayMemory

U64 = NDArray[np.uint64]

BYTES_PER_WORD = 8


class Part(IntEnum):
    """The kinds of arrays of a table."""

    ENTRIES = 0
    RECORDS = 1
    ROWS = 2


class Header(IntEnum):
    """The words of the table's header."""

    VERSION = 0
    PAUSE = 1
    # Counts the layouts, so that a reader notices a new one.
    LAYOUT = 2
    LINES = 3
    ROW_SLOTS = 4
    # For each part, the half that is in use.
    HALVES = 5
    END = HALVES + len(Part)


class TableMemory:
    """The memory of a table that only this process reads."""

    def __init__(self) -> None:
        # `Header.END` words.
        self.header: U64 = np.zeros(Header.END, np.uint64)
        # The memory of the array of each part.
        self.arrays: dict[Part, ArrayMemory] = {part: ArrayMemory() for part in Part}


class SharedArray(ArrayMemory):
    """Two halves of shared memory, of which one has the array in use."""

    def __init__(self, memory: mmap.mmap, start_bytes: int, half_bytes: int) -> None:
        """Begin with no array in use.

        Args:
            memory: The memory.
            start_bytes: Where the first half starts.
            half_bytes: The size of a half.
        """
        super().__init__()
        self._memory = memory
        self._words = np.frombuffer(memory, np.uint64)
        self._start_bytes = start_bytes
        self._half_bytes = half_bytes

    def all_of(self, half: int) -> U64:
        """Return all words of a half."""
        start = (self._start_bytes + half * self._half_bytes) // BYTES_PER_WORD
        return self._words[start : start + self._half_bytes // BYTES_PER_WORD]

    def zeros(self, words: int) -> U64:
        """Return an array of zeros in the half that is not in use. Raises ValueError if the half is too small."""
        if BYTES_PER_WORD * words > self._half_bytes:
            raise ValueError(f"{BYTES_PER_WORD * words} bytes do not fit into half of {2 * self._half_bytes} bytes")
        self._give_back(1 - self.half)
        return self.all_of(1 - self.half)[:words]

    def use(self) -> None:
        """Use the other half from now on, and give back the memory of the one that was in use."""
        self.half = 1 - self.half
        self._give_back(1 - self.half)

    def _give_back(self, half: int) -> None:
        # Readers that are still there read zeros from now on, and notice by the version.
        start_bytes = self._start_bytes + half * self._half_bytes
        self._memory.madvise(mmap.MADV_REMOVE, start_bytes, self._half_bytes)


class SharedMemory(TableMemory):
    """The memory of a table that one process writes and others read."""

    def __init__(self, budget_bytes: int, file: int | None = None) -> None:
        """Make the memory, or map the one behind a file descriptor, which is then this object's.

        Args:
            budget_bytes: The most that the array of each part takes, the same number in all processes.
            file: The file descriptor of the memory; None: make it. Processes that are to read it inherit it.
        """
        half_bytes = -(-budget_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        size = mmap.PAGESIZE + 2 * len(Part) * half_bytes
        self.file = os.memfd_create("kvrouter-mirror") if file is None else file
        if file is None:
            os.ftruncate(self.file, size)
        memory = mmap.mmap(self.file, size)
        self.header = np.frombuffer(memory, np.uint64)[: Header.END]
        self.parts = {part: SharedArray(memory, mmap.PAGESIZE + 2 * part * half_bytes, half_bytes) for part in Part}
        self.arrays = {**self.parts}

    def close(self) -> None:
        """Close the file descriptor; the memory is gone with the last array that lies in it."""
        os.close(self.file)
