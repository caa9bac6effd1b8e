# SPDX-License-Identifier: Apache-2.0
"""A table that one process writes and another reads shows each section of changes whole or not at all (ADR 64).

The model stops the writer between any two of its stores while a reader is between any two of its loads. It runs with
uncompiled modules, in which each store and each load is a call; an index outside an array raises there.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from kvrouter.router.base.common.compiled import UNCOMPILED
from kvrouter.router.base.common.open_addressing import OrderedSlots, spread
from kvrouter.router.index.matching.mirror_table import MirrorTable
from kvrouter.router.index.matching.shared_table import SharedTable, WriterSilent
from kvrouter.router.index.matching.table_memory import Header, Part, SharedMemory
from tests.support.examples import examples

BUDGET_BYTES = 1 << 20
# Enough for blocks with a row, which more than 32 workers hold.
SLOTS = 48
HASHES = np.arange(1, 25, dtype=np.uint64)
FILLERS = np.arange(1_000, 4_000, dtype=np.uint64)
SECTIONS = 60
WAIT_S = 30.0

Content = list[list[int]]


def nothing() -> None:
    pass


class WatchedArray(np.ndarray[Any, np.dtype[np.uint64]]):
    """An array whose single words are stored and loaded under the eyes of the test."""

    on_store: Callable[[], None] = nothing
    on_load: Callable[[], None] = nothing

    def __setitem__(self, key: Any, value: Any) -> None:
        type(self).on_store()
        super().__setitem__(key, value)

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, slice):
            type(self).on_load()
        return super().__getitem__(key)


class StoredArray(WatchedArray):
    """The writer's."""


class LoadedArray(WatchedArray):
    """The reader's."""


def watched(memory: SharedMemory, kind: type[WatchedArray]) -> SharedMemory:
    """Return the memory with all its words under watch."""
    memory.header = memory.header.view(kind)
    for part in memory.parts.values():
        part._words = part._words.view(kind)
    return memory


