# SPDX-License-Identifier: Apache-2.0
"""Claim: the disk tier, with checksums, manifest and threads, runs at a good part of the speed of plain file I/O.

Plain I/O moves the same bytes in records of the same size: pwrite and pread of one thread, and of as many threads as
the tier has, each with its share of the records, from and into the same memory and in the same order. The cases are:
- new: records that were never written, until the system has taken them (page cache);
- synced: the same, with an fsync at the end;
- in place: records that replace others, until the system has taken them; the tier evicts a key for each;
- warm: read in random order, all of it in the page cache;
- cold: read in random order after fsync and posix_fadvise(DONTNEED), so from the medium, or from a cache of the machine
  below.
All sides take turns, round by round, and each write is synced before the next is measured. The table has medians over
the rounds, and median and quartiles of the ratios of each round.
"""

from __future__ import annotations

import mmap
import os
import random
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.offload_speeds import Line, line, shown_ratios, shown_speeds
from benchmarks.report import Others, Result, finish, machine, markdown, parser_of, progress
from kvrouter.engine_patch.offload.disk.format.identity import DiskIdentity, GroupIdentity
from kvrouter.engine_patch.offload.disk.tier import DEFAULT_THREADS, DiskTier
from kvrouter.engine_patch.offload.key import OffloadKey, pack

RECORD_BYTES = (64 * 2**10, 2**20)
TOTAL_BYTES = 256 * 2**20
QUICK_TOTAL_BYTES = 16 * 2**20
ROUNDS = 7
QUICK_ROUNDS = 3
# Slots that reads and writes use in turns: as many bytes as the tier's queue takes.
SLOTS_BYTES = 64 * 2**20
# The pause of the tier's caller when no operation has finished; an engine's step takes longer.
PAUSE_S = 0.0002
SEED = 20262
SIDES = ("ours", "one", "many")
CASES = ("new", "synced", "in place", "warm", "cold")


class Memory:
    """Slots that were written to before, with random bytes, which cannot be compressed."""

    def __init__(self, record_bytes: int) -> None:
        self.count = SLOTS_BYTES // record_bytes
        self._memory = mmap.mmap(-1, SLOTS_BYTES)
        self._memory.write(random.Random(SEED).randbytes(SLOTS_BYTES))
        whole = memoryview(self._memory)
        self._slots = [whole[at : at + record_bytes] for at in range(0, SLOTS_BYTES, record_bytes)]

    def slot(self, number: int) -> memoryview:
        return self._slots[number]


class OurSide:
    """The tier, driven as an engine's scheduler does it: start operations, poll, continue."""

    name = "ours"

    def __init__(self, folder: Path, memory: Memory, record_bytes: int, count: int) -> None:
        group = GroupIdentity("full_attention", (record_bytes,), 16)
        identity = DiskIdentity("benchmark", "bfloat16", (group,), 1, "sha256", record_bytes)
        self._memory = memory
        self._tier = DiskTier(folder, identity, record_bytes, count * record_bytes, memory.slot)
        self._tier.open()
        self._files = sorted(path for path in folder.rglob("*") if path.name in ("manifest", "records"))
        self._lives = 0
        self._count = count
        # CPU time of the caller's thread inside the tier, and the number of records moved in it.
        self.caller_s = 0.0
        self.records = 0

    def key(self, number: int) -> OffloadKey:
        return pack((self._lives * self._count + number).to_bytes(32, "big"), 0)

    def write(self) -> None:
        """Write all records; from the second call on they replace the records of the previous call."""
        self._lives += 1
        self._all(self._tier.write, range(self._count))

    def read(self, order: Sequence[int]) -> None:
        self._all(self._tier.read, order)

    def _all(self, begin: Callable[[OffloadKey, int], bool], order: Sequence[int]) -> None:
        tier, free, at, done = self._tier, list(range(self._memory.count)), 0, 0
        keys = [self.key(number) for number in order]
        while done < len(keys):
            start = time.thread_time()
            finished = tier.poll()
            tier.take_changes()
            for operation in finished:
                if not operation.ok:
                    raise AssertionError(f"a {operation.kind} went wrong: {tier.counters}, {tier.reason}")
                free.append(operation.slot)
            done += len(finished)
            while at < len(keys) and free and begin(keys[at], free[-1]):
                free.pop()
                at += 1
            self.caller_s += time.thread_time() - start
            if not finished:
                time.sleep(PAUSE_S)
        self.records += len(keys)

    def sync(self, forget: bool = False) -> None:
        for path in self._files:
            sync(path, forget)

    def close(self) -> None:
        self._tier.close()


