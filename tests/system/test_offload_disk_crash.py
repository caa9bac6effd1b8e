# SPDX-License-Identifier: Apache-2.0
"""A process that writes to the disk tier is killed at any moment, and what it had announced is there."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
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
# From nearly nothing to a few hundred writes.
LONGEST_LIFE_S = 0.5
HANG_S = 120
READS = 600
READERS = 2


class Child:
    """One life of the writing process, and all that it said."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._path = folder / f"said-{seed}"
        self._file = self._path.open("wb")
        command = [sys.executable, str(SUPPORT / "disk_child.py"), str(folder / "disk"), str(seed)]
        self.process = subprocess.Popen(command, stdout=self._file, stderr=subprocess.PIPE)

    def wait_open(self) -> None:
        self._wait_said(b"open\n")

    def wait_stored(self) -> None:
        """Until a write of a folder that was empty has ended, however busy the machine is."""
        self._wait_said(b"+ ")

    def _wait_said(self, words: bytes) -> None:
        end = time.monotonic() + HANG_S
        while words not in self._path.read_bytes():
            assert self.process.poll() is None and time.monotonic() < end, self.errors()
            time.sleep(0.01)

    def errors(self) -> str:
        self.process.kill()
        return self.process.communicate()[1].decode()

    def end(self, number: int) -> tuple[int, list[str]]:
        """Its exit status and its lines; one that a kill has cut short is left out."""
        self.process.send_signal(number)
        error = self.process.communicate(timeout=HANG_S)[1]
        self._file.close()
        assert not error, error.decode()
        return self.process.returncode, self._path.read_text().split("\n")[:-1]


class Account:
    """What all lives have said so far."""

    def __init__(self) -> None:
        self.there: set[bytes] = set()
        # Nothing with a smaller salt was written since the last clear.
        self.oldest_salt = 0
        # The last life ended within a clear; after it had begun a write, which may have evicted.
        self.clearing = False
        self.writing = False

    def add(self, lines: list[str], found: list[bytes]) -> None:
        """The lines of one life. found: what was there before it."""
        assert [line for line in lines if line.startswith("+")][: len(found)] == [f"+ {name.hex()}" for name in found]
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
    """All that was announced is found, and all that is found is right. Returns it, oldest first."""
    slots = Slots(1, CHILD_RECORD_BYTES)
    budget = CHILD_RECORDS * CHILD_RECORD_BYTES
    tier = DiskTier(folder / "disk", identity(CHILD_RECORD_BYTES), CHILD_RECORD_BYTES, budget, slots.view)
    found = tier.open()
    try:
        assert len(found) == len(set(found)) <= CHILD_RECORDS
        assert set(found) <= {key(number) for number in range(CHILD_KEYS)}
        missing = account.there - set(found)
        assert len(missing) <= account.writing or (account.clearing and not found)
        for name in found:
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
    return list(found)


def test_what_was_announced_survives_kills(tmp_path: Path) -> None:
    rng = random.Random(4)
    account = Account()
    found: list[bytes] = []
    checked = clears = 0
    for seed in range(KILLS):
        child = Child(tmp_path, seed)
        child.wait_open()
        time.sleep(rng.uniform(0, LONGEST_LIFE_S))
        status, lines = child.end(signal.SIGKILL)
        assert status == -signal.SIGKILL
        account.add(lines, found)
        found = check(tmp_path, account)
        checked += len(found)
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
    # And maybe what had left for writes that were queued at the end and dropped.
    assert set(check(tmp_path, account)) >= account.there


def test_a_reader_beside_a_writer_loads_nothing_else(tmp_path: Path) -> None:
    """Records are given to other keys, torn and cleared while they are read; what is loaded is what was written for
    that key."""
    rng = random.Random(4)
    child = Child(tmp_path, 1)
    child.wait_open()
    slots = Slots(READERS, CHILD_RECORD_BYTES)
    reader = DiskReader(tmp_path / "disk", identity(CHILD_RECORD_BYTES), slots.view, READERS, READERS)
    told = set(reader.open())
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
                assert stored is (name not in told)
                (told.add if stored else told.remove)(name)
            assert reader.records == len(told)
            if reader.off:
                # The writer was reset: as often here.
                reader.clear()
                resets += 1
            while free and told:
                slots.fill(free[-1], bytes(CHILD_RECORD_BYTES))
                if not reader.read(rng.choice(sorted(told)), free[-1]):
                    break
                free.pop()
            time.sleep(LOOK_S / 500)
    finally:
        status, lines = child.end(signal.SIGTERM)
        reader.close()
    assert status == 0 and lines[-1] == "end"
    print(f"{good} reads, {missed} of records that were given to others meanwhile, {resets} resets")
    assert missed and resets and reader.counters.errors == 0
