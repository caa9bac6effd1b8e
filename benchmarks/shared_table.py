# SPDX-License-Identifier: Apache-2.0
"""Claim: a look-up in a table that another process writes does not wait for what that process does beside writing.

A table of 16 workers is written in events of 32 blocks, and 512 blocks are looked up in it each millisecond, in three
ways: by one thread in turns, by two threads of one process, and by two processes. Beside each event the writer is busy
in Python for as long as ingest is (60 us, 2026-peers.md). A time counts from when its look-up was due, so it contains
the wait for the writer.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from benchmarks.report import Row, Settings, progress, run
from kvrouter.router.index.matching.mirror_table import MirrorTable
from kvrouter.router.index.matching.shared_table import SharedTable
from kvrouter.router.index.matching.table_memory import SharedMemory

WORKERS = 16
CHAIN_BLOCKS = 512
EVENT_BLOCKS = 32
MESSAGE_S = 60e-6
BUDGET_BYTES = 1 << 32
PAUSE_S = 0.001
IDLE_S = 0.00002
# Up to what a writer reaches that does nothing else.
RATES = (0, 50_000, 200_000, 400_000)


class Writer:
    """A writer whose blocks go and come back, event by event, at a rate in blocks a second."""

    def __init__(self, memory: SharedMemory, hashes: np.ndarray, blocks_per_s: int) -> None:
        self._table, self._hashes = MirrorTable(memory), hashes
        self._table.slot_records, self._table.dead = np.zeros(WORKERS, np.int64), np.zeros(WORKERS, np.uint8)
        self._table.resize_rows(0, WORKERS)
        self._table.resize(self._table.slots.lines_for(len(hashes)), WORKERS * len(hashes))
        for slot in range(WORKERS):
            self._table.begin()
            self._table.add(slot, 0, hashes)
            self._table.end()
        self._step_s = EVENT_BLOCKS / blocks_per_s if blocks_per_s else np.inf
        self._due_s = time.perf_counter()
        self._events = 0

    def turn(self) -> None:
        """Write an event if one is due, else sleep for a moment."""
        now_s = time.perf_counter()
        if now_s < self._due_s or self._step_s == np.inf:
            time.sleep(IDLE_S)
            return
        self._due_s = max(self._due_s + self._step_s, now_s - PAUSE_S)
        start = self._events * EVENT_BLOCKS % (len(self._hashes) - EVENT_BLOCKS)
        event, slot = self._hashes[start : start + EVENT_BLOCKS], self._events % WORKERS
        self._events += 1
        self._table.begin()
        self._table.discard(slot, 0, event)
        self._table.add(slot, 0, event)
        self._table.end()
        while time.perf_counter() < now_s + MESSAGE_S:
            pass


def look_up(reader: SharedTable, hashes: np.ndarray, count: int, idle: Callable[[], None]) -> np.ndarray:
    """Return for `count` look-ups how long after its due time each had ended, in us; `idle` is called until then."""
    row_of_slot = np.arange(WORKERS, dtype=np.int32)
    taken_us = np.empty(count)
    due_s = time.perf_counter()
    for i, start in enumerate(np.random.default_rng(2).integers(0, len(hashes) - CHAIN_BLOCKS, count)):
        due_s = max(due_s + PAUSE_S, time.perf_counter())
        while time.perf_counter() < due_s:
            idle()
        rows = np.zeros((WORKERS, CHAIN_BLOCKS), np.uint16)
        reader.gather(hashes[start : start + CHAIN_BLOCKS], row_of_slot, rows)
        taken_us[i] = (time.perf_counter() - due_s) * 1e6
        assert rows.any()
    return taken_us


def spin() -> None:
    """Do nothing, because a thread that sleeps is woken some 0.1 ms late."""


@contextmanager
def in_turns(memory: SharedMemory, hashes: np.ndarray, rate: int) -> Iterator[Callable[[], None]]:
    yield Writer(memory, hashes, rate).turn


@contextmanager
def in_a_thread(memory: SharedMemory, hashes: np.ndarray, rate: int) -> Iterator[Callable[[], None]]:
    writer, ended = Writer(memory, hashes, rate), threading.Event()

    def write() -> None:
        while not ended.is_set():
            writer.turn()

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield spin
    finally:
        ended.set()
        thread.join()


@contextmanager
def in_a_process(memory: SharedMemory, hashes: np.ndarray, rate: int) -> Iterator[Callable[[], None]]:
    is_ready, ready = os.pipe()
    # A pipe that the parent closes with its end, however it ends.
    parent_lives, lifeline = os.pipe()
    process = os.fork()
    if process == 0:
        os.close(lifeline)
        os.set_blocking(parent_lives, False)
        writer = Writer(memory, hashes, rate)
        os.write(ready, b"1")
        while True:
            try:
                if not os.read(parent_lives, 1):
                    os._exit(0)
            except BlockingIOError:
                writer.turn()
    os.read(is_ready, 1)
    try:
        yield spin
    finally:
        os.close(lifeline)
        os.waitpid(process, 0)
        for file in (is_ready, ready, parent_lives):
            os.close(file)


WAYS = {"one thread, in turns": in_turns, "two threads": in_a_thread, "two processes": in_a_process}


def measure(settings: Settings) -> tuple[list[Row], list[str]]:
    count = settings.pick(5_000, 300)
    hashes = np.random.default_rng(1).integers(1, 2**63, settings.pick(62_500, 5_000)).astype(np.uint64)
    rows = []
    for rate in RATES:
        for name, write in WAYS.items():
            progress(f"shared table: {rate:,} blocks/s, {name}")
            memory = SharedMemory(BUDGET_BYTES)
            reader = SharedTable(SharedMemory(BUDGET_BYTES, os.dup(memory.file)))
            with write(memory, hashes, rate) as idle:
                taken_us = look_up(reader, hashes, count, idle)
            for share in (50, 99):
                title = f"look-up of {CHAIN_BLOCKS} blocks beside {rate:,} blocks/s, {name}, p{share}"
                rows.append(Row(title, "us", float(np.percentile(taken_us, share))))
            reader.memory.close()
            memory.close()
    return rows, [f"{WORKERS * len(hashes):,} entries; {sys.version.split()[0]}"]


if __name__ == "__main__":
    run("shared_table", __doc__, measure)
