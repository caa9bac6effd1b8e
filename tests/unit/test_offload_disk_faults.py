# SPDX-License-Identifier: Apache-2.0
"""The disk tier on a disk in trouble: never an exception, never wrong bytes, and everything that is lost is told."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from disk_child import RECORD_BYTES, STRIDE_BYTES, FaultyFiles, HandExecutor, Slots, identity, key, payload, salt_of

from kvrouter.engine_patch.offload.disk.disk_events import READ, WRITE, Finished
from kvrouter.engine_patch.offload.disk.format.file_ops import FileOps
from kvrouter.engine_patch.offload.disk.format.folder import DiskFolderError
from kvrouter.engine_patch.offload.disk.format.manifest import ENTRY_BYTES, HEADER_BYTES
from kvrouter.engine_patch.offload.disk.format.record_store import DONE, Found, RecordOutcome, Store
from kvrouter.engine_patch.offload.disk.health import State
from kvrouter.engine_patch.offload.disk.tier import UNCLEARED, DiskTier
from kvrouter.engine_patch.offload.key import OffloadKey
from kvrouter.engine_patch.setup.throttled_log import INTERVAL_S

A, B, C, D, E = (key(number) for number in range(5))
RETRY_S = 10.0


class Desk:
    """A tier on files that fail when told to, its work done by hand, at a time that stands still."""

    def __init__(self, folder: Path, records: int) -> None:
        self.now = 0.0
        self.slots = Slots(4)
        self.hands = HandExecutor()
        self.files = FaultyFiles()
        self.tier = DiskTier(
            folder,
            identity(),
            RECORD_BYTES,
            records * STRIDE_BYTES,
            self.slots.view,
            retry_s=RETRY_S,
            clock=lambda: self.now,
            files=self.files,
            executor=lambda: self.hands,
        )
        self.found = self.tier.open()

    def write(self, name: OffloadKey) -> bool | None:
        """Whether it was written, None when it was not even begun."""
        self.slots.fill(0, payload(name))
        return self._ended(WRITE, name) if self.tier.write(name, 0) else None

    def read(self, name: OffloadKey) -> bool | None:
        """Whether it was read, None when it was not even begun. What is read is right."""
        self.slots.fill(0, bytes(RECORD_BYTES))
        if not self.tier.read(name, 0):
            return None
        ok = self._ended(READ, name)
        assert not ok or self.slots.bytes(0) == payload(name)
        return ok

    def _ended(self, kind: str, name: OffloadKey) -> bool:
        self.hands.run_all()
        (finished,) = self.tier.poll()
        assert finished == Finished(kind, name, 0, finished.ok)
        return finished.ok

    def changes(self) -> list[tuple[str, OffloadKey]]:
        return [("+" if stored else "-", name) for stored, name in self.tier.take_changes()]

    def trial(self) -> None:
        """One poll that may begin a trial, and one that sees its end."""
        assert self.tier.poll() == []
        self.hands.run_all()
        assert self.tier.poll() == []


@pytest.fixture
def desks(tmp_path: Path) -> Iterator[Callable[..., Desk]]:
    made: list[Desk] = []

    def make(records: int = 3, *names: OffloadKey) -> Desk:
        desk = Desk(tmp_path, records)
        made.append(desk)
        for name in names:
            assert desk.write(name)
        desk.changes()
        return desk

    yield make
    for desk in made:
        desk.tier.close()


def patch(path: Path, offset: int) -> None:
    """Flips one bit."""
    content = bytearray(path.read_bytes())
    content[offset] ^= 4
    path.write_bytes(content)


def files_of(tmp_path: Path) -> tuple[Path, Path]:
    (manifest,), (records,) = tmp_path.glob("*/manifest"), tmp_path.glob("*/records")
    return manifest, records


@pytest.mark.parametrize("where", ["payload", "entry", "payload gone"])
def test_a_damaged_record_is_dropped_when_it_is_read(desks: Callable[..., Desk], tmp_path: Path, where: str) -> None:
    desk = desks(3, A, B)
    manifest, records = files_of(tmp_path)
    if where == "payload":
        patch(records, STRIDE_BYTES + RECORD_BYTES - 1)
    elif where == "entry":
        patch(manifest, HEADER_BYTES + ENTRY_BYTES + 60)
    else:
        records.write_bytes(records.read_bytes()[:STRIDE_BYTES])
    assert desk.read(B) is False
    assert desk.changes() == [("-", B)] and not desk.tier.holds(B)
    counters = desk.tier.counters
    assert (counters.corrupt, counters.errors) == ((0, 1) if where == "payload gone" else (1, 0))
    assert desk.read(B) is None and desk.read(A)
    desk.tier.close()
    # And not found again.
    again = desks()
    assert again.found == [A] and again.tier.counters.corrupt == 0
    # Its place serves another.
    assert again.write(B) and again.read(B)


def test_two_reads_of_a_damaged_record_tell_it_once(desks: Callable[..., Desk], tmp_path: Path) -> None:
    desk = desks(3, A)
    patch(files_of(tmp_path)[1], 0)
    assert desk.tier.read(A, 1) and desk.tier.read(A, 2)
    desk.hands.run_all()
    assert [done.ok for done in desk.tier.poll()] == [False, False]
    assert desk.changes() == [("-", A)]
    assert desk.write(A) and desk.changes() == [("+", A)]


def test_a_late_read_of_a_dropped_record_does_not_drop_the_new_one(desks: Callable[..., Desk], tmp_path: Path) -> None:
    desk = desks(3, A)
    patch(files_of(tmp_path)[1], 0)
    assert desk.tier.read(A, 1) and desk.tier.read(A, 2)
    desk.hands.run()
    desk.tier.poll()
    desk.slots.fill(3, payload(A))
    assert desk.tier.write(A, 3)
    desk.hands.run(1)
    desk.tier.poll()
    assert desk.changes() == [("-", A), ("+", A)]
    desk.hands.run_all()
    assert [done.ok for done in desk.tier.poll()] == [False]
    assert desk.changes() == [] and desk.read(A)


def test_damaged_entries_are_dropped_at_the_start(desks: Callable[..., Desk], tmp_path: Path) -> None:
    desks(3, A, B, C).tier.close()
    manifest, records = files_of(tmp_path)
    patch(manifest, HEADER_BYTES + 10)
    # The third payload is not whole.
    records.write_bytes(records.read_bytes()[:-1])
    again = desks()
    assert again.found == [B] and again.tier.counters.corrupt == 2
    again.tier.close()
    third = desks()
    assert third.found == [B] and third.tier.counters.corrupt == 0


def test_a_damaged_header_drops_all(desks: Callable[..., Desk], tmp_path: Path) -> None:
    desks(3, A, B).tier.close()
    patch(files_of(tmp_path)[0], 30)
    again = desks(3)
    assert again.found == [] and again.tier.counters.corrupt == 2
    assert again.write(C)
    again.tier.close()
    assert desks().found == [C]


@pytest.mark.parametrize("fault", [errno.EIO, "none"])
@pytest.mark.parametrize("at", ["void", "payload", "entry"])
def test_a_write_that_fails_is_given_up(desks: Callable[..., Desk], at: str, fault: int | str) -> None:
    desk = desks(2, A, B)
    if at == "payload":
        desk.files.fail("write", "records", "short", fault)
    else:
        desk.files.fail("write", "manifest", *([None] if at == "entry" else []), fault)
    assert desk.write(C) is False
    assert desk.changes() == [("-", A)] and not desk.tier.writing(C)
    assert (desk.tier.counters.errors, desk.tier.state) == (1, State.ON)
    assert desk.write(C) and desk.changes() == [("+", C)]
    assert desk.read(C) and desk.read(B)
    desk.tier.close()
    assert desks(2).found == [B, C]


def test_a_torn_entry_is_never_found(desks: Callable[..., Desk]) -> None:
    desk = desks(2, A)
    # Half of the entry, and then neither the rest of it nor its void can be written.
    desk.files.fail("write", "manifest", None, "short", errno.EIO, errno.EIO)
    assert desk.write(B) is False
    desk.tier.close()
    again = desks(2)
    assert again.found == [A] and again.tier.counters.corrupt == 1


def test_what_is_left_of_an_entry_that_failed_is_voided(desks: Callable[..., Desk]) -> None:
    desk = desks(2, A)
    desk.files.fail("write", "manifest", None, "short", errno.EIO)
    assert desk.write(B) is False
    desk.tier.close()
    again = desks(2)
    assert again.found == [A] and again.tier.counters.corrupt == 0


def store(folder: Path) -> Store:
    """Of a folder without a tier, three records of which were written: A, B, and A again."""
    made = Store.open(folder, identity(), FileOps())
    made.recover(4)
    for record, name in enumerate([A, B, A]):
        data = memoryview(payload(name, RECORD_BYTES, record))
        assert made.write(name, record, made.generation, record, data) == DONE
    return made


def test_of_a_key_that_is_there_twice_the_newer_stays(tmp_path: Path) -> None:
    store(tmp_path).close()
    made = Store.open(tmp_path, identity(), FileOps())
    assert made.recover(4) == Found([(B, 1), (A, 2)], 3, 3, 0, 0)
    into = memoryview(bytearray(RECORD_BYTES))
    assert made.read(A, 2, made.generation, into) == DONE and salt_of(into) == 2
    # Should the newer one go, the older does not come back.
    assert made.read(A, 0, made.generation, into).outcome is RecordOutcome.CORRUPT
    made.close()


@pytest.mark.parametrize("wrong", ["key", "generation"])
def test_an_entry_of_something_else_is_not_loaded(tmp_path: Path, wrong: str) -> None:
    made = store(tmp_path)
    into = memoryview(bytearray(RECORD_BYTES))
    name, generation = (B, made.generation) if wrong == "key" else (A, made.generation + 1)
    assert made.read(name, 0, generation, into).outcome is RecordOutcome.CORRUPT
    assert bytes(into) == bytes(RECORD_BYTES)
    made.close()


def test_a_read_that_fails_drops_the_record(desks: Callable[..., Desk]) -> None:
    desk = desks(2, A, B)
    desk.files.fail("read", "records", errno.EIO)
    assert desk.read(A) is False
    assert desk.changes() == [("-", A)] and desk.tier.counters.errors == 1
    desk.tier.close()
    assert desks(2).found == [B]


def test_a_full_disk_makes_a_smaller_tier(desks: Callable[..., Desk]) -> None:
    desk = desks(4, A, B)
    desk.files.always[("write", "records")] = errno.ENOSPC
    assert desk.write(C) is False
    assert desk.changes() == []
    assert (desk.tier.counters.full, desk.tier.counters.errors, desk.tier.state) == (1, 0, State.FULL)
    assert "ENOSPC" in desk.tier.reason
    desk.files.always.clear()
    # In place of what is there, without new space.
    assert desk.write(C) and desk.changes() == [("-", A), ("+", C)]
    assert desk.read(B) and desk.tier.state is State.FULL
    desk.now += RETRY_S
    assert desk.write(D) and desk.changes() == [("+", D)]
    assert (desk.tier.state, desk.tier.reason) == (State.ON, "")
    assert desk.write(E) and desk.changes() == [("+", E)]
    assert desk.tier.records == 4


@pytest.mark.parametrize("number", [errno.EDQUOT, errno.EFBIG])
def test_other_ways_of_being_full(desks: Callable[..., Desk], number: int) -> None:
    desk = desks(4, A)
    desk.files.fail("write", "records", number)
    assert desk.write(B) is False and desk.tier.state is State.FULL


def test_a_disk_full_from_the_start_takes_nothing(desks: Callable[..., Desk]) -> None:
    desk = desks(4)
    desk.files.always[("write", "records")] = errno.ENOSPC
    assert desk.write(A) is False
    assert desk.write(A) is None and desk.write(B) is None
    assert desk.tier.counters.skipped == 2
    desk.now += RETRY_S
    assert desk.write(A) is False
    assert desk.write(A) is None


def test_no_space_even_in_place_does_not_drain_the_tier(desks: Callable[..., Desk]) -> None:
    desk = desks(3, A, B, C)
    desk.files.always[("write", "records")] = errno.ENOSPC
    assert desk.write(D) is False
    assert desk.changes() == [("-", A)]
    assert desk.write(D) is None and desk.write(E) is None
    assert desk.changes() == [] and desk.read(B)
    desk.files.always.clear()
    assert desk.write(D) is None
    desk.now += RETRY_S
    assert desk.write(D) and desk.tier.state is State.ON


def test_repeated_errors_withdraw_all_and_a_trial_brings_it_back(desks: Callable[..., Desk]) -> None:
    desk = desks(4, A, B, C)
    desk.files.always[("write", "records")] = errno.EIO
    assert [desk.write(D), desk.write(D)] == [False, False]
    assert (desk.changes(), desk.tier.state) == ([], State.ON)
    assert desk.write(D) is False
    assert desk.changes() == [("-", A), ("-", B), ("-", C)]
    assert desk.tier.state is State.OFF and "3 errors in a row" in desk.tier.reason and "EIO" in desk.tier.reason
    assert not desk.tier.holds(A) and desk.read(A) is None and desk.write(D) is None
    assert (desk.tier.counters.skipped, desk.tier.counters.errors) == (1, 3)
    desk.files.always = {("read", "records"): errno.EIO}
    desk.trial()
    assert desk.hands.queued == [] and desk.tier.counters.errors == 3
    desk.now += RETRY_S
    desk.trial()
    assert desk.tier.state is State.OFF and desk.changes() == [] and desk.tier.counters.errors == 4
    desk.files.always = {("sync", "manifest"): errno.EIO}
    desk.now += 2 * RETRY_S
    desk.trial()
    assert desk.tier.state is State.OFF
    desk.files.always = {("write", "manifest"): errno.EROFS}
    desk.now += 4 * RETRY_S
    desk.trial()
    assert desk.tier.state is State.OFF and desk.tier.pending == 0
    desk.files.always.clear()
    desk.now += 8 * RETRY_S - 1
    desk.trial()
    assert desk.tier.state is State.OFF
    desk.now += 1
    desk.trial()
    assert desk.tier.state is State.ON and desk.tier.reason == ""
    assert desk.changes() == [("+", A), ("+", B), ("+", C)]
    assert desk.read(A) and desk.write(D)


def test_what_ends_while_it_is_off_is_told_when_it_is_back(desks: Callable[..., Desk]) -> None:
    desk = desks(8, A)
    desk.slots.fill(1, payload(B))
    desk.slots.fill(2, payload(C))
    assert desk.tier.write(B, 1) and desk.tier.write(C, 2) and desk.tier.read(A, 3)
    late = desk.hands.queued[:]
    desk.hands.queued.clear()
    desk.files.fail("write", "records", errno.EIO, errno.EIO, errno.EIO)
    assert [desk.write(D), desk.write(D), desk.write(D)] == [False, False, False]
    assert desk.changes() == [("-", A)]
    desk.hands.queued += late
    desk.files.fail("write", "records", None, errno.EIO)
    desk.hands.run_all()
    assert [(done.key, done.ok) for done in desk.tier.poll()] == [(B, True), (C, False), (A, True)]
    assert desk.changes() == []
    desk.now += RETRY_S
    desk.trial()
    assert desk.changes() == [("+", A), ("+", B)] and desk.read(B)


def test_a_clear_that_fails_is_made_up_for(desks: Callable[..., Desk]) -> None:
    desk = desks(3, A, B)
    desk.files.always[("write", "manifest")] = errno.EIO
    desk.tier.clear()
    assert desk.changes() == [("-", A), ("-", B)]
    assert desk.tier.state is State.OFF and desk.tier.reason.startswith(UNCLEARED)
    assert desk.write(C) is None and desk.tier.counters.errors == 1
    desk.now += RETRY_S
    desk.trial()
    assert desk.tier.state is State.OFF and desk.tier.reason.startswith(UNCLEARED)
    desk.files.always.clear()
    desk.now += 2 * RETRY_S
    desk.trial()
    assert desk.tier.state is State.ON and desk.changes() == []
    assert desk.write(C)
    desk.tier.close()
    assert desks().found == [C]


def test_a_clear_that_fails_is_made_up_for_at_the_end(desks: Callable[..., Desk]) -> None:
    desk = desks(3, A, B)
    desk.files.fail("write", "manifest", errno.EIO)
    desk.tier.clear()
    desk.tier.close()
    assert desks().found == []


def test_a_trial_of_before_a_failed_clear_does_not_count(desks: Callable[..., Desk]) -> None:
    desk = desks(3, A)
    desk.files.fail("write", "records", errno.EIO, errno.EIO, errno.EIO)
    assert [desk.write(B), desk.write(B), desk.write(B)] == [False, False, False]
    desk.now += RETRY_S
    desk.tier.poll()
    # The trial has ended, but its end is not seen yet.
    desk.hands.run_all()
    desk.files.fail("write", "manifest", errno.EIO)
    desk.tier.clear()
    desk.tier.poll()
    assert desk.tier.state is State.OFF
    desk.now += 100 * RETRY_S
    desk.trial()
    assert desk.tier.state is State.ON
    desk.tier.close()
    assert desks().found == []


def test_a_start_on_files_that_fail_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    desk = Desk(tmp_path, 3)
    assert desk.write(A)
    desk.tier.close()
    files = FaultyFiles()
    files.fail("read", "manifest", errno.EIO)
    slots = Slots(1)
    tier = DiskTier(tmp_path, identity(), RECORD_BYTES, STRIDE_BYTES, slots.view, files=files)
    with pytest.raises(DiskFolderError, match=r"EIO.*set disk_path"):
        tier.open()
    assert files.names == {}
    # The lock was given back.
    again = Desk(tmp_path, 3)
    assert again.found == [A]
    again.tier.close()


def test_one_bad_record_does_not_stop_a_start_that_moves_it(desks: Callable[..., Desk], tmp_path: Path) -> None:
    names = [A, B, C, D]
    desks(4, *names).tier.close()
    patch(files_of(tmp_path)[1], 2 * STRIDE_BYTES)
    again = desks(2)
    assert again.found == [D] and again.read(D)
    assert (again.tier.counters.corrupt, again.tier.counters.evicted) == (1, 2)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_damaged_records_are_named_in_the_log_and_counted_when_there_are_many(
    desks: Callable[..., Desk], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    desk = desks(5, A, B, C, D)
    manifest, records = files_of(tmp_path)
    for record in range(3):
        patch(records, record * STRIDE_BYTES)
    assert desk.read(A) is False
    (line,) = lines(caplog)
    assert str(manifest.parent) in line and "the payload of record 0 is damaged" in line
    assert "nothing of it was loaded, the record was dropped" in line and "1 such records" in line
    # The others within the minute are told together.
    assert desk.read(B) is False and desk.read(C) is False
    assert len(lines(caplog)) == 1
    desk.now += INTERVAL_S
    desk.tier.poll()
    line = lines(caplog)[1]
    assert "record 2" in line and "1 more since the last line; 3 such records" in line
    desk.now += 9 * INTERVAL_S
    desk.tier.poll()
    assert len(lines(caplog)) == 2
    # And what is found at a start.
    desk.tier.close()
    patch(manifest, HEADER_BYTES + 3 * ENTRY_BYTES + 60)
    desks(5)
    assert "1 records of an earlier engine are damaged" in lines(caplog)[2] and str(manifest.parent) in lines(caplog)[2]


def test_reads_and_writes_that_fail_are_named_in_the_log(
    desks: Callable[..., Desk], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    desk = desks(4, A)
    desk.files.fail("read", "records", errno.EIO)
    assert desk.read(A) is False
    desk.now += INTERVAL_S
    desk.files.fail("write", "records", errno.EIO)
    assert desk.write(B) is False
    read, written = lines(caplog)
    assert "record 0 could not be read (" in read and "EIO" in read and str(files_of(tmp_path)[0].parent) in read
    assert "could not be written (" in written and "what it was to hold is not on disk" in written