class PlainSide:
    """Plain I/O of the same records with pwrite and pread."""

    def __init__(self, folder: Path, memory: Memory, record_bytes: int, count: int, threads: int) -> None:
        self.name = f"plain, {threads} threads"
        self._memory = memory
        self._path = folder / f"plain-{threads}"
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT)
        self._record_bytes = record_bytes
        self._count = count
        self._threads = threads

    def write(self) -> None:
        self._all(os.pwritev, range(self._count))

    def read(self, order: Sequence[int]) -> None:
        self._all(os.preadv, order)

    def _all(self, move: Callable[[int, list[memoryview], int], int], order: Sequence[int]) -> None:
        fd, size, slots = self._fd, self._record_bytes, self._memory
        failed: list[str] = []

        def share(first: int) -> None:
            for at in range(first, len(order), self._threads):
                if move(fd, [slots.slot(at % slots.count)], order[at] * size) != size:
                    failed.append(f"record {order[at]}")

        if self._threads == 1:
            share(0)
        else:
            threads = [threading.Thread(target=share, args=(first,)) for first in range(self._threads)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        if failed:
            raise AssertionError(f"plain I/O came up short: {failed}")

    def sync(self, forget: bool = False) -> None:
        sync(self._path, forget)

    def close(self) -> None:
        os.close(self._fd)


def sync(path: Path, forget: bool) -> None:
    """Sync a file to the medium; with `forget`, also drop it from the page cache."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    if forget:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def took(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def one_round(
    folder: Path, memory: Memory, record_bytes: int, count: int, turn: int
) -> tuple[dict[tuple[str, str], float], float]:
    """Return the seconds of each case and side, and the CPU microseconds of the tier's caller for a record."""
    ours = OurSide(folder, memory, record_bytes, count)
    sides: list[OurSide | PlainSide] = [ours]
    sides += [PlainSide(folder, memory, record_bytes, count, threads) for threads in (1, DEFAULT_THREADS)]
    named = dict(zip(SIDES, sides, strict=True))
    names = list(named)
    # Each side goes first equally often.
    names = names[turn % len(names) :] + names[: turn % len(names)]
    order = list(range(count))
    random.Random(SEED + turn).shuffle(order)
    seconds: dict[tuple[str, str], float] = {}
    for name in names:
        seconds["new", name] = took(named[name].write)
        seconds["synced", name] = seconds["new", name] + took(named[name].sync)
    for name in names:
        seconds["in place", name] = took(named[name].write)
        named[name].sync()
    for name in names:
        seconds["warm", name] = took(lambda side=named[name]: side.read(order))  # type: ignore[misc]
    for name in names:
        named[name].sync(forget=True)
        seconds["cold", name] = took(lambda side=named[name]: side.read(order))  # type: ignore[misc]
    for side in sides:
        side.close()
    return seconds, ours.caller_s / ours.records * 1e6


def measure(folder: Path, record_bytes: int, total: int, rounds: int) -> tuple[list[Line], float]:
    """Return a line for each case of one record size, and the median of the caller's microseconds for a record."""
    memory = Memory(record_bytes)
    speeds: dict[tuple[str, str], list[float]] = {}
    caller = []
    for turn in range(rounds + 1):
        place = Path(tempfile.mkdtemp(prefix="kvr-bench-disk-", dir=folder))
        try:
            seconds, caller_us = one_round(place, memory, record_bytes, total // record_bytes, turn)
        finally:
            shutil.rmtree(place)
        # The first round is not counted, as it loads code and page tables.
        if turn:
            caller.append(caller_us)
            for case_and_side, value in seconds.items():
                speeds.setdefault(case_and_side, []).append(total / value / 1e9)
    lines = [line(case, record_bytes, {side: speeds[case, side] for side in SIDES}) for case in CASES]
    return lines, statistics.median(caller)


def table(rows: Sequence[Line]) -> str:
    many = f"plain, {DEFAULT_THREADS} threads"
    lines: list[tuple[str, ...]] = [
        ("case", "record", "tier", "plain, 1 thread", many, "ratio to 1", "quartiles", "ratio to all", "quartiles")
    ]
    for row in rows:
        case = {"warm": "read, warm", "cold": "read, cold"}.get(row.case, f"write, {row.case}")
        lines.append((case, f"{row.size_bytes // 2**10} KiB", *shown_speeds(row), *shown_ratios(row)))
    return markdown(lines)


def main() -> None:
    parser = parser_of(__doc__, quick=True, result=True)
    parser.add_argument(
        "--folder",
        type=Path,
        metavar="FOLDER",
        help="on the disk to be measured; default: the system's temporary folder",
    )
    arguments = parser.parse_args()
    folder = arguments.folder or Path(tempfile.gettempdir())
    if not folder.is_dir():
        parser.error(f"{folder} is no folder: make it, or name another one")
    total = QUICK_TOTAL_BYTES if arguments.quick else TOTAL_BYTES
    rounds = QUICK_ROUNDS if arguments.quick else ROUNDS
    result: Result[Line] = Result("offload_disk", arguments.quick, machine(), [], [])
    others = Others()
    for record_bytes in RECORD_BYTES:
        progress(f"offload_disk: records of {record_bytes} bytes")
        rows, caller_us = measure(folder, record_bytes, total, rounds)
        result.rows += rows
        result.notes.append(
            f"records of {record_bytes // 2**10} KiB: {caller_us:.1f} us a record of the CPU time of the thread that asks the tier"
        )
    result.notes += [
        f"{rounds} rounds of {total // 2**20} MiB; {DEFAULT_THREADS} threads; file system {file_system(folder)}",
        others.note(),
    ]
    finish(result, arguments.json, table(result.rows))


def file_system(folder: Path) -> str:
    """Return the type of the folder's file system, by the longest mount point above the folder."""
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    mounts_above = [(point, kind) for point, kind in mounts if folder.resolve().is_relative_to(point)]
    return max(mounts_above, key=lambda mount: len(mount[0]))[1] if mounts_above else "unknown"


if __name__ == "__main__":
    main()