class Turns:
    """A writer's thread that stores only as often as the reader lets it."""

    def __init__(self, write: Callable[[], None]) -> None:
        self._permits, self._stores = threading.Semaphore(0), threading.Semaphore(0)
        self._write = write
        self._is_quiet = False
        self.has_ended = False
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()
        assert self._stores.acquire(timeout=WAIT_S)

    def _run(self) -> None:
        try:
            self._write()
        except BaseException as error:
            self.error = error
        self.has_ended = True
        self._stores.release()

    def quietly(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function without stops at its stores: they go to memory that no reader looks at yet."""

        def quiet(*arguments: Any) -> Any:
            self._is_quiet = True
            try:
                return function(*arguments)
            finally:
                self._is_quiet = False

        return quiet

    def on_store(self) -> None:
        if threading.current_thread() is self._thread and not self._is_quiet:
            # Before each store, and not before the first permission.
            self._stores.release()
            assert self._permits.acquire(timeout=WAIT_S)

    def let(self, stores: int) -> None:
        """Let the writer go on until it has stored this often more, or has ended."""
        for _ in range(stores):
            if self.has_ended:
                return
            self._permits.release()
            assert self._stores.acquire(timeout=WAIT_S)


class Filled:
    """A table of many workers, and its content after each section."""

    def __init__(self, memory: SharedMemory) -> None:
        self.table = MirrorTable(memory)
        self.table.slot_records, self.table.dead = np.zeros(SLOTS, np.int64), np.zeros(SLOTS, np.uint8)
        self.table.resize_rows(8, SLOTS)
        self._held = np.zeros((SLOTS, len(HASHES)), np.uint16)
        self.contents: list[Content] = [self._held.tolist()]

    def change_often(self, draw: random.Random) -> None:
        for _ in range(SECTIONS):
            self.change(draw)

    def change(self, draw: random.Random) -> None:
        """Change the table in one section, after making room for it."""
        table = self.table
        start = draw.randrange(len(FILLERS))
        fillers = FILLERS[start : start + draw.choice((0, 5, 200))]
        more = SLOTS * len(HASHES) + len(fillers)
        table.resize(
            table.slots.lines_for(more), max(table.record_capacity(), table.records_live + more + draw.choice((0, 100)))
        )
        if draw.random() < 0.2:
            table.resize_rows(table.rows.capacity() + 2, SLOTS)
        held = self._held.copy()
        table.begin()
        for _ in range(draw.randint(1, 4)):
            bit = draw.randrange(3)
            mask = np.uint16(1 << bit)
            chosen = np.array(sorted(draw.sample(range(len(HASHES)), draw.randint(1, 6))))
            # A block that most workers hold gets a row, and a list again when most have dropped it.
            slots = range(SLOTS) if draw.random() < 0.3 else [draw.randrange(SLOTS)]
            stores = draw.random() < 0.55
            for slot in slots:
                if stores:
                    table.add(slot, bit, HASHES[chosen])
                    held[slot, chosen] |= mask
                else:
                    table.discard(slot, bit, HASHES[chosen])
                    held[slot, chosen] &= ~mask
        if len(fillers):
            table.add(draw.randrange(SLOTS), 0, fillers)
        self._held = held
        # Known before the section ends, because a reader may see it from then on.
        self.contents.append(held.tolist())
        table.end()


@contextmanager
def reader_of(memory: SharedMemory) -> Iterator[SharedTable]:
    other = SharedMemory(BUDGET_BYTES, os.dup(memory.file))
    try:
        yield SharedTable(other)
    finally:
        other.close()


def content_of(reader: SharedTable, *, once: bool = False, known: int = SLOTS) -> Content | None:
    """Return what the first `known` workers hold; None if the table changed during the one look of `once`."""
    rows = np.zeros((known, len(HASHES)), np.uint16)
    row_of_slot = np.arange(known, dtype=np.int32)
    if once:
        return rows.tolist() if reader.try_gather(HASHES, row_of_slot, rows) else None
    reader.gather(HASHES, row_of_slot, rows)
    return rows.tolist()


def interleave(seed: int) -> dict[str, int]:
    """Let a writer and a reader take turns at stores and loads; return how many looks were whole and how many were not."""
    draw = random.Random(seed)
    counts = {"whole": 0, "thrown": 0}
    StoredArray.on_store = LoadedArray.on_load = nothing
    memory = watched(SharedMemory(BUDGET_BYTES), StoredArray)
    filled = Filled(memory)
    changes = random.Random(seed + 1)
    turns = Turns(partial(filled.change_often, changes))
    reader = SharedTable(watched(SharedMemory(BUDGET_BYTES, os.dup(memory.file)), LoadedArray))
    StoredArray.on_store = turns.on_store

    # How likely the writer goes on at a load, which differs from look to look.
    share, loads = 0.0, 0
    # The load at which the writer makes a whole section, or one up to the middle of a new layout's description. The first
    # loads of a look may be of the header.
    section_at, is_whole = 0, True
    header = np.asarray(memory.header)

    def on_load() -> None:
        nonlocal loads
        loads += 1
        if loads == section_at:
            sections, layout = len(filled.contents), header[Header.LAYOUT]
            while not turns.has_ended and (len(filled.contents) == sections or header[Header.VERSION] & 1):
                turns.let(1)
                if not is_whole and header[Header.LAYOUT] != layout:
                    break
        elif draw.random() < share:
            turns.let(draw.choice((1, 1, 2, 5, 20)))

    with patch.object(OrderedSlots, "laid_out", turns.quietly(OrderedSlots.laid_out)):
        turns.start()
        LoadedArray.on_load = on_load
        while not turns.has_ended:
            while reader.lock.version() & 1 and not turns.has_ended:
                turns.let(1)
            share, loads = draw.choice((0.0, 0.0, 0.01, 0.05)), 0
            section_at = draw.choice((0, 0, draw.randrange(1, 12), draw.randrange(1, 300)))
            is_whole = draw.random() < 0.5
            first = len(filled.contents) - 1
            # A reader may know fewer workers than there are by now.
            known = draw.choice((SLOTS, SLOTS - 8))
            content = content_of(reader, once=True, known=known)
            if content is None:
                counts["thrown"] += 1
            else:
                # The last section's content is noted before it ends.
                possible = [held[:known] for held in filled.contents[max(0, first - 1) :]]
                assert content in possible, f"seed {seed}: a mixture of several contents"
                counts["whole"] += 1
            turns.let(draw.choice((0, 1, 3, 30, 300)))
    LoadedArray.on_load = nothing
    assert turns.error is None, repr(turns.error)
    assert content_of(reader) == filled.contents[-1]
    memory.close()
    reader.memory.close()
    return counts


def test_a_reader_sees_each_section_whole_or_not_at_all() -> None:
    root = Path(__file__).resolve().parents[2]
    number = examples(20)
    command = [sys.executable, "-W", "error", __file__, str(number)]
    environ = {**os.environ, UNCOMPILED: "1", "PYTHONPATH": str(root)}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout)
    assert min(counts.values()) > 5 * number, counts


def test_a_reader_follows_a_table_that_grows() -> None:
    memory = SharedMemory(BUDGET_BYTES)
    filled, draw = Filled(memory), random.Random(1)
    with reader_of(memory) as reader:
        for _ in range(200):
            filled.change(draw)
            assert content_of(reader) == filled.contents[-1]
    memory.close()


def test_a_list_that_seems_to_go_on_forever_ends() -> None:
    # Free records follow those that were freed during a look; here they even lead back to the first one.
    memory = SharedMemory(BUDGET_BYTES)
    words, records = memory.parts[Part.ENTRIES].all_of(0), memory.parts[Part.RECORDS].all_of(0)
    key = np.zeros(1, np.uint64)
    spread(HASHES[:1], key)
    words[0], words[1] = key[0], 1 << 16 | 1
    records[0] = 2 << 16 | 1
    memory.header[[Header.LAYOUT, Header.LINES, Header.ROW_SLOTS]] = 1, 1, SLOTS
    with reader_of(memory) as reader:
        rows = np.zeros((4, 1), np.uint16)
        assert reader.try_gather(HASHES[:1], np.arange(4, dtype=np.int32), rows)
    assert rows[:, 0].tolist() == [0, 1, 1, 0]
    memory.close()


def test_memory_that_is_no_longer_in_use_is_given_back() -> None:
    memory = SharedMemory(1 << 24)
    table = MirrorTable(memory)
    table.slot_records, table.dead = np.zeros(SLOTS, np.int64), np.zeros(SLOTS, np.uint8)
    table.resize_rows(0, SLOTS)
    for start in range(1, 400_000, 1_000):
        hashes = np.arange(start, start + 1_000, dtype=np.uint64)
        table.resize(table.slots.lines_for(1_000), table.record_capacity())
        table.begin()
        table.add(0, 0, hashes)
        table.end()
    used_bytes = os.fstat(memory.file).st_blocks * 512
    assert used_bytes < 1.1 * table.slots.bytes() + (1 << 16)
    memory.close()


def test_a_table_that_is_too_large_is_refused() -> None:
    memory = SharedMemory(1 << 16)
    table = MirrorTable(memory)
    with pytest.raises(ValueError, match="do not fit"):
        table.resize(table.slots.lines_for(10_000), table.record_capacity())
    memory.close()


def test_a_writer_that_stops_in_a_section_is_noticed() -> None:
    memory = SharedMemory(BUDGET_BYTES)
    filled = Filled(memory)
    with reader_of(memory) as reader:
        filled.table.begin()
        with pytest.raises(WriterSilent, match="stopped in the middle"):
            content_of(reader)
        filled.table.end()
        assert content_of(reader) == filled.contents[-1]
    memory.close()


if __name__ == "__main__":
    total = {"whole": 0, "thrown": 0}
    for number in range(int(sys.argv[1])):
        for name, count in interleave(number).items():
            total[name] += count
    print(json.dumps(total))
