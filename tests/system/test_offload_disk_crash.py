# SPDX-License-Identifier: Apache-2.0
"""A process that writes to the disk tier is killed at any moment, and the records that it announced are there."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvrouter.engine_patch.offload.disk.format.folder import FolderInUse
from kvrouter.engine_patch.offload.disk.reader import LOOK_S, DiskReader
from kvrouter.engine_patch.offload.disk.tier import DiskTier
from tests.support.disk_child import (
    CHILD_KEYS,
    CHILD_RECORD_BYTES,
    CHILD_RECORDS,
    CHILD_THREADS,
    SALTS_A_LIFE,
    Slots,
    identity,
    key,
    payload,
    salt_of,
)

SUPPORT = Path(__file__).resolve().parents[1] / "support"

KILLS = 20
# Enough for some clears; the shortest lives have hardly a write.
MOST_LINES = 1_500
HANG_S = 120
READS = 600
READERS = 2


class Child:
    """One life of the writing process, and all lines that it printed."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._path = folder / f"said-{seed}"
        self._file = self._path.open("wb")
        command = [sys.executable, str(SUPPORT / "disk_child.py"), str(folder / "disk"), str(seed)]
        self.process = subprocess.Popen(command, stdout=self._file, stderr=subprocess.PIPE)

    def wait_open(self) -> None:
        self._wait_said(b"open\n")

    def wait_stored(self) -> None:
        """Wait until a write to the folder, which was empty, has ended, however busy the machine is."""
        self._wait_said(b"+ ")

    def wait_lines(self, count: int) -> None:
        """Wait until that many lines were printed, however busy the machine is."""
        self._wait(lambda said: said.count(b"\n") >= count)

    def _wait_said(self, words: bytes) -> None:
        self._wait(lambda said: words in said)

    def _wait(self, is_over: Callable[[bytes], bool]) -> None:
        end = time.monotonic() + HANG_S
        while not is_over(self._path.read_bytes()):
            assert self.process.poll() is None and time.monotonic() < end, self.errors()
            time.sleep(0.01)

    def errors(self) -> str:
        self.process.kill()
        return self.process.communicate()[1].decode()

    def end(self, number: int) -> tuple[int, list[str]]:
        """Send a signal, and return the exit status and the lines, without one that a kill has cut short."""
        self.process.send_signal(number)
        error = self.process.communicate(timeout=HANG_S)[1]
        self._file.close()
        assert not error, error.decode()
        return self.process.returncode, self._path.read_text().split("\n")[:-1]


class Account:
    """The state of the disk tier by the lines that all lives have printed so far."""

    def __init__(self) -> None:
        self.there: set[bytes] = set()
        # Nothing with a smaller salt was written since the last clear.
        self.oldest_salt = 0
        # Whether the last life ended within a clear.
        self.clearing = False
        # Whether the last life ended after it had begun a write, which may have evicted.
        self.writing = False

    def add(self, lines: list[str], before: list[bytes]) -> None:
        """Add the lines of one life; `before` has the keys that were there when it began."""
        assert [line for line in lines if line.startswith("+")][: len(before)] == [f"+ {name.hex()}" for name in before]
        self.there.clear()
        self.clearing = False
        for line in lines:
            word, _, rest = line.partition(" ")
            self.writing = word == "?"
            if word == "+":
                assert bytes.fromhex(rest) not in self.there, line
                self.there.add(bytes.fromhex(rest))
            elif word == "-":
                self.there.remove(bytes.fromhex(rest))
            elif word == "clear":
                self.clearing = True
            elif word == "cleared":
                self.there.clear()
                self.clearing, self.oldest_salt = False, int(rest)
            else:
                assert word in ("?", "open", "end"), line


