# SPDX-License-Identifier: Apache-2.0
"""A process reads a table that another process writes as fast as it can: it sees no half of a change (ADR 64).

The writer moves one chain of blocks from place to place, for one worker and for all at once, while the table grows. In
each section one chain goes and the next one comes, so a reader must see exactly one, whole, at each worker.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvrouter.router.index.matching.mirror_table import MirrorTable
from kvrouter.router.index.matching.shared_table import SharedTable, WriterSilent
from kvrouter.router.index.matching.table_memory import Header, SharedMemory

BUDGET_BYTES = 1 << 24
# Blocks that all hold have a row, blocks that one worker holds a record.
SLOTS = 48
CHAINS = 8
CHAIN_BLOCKS = 16
HASHES = np.arange(1, 1 + CHAINS * CHAIN_BLOCKS, dtype=np.uint64)
FILLER_BLOCKS = 64
MOST_FILLERS = 100_000
# Two of each section.
VERSIONS = 1_000


def chain(number: int) -> np.ndarray:
    start = number % CHAINS * CHAIN_BLOCKS
    return HASHES[start : start + CHAIN_BLOCKS]


def write(file: int) -> None:
    """Move the chains until killed."""
    table = MirrorTable(SharedMemory(BUDGET_BYTES, file))
    table.slot_records, table.dead = np.zeros(SLOTS, np.int64), np.zeros(SLOTS, np.uint8)
    table.resize_rows(CHAIN_BLOCKS * 2, SLOTS)
    number = fillers = 0
    while True:
        more = FILLER_BLOCKS + SLOTS * CHAIN_BLOCKS
        table.resize(table.slots.lines_for(more), max(table.record_capacity(), table.records_live + more))
        table.begin()
        for slot in range(SLOTS):
            if number:
                table.discard(slot, 0, chain(number - 1))
            table.add(slot, 0, chain(number))
        if fillers < MOST_FILLERS:
            start = 1_000 + fillers
            fillers += FILLER_BLOCKS
            table.add(fillers % SLOTS, 1, np.arange(start, start + FILLER_BLOCKS, dtype=np.uint64))
        table.end()
        if not number:
            print("began", flush=True)
        number += 1


def test_no_half_of_a_change_is_seen_and_a_dead_writer_is_noticed() -> None:
    memory = SharedMemory(BUDGET_BYTES)
    command = [sys.executable, "-W", "error", __file__, str(memory.file)]
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    row_of_slot = np.arange(SLOTS, dtype=np.int32)
    with subprocess.Popen(command, env=environ, pass_fds=[memory.file], stdout=subprocess.PIPE, text=True) as writer:
        try:
            assert writer.stdout is not None and writer.stdout.readline() == "began\n"
            reader = SharedTable(memory)
            seen: set[int] = set()
            while memory.header[Header.VERSION] < VERSIONS or len(seen) < CHAINS:
                rows = np.zeros((SLOTS, len(HASHES)), np.uint16)
                reader.gather(HASHES, row_of_slot, rows)
                held = rows.reshape(SLOTS, CHAINS, CHAIN_BLOCKS)
                number = int(held[0].any(axis=1).argmax())
                expected = np.zeros_like(held)
                expected[:, number] = 1
                assert np.array_equal(held, expected)
                seen.add(number)
            assert reader.repeated
            # A writer that stands still in a section looks like a dead one; this one spends most of its time in them.
            writer.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, writer.pid, os.WSTOPPED)
            while not int(memory.header[Header.VERSION]) & 1:
                writer.send_signal(signal.SIGCONT)
                writer.send_signal(signal.SIGSTOP)
                os.waitid(os.P_PID, writer.pid, os.WSTOPPED)
            rows = np.zeros((SLOTS, len(HASHES)), np.uint16)
            with pytest.raises(WriterSilent):
                reader.gather(HASHES, row_of_slot, rows)
        finally:
            writer.kill()
    memory.close()


if __name__ == "__main__":
    write(int(sys.argv[1]))