def check(folder: Path, account: Account) -> list[bytes]:
    """Check that all announced records are found and all found ones are right; return their keys, oldest first."""
    slots = Slots(1, CHILD_RECORD_BYTES)
    budget = CHILD_RECORDS * CHILD_RECORD_BYTES
    tier = DiskTier(folder / "disk", identity(CHILD_RECORD_BYTES), CHILD_RECORD_BYTES, budget, slots.view)
    stored_keys = tier.open()
    try:
        assert len(stored_keys) == len(set(stored_keys)) <= CHILD_RECORDS
        assert set(stored_keys) <= {key(number) for number in range(CHILD_KEYS)}
        missing = account.there - set(stored_keys)
        assert len(missing) <= account.writing or (account.clearing and not stored_keys)
        for name in stored_keys:
            slots.fill(0, bytes(CHILD_RECORD_BYTES))
            assert tier.read(name, 0)
            while not (finished := tier.poll()):
                time.sleep(0.0002)
            data = slots.bytes(0)
            assert finished[0].ok and data == payload(name, CHILD_RECORD_BYTES, salt_of(data))
            assert salt_of(data) >= account.oldest_salt
        assert tier.counters.errors == 0
        # A kill tears at most the entry that each thread was writing.
        assert tier.counters.corrupt <= CHILD_THREADS
    finally:
        tier.close()
    return list(stored_keys)


def test_what_was_announced_survives_kills(tmp_path: Path) -> None:
    rng = random.Random(4)
    account = Account()
    stored_keys: list[bytes] = []
    checked = clears = 0
    for seed in range(KILLS):
        child = Child(tmp_path, seed)
        child.wait_open()
        child.wait_lines(rng.randrange(MOST_LINES))
        status, lines = child.end(signal.SIGKILL)
        assert status == -signal.SIGKILL
        account.add(lines, stored_keys)
        stored_keys = check(tmp_path, account)
        checked += len(stored_keys)
        clears = max(clears, account.oldest_salt)
    assert checked > KILLS and clears >= SALTS_A_LIFE


def test_sigterm_ends_it_cleanly(tmp_path: Path) -> None:
    child = Child(tmp_path, 1)
    child.wait_open()
    account = Account()
    with pytest.raises(FolderInUse, match=f"process {child.process.pid} on "):
        check(tmp_path, account)
    child.wait_stored()
    status, lines = child.end(signal.SIGTERM)
    assert (status, lines[-1]) == (0, "end")
    account.add(lines, [])
    assert account.there and not account.writing
    # Keys may be there, too, that had left for writes which were queued at the end and dropped.
    assert set(check(tmp_path, account)) >= account.there


def test_a_reader_beside_a_writer_loads_nothing_else(tmp_path: Path) -> None:
    """Read records while they are given to other keys, torn and cleared.

    Every loaded record is the one that was written for its key.
    """
    rng = random.Random(4)
    child = Child(tmp_path, 1)
    child.wait_open()
    slots = Slots(READERS, CHILD_RECORD_BYTES)
    reader = DiskReader(tmp_path / "disk", identity(CHILD_RECORD_BYTES), slots.view, READERS, READERS)
    known_keys = set(reader.open())
    free, good, missed, resets = list(range(READERS)), 0, 0, 0
    end = time.monotonic() + HANG_S
    try:
        while good < READS:
            assert time.monotonic() < end and child.process.poll() is None, child.errors()
            for finished in reader.poll():
                data = slots.bytes(finished.slot)
                assert not finished.ok or data == payload(finished.key, CHILD_RECORD_BYTES, salt_of(data))
                good += finished.ok
                missed += not finished.ok
                free.append(finished.slot)
            for stored, name in reader.take_changes():
                assert stored is (name not in known_keys)
                (known_keys.add if stored else known_keys.remove)(name)
            assert reader.records == len(known_keys)
            if reader.off:
                # The writer was reset, so reset the reader as well.
                reader.clear()
                resets += 1
            while free and known_keys:
                slots.fill(free[-1], bytes(CHILD_RECORD_BYTES))
                if not reader.read(rng.choice(sorted(known_keys)), free[-1]):
                    break
                free.pop()
            time.sleep(LOOK_S / 500)
    finally:
        status, lines = child.end(signal.SIGTERM)
        reader.close()
    assert status == 0 and lines[-1] == "end"
    print(f"{good} reads, {missed} of records that were given to others meanwhile, {resets} resets")
    assert missed and resets and reader.counters.errors == 0
