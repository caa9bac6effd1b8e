# SPDX-License-Identifier: Apache-2.0
"""Reader of a folder that another engine writes: it reports only records that it can read, and loads no others."""

from __future__ import annotations

import errno
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvrouter.engine_patch.offload.disk.disk_events import READ, Finished
from kvrouter.engine_patch.offload.disk.format.file_ops import FileOps
from kvrouter.engine_patch.offload.disk.format.folder import MANIFEST_FILE, RECORDS_FILE
from kvrouter.engine_patch.offload.disk.format.manifest import ENTRY_BYTES, HEADER_BYTES
from kvrouter.engine_patch.offload.disk.health import MAX_RETRY_S, State
from kvrouter.engine_patch.offload.disk.reader import LOOK_S, NO_HEADER, RESETS_DIFFER, DiskReader
from kvrouter.engine_patch.offload.disk.tier import DiskTier
from kvrouter.engine_patch.offload.key import OffloadKey
from tests.support.disk_child import RECORD_BYTES, STRIDE_BYTES, HandExecutor, Slots, identity, key, payload

A, B, C, D = (key(number) for number in range(4))
# Salt of the payloads that an engine with other weights writes.
NEW_WEIGHTS = 1


class BadFiles(FileOps):
    """File operations whose reads fail while the test says so."""

    def __init__(self) -> None:
        self.bad = False

    def pread(self, fd: int, into: memoryview, offset: int) -> int:
        if self.bad:
            raise OSError(errno.EIO, "made up")
        return super().pread(fd, into, offset)


class Writer:
    """Engine that writes; each write is done before the next one."""

    def __init__(self, folder: Path, records: int = 3) -> None:
        self.slots, self.hands = Slots(1), HandExecutor()
        self.tier = DiskTier(
            folder, identity(), RECORD_BYTES, records * STRIDE_BYTES, self.slots.view, executor=lambda: self.hands
        )
        self.tier.open()

    def store(self, *names: OffloadKey, salt: int = 0) -> None:
        for name in names:
            self.slots.fill(0, payload(name, salt=salt))
            assert self.tier.write(name, 0)
            self.hands.run_all()
            assert self.tier.poll()[0].ok


class Desk:
    """Engine that reads, its work done by hand; `told` adds up the keys that it has announced."""

    def __init__(self, folder: Path) -> None:
        self.now_s = 0.0
        self.slots, self.hands, self.files = Slots(2), HandExecutor(), BadFiles()
        self.tier = DiskReader(
            folder,
            identity(),
            self.slots.view,
            1,
            8,
            clock=lambda: self.now_s,
            files=self.files,
            executor=lambda: self.hands,
        )
        self.told = self.tier.open()

    def look(self, after_s: float = LOOK_S) -> list[OffloadKey]:
        """Look at the folder, and return all keys that are announced by then."""
        self.now_s += after_s
        self.tier.poll()
        # The pending work makes an idle engine step on.
        assert self.tier.pending == len(self.hands.queued)
        self.hands.run_all()
        self.tier.poll()
        return self.taken()

    def taken(self) -> list[OffloadKey]:
        for stored, name in self.tier.take_changes():
            if stored:
                assert name not in self.told
                self.told.append(name)
            else:
                self.told.remove(name)
        assert all(self.tier.holds(name) for name in self.told)
        assert self.tier.records == len(self.told)
        return self.told

    def read(self, name: OffloadKey, salt: int = 0) -> bool:
        """Return whether the record was loaded, and check that its bytes are those that were written."""
        assert self.tier.read(name, 1)
        self.hands.run_all()
        (finished,) = self.tier.poll()
        assert finished == Finished(READ, name, 1, finished.ok)
        assert not finished.ok or self.slots.bytes(1) == payload(name, salt=salt)
        return finished.ok


@pytest.fixture
def desks(tmp_path: Path) -> Iterator[Callable[[], Desk]]:
    made: list[Desk] = []

    def make() -> Desk:
        made.append(Desk(tmp_path))
        return made[-1]

    yield make
    for desk in made:
        desk.tier.close()


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[Writer]:
    disk_writer = Writer(tmp_path)
    yield disk_writer
    disk_writer.tier.close()


def test_records_of_another_engine_are_announced_and_read(writer: Writer, desks: Callable[[], Desk]) -> None:
    writer.store(A, B)
    desk = desks()
    assert desk.told == [A, B]
    writer.store(C)
    assert desk.look(LOOK_S / 2) == [A, B], "not due yet"
    assert desk.tier.pending == 0
    assert desk.look() == [A, B, C]
    assert all(desk.read(name) for name in (A, B, C))
    assert desk.tier.counters.read_bytes == 3 * RECORD_BYTES
    # A goes as the writer's longest unused record, because reads by other engines do not keep it.
    writer.store(D)
    assert desk.look() == [B, C, D]
    assert not desk.tier.read(A, 1)


def test_an_overwritten_record_is_a_miss(writer: Writer, desks: Callable[[], Desk]) -> None:
    writer.store(A, B, C)
    desk = desks()
    writer.store(D)
    assert desk.tier.holds(A)
    assert not desk.read(A)
    assert desk.taken() == [B, C]
    assert desk.look() == [B, C, D]
    assert (desk.tier.counters.corrupt, desk.tier.counters.errors, desk.tier.state) == (0, 0, State.ON)


def test_a_reader_writes_nothing(writer: Writer, desks: Callable[[], Desk], tmp_path: Path) -> None:
    writer.store(A)
    desk = desks()
    (folder,) = tmp_path.iterdir()
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    assert not desk.tier.write(B, 0) and not desk.tier.writing(B)
    desk.tier.touch([A])
    desk.look()
    desk.tier.clear()
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


def test_a_damaged_payload_is_withdrawn_once(writer: Writer, desks: Callable[[], Desk], tmp_path: Path) -> None:
    writer.store(A, B)
    desk = desks()
    with next(tmp_path.glob(f"*/{RECORDS_FILE}")).open("r+b") as file:
        file.seek(100)
        file.write(b"\xff")
    assert not desk.read(A)
    assert desk.look() == [B] and desk.look() == [B]
    # The writer finds the damage in its own way, and may write the record again.
    writer.tier.read(A, 0)
    writer.hands.run_all()
    writer.tier.poll()
    writer.store(A)
    assert desk.look() == [B, A] and desk.read(A)


def test_a_torn_entry_is_not_announced_until_it_is_whole(
    writer: Writer, desks: Callable[[], Desk], tmp_path: Path
) -> None:
    writer.store(A, B)
    manifest = next(tmp_path.glob(f"*/{MANIFEST_FILE}"))
    content = manifest.read_bytes()
    desk = desks()
    with manifest.open("r+b") as file:
        file.seek(HEADER_BYTES + ENTRY_BYTES // 2)
        file.write(bytes(8))
    assert desk.look() == [B]
    with manifest.open("r+b") as file:
        file.write(content)
    assert desk.look() == [B, A]


def test_a_missing_folder_is_waited_for(desks: Callable[[], Desk], tmp_path: Path) -> None:
    desk = desks()
    assert desk.told == [] and desk.tier.off and desk.tier.state is State.ON
    assert desk.look() == [] and desk.tier.counters.errors == 0
    writer = Writer(tmp_path)
    writer.store(A)
    assert desk.look() == [A] and not desk.tier.off
    writer.tier.close()
    # A writer that ends leaves all of its records.
    assert desk.look() == [A] and desk.read(A)


def test_a_recreated_folder_is_read_again(desks: Callable[[], Desk], tmp_path: Path) -> None:
    first = Writer(tmp_path)
    first.store(A, B)
    desk = desks()
    first.tier.close()
    shutil.rmtree(tmp_path)
    assert desk.look() == []
    second = Writer(tmp_path)
    second.store(C)
    assert desk.look() == [C] and desk.read(C)
    second.tier.close()


def test_a_smaller_budget_of_the_writer_withdraws_records(desks: Callable[[], Desk], tmp_path: Path) -> None:
    """Restart the writer with a smaller budget, so that it moves and forgets records."""
    first = Writer(tmp_path)
    first.store(A, B, C)
    first.tier.close()
    desk = desks()
    second = Writer(tmp_path, records=1)
    assert desk.look() == [C] and desk.read(C)
    second.tier.close()


@pytest.mark.parametrize("writer_first", [True, False])
def test_only_engines_that_were_reset_equally_often_share(
    writer_first: bool, writer: Writer, desks: Callable[[], Desk], caplog: pytest.LogCaptureFixture
) -> None:
    writer.store(A, B)
    desk = desks()
    if writer_first:
        writer.tier.clear()
        writer.store(C, salt=NEW_WEIGHTS)
        # This record is of weights that the reading engine does not have yet.
        assert desk.look() == []
        assert RESETS_DIFFER in caplog.text
        desk.tier.clear()
        assert desk.taken() == [C]
    else:
        desk.tier.clear()
        assert desk.taken() == [] and not desk.tier.holds(A) and desk.tier.off
        # This record is still of the old weights.
        writer.store(C)
        assert desk.look() == []
        writer.tier.clear()
        writer.store(C, salt=NEW_WEIGHTS)
        assert desk.look() == [C]
    assert desk.read(C, salt=NEW_WEIGHTS)
    assert len([record for record in caplog.records if RESETS_DIFFER in record.getMessage()]) == 1


def test_a_reset_before_there_was_a_folder_counts(desks: Callable[[], Desk], tmp_path: Path) -> None:
    desk = desks()
    desk.tier.clear()
    writer = Writer(tmp_path)
    writer.store(A)
    assert desk.look() == [], "of the weights before the reset"
    writer.tier.clear()
    writer.store(A, salt=NEW_WEIGHTS)
    assert desk.look() == [A] and desk.read(A, salt=NEW_WEIGHTS)
    writer.tier.close()


def test_a_read_before_a_reset_fails(writer: Writer, desks: Callable[[], Desk]) -> None:
    writer.store(A)
    desk = desks()
    assert desk.tier.read(A, 1)
    desk.tier.clear()
    desk.hands.run_all()
    assert desk.tier.poll() == [Finished(READ, A, 1, False)]


def test_errors_in_a_row_withdraw_everything_and_it_comes_back(writer: Writer, desks: Callable[[], Desk]) -> None:
    writer.store(A, B)
    desk = desks()
    desk.files.bad = True
    for _ in range(3):
        desk.look()
    assert desk.told == [] and desk.tier.state is State.OFF and desk.tier.counters.errors == 3
    writer.store(C)
    desk.files.bad = False
    assert desk.look() == [], "not tried so soon"
    assert desk.look(MAX_RETRY_S) == [A, B, C]
    assert desk.tier.state is State.ON and desk.read(B)


def test_another_engines_records_are_never_believed(desks: Callable[[], Desk], tmp_path: Path) -> None:
    """Rename a folder of another identity to our name, as somebody may have copied it."""
    foreign = DiskTier(tmp_path, identity(model="other"), RECORD_BYTES, STRIDE_BYTES, Slots(1).view, 1, 1)
    foreign.open()
    foreign.close()
    (folder,) = tmp_path.iterdir()
    folder.rename(tmp_path / identity().folder_name())
    desk = desks()
    assert desk.told == [] and desk.tier.counters.errors == 1


def test_a_missing_header_is_waited_for(
    desks: Callable[[], Desk], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / identity().folder_name()
    folder.mkdir()
    for name in (MANIFEST_FILE, RECORDS_FILE):
        (folder / name).touch()
    with caplog.at_level(logging.WARNING):
        desk = desks()
    assert desk.told == [] and NO_HEADER in caplog.text
    writer = Writer(tmp_path)
    writer.store(A)
    assert desk.look() == [A] and desk.read(A)
    writer.tier.close()


def test_closing_fails_the_queued_reads(writer: Writer, desks: Callable[[], Desk]) -> None:
    writer.store(A)
    desk = desks()
    assert desk.tier.read(A, 1) and desk.tier.pending == 1
    desk.tier.close()
    assert desk.tier.poll() == [Finished(READ, A, 1, False)]
    assert not desk.tier.holds(A) and desk.tier.state is State.CLOSED
    with pytest.raises(ValueError, match="opened before"):
        desk.tier.open()


def test_a_damaged_payload_is_named_in_the_log_and_one_given_away_is_not(
    writer: Writer, desks: Callable[[], Desk], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer.store(A, B, C)
    desk = desks()
    (records,) = tmp_path.glob("*/records")
    content = bytearray(records.read_bytes())
    content[STRIDE_BYTES] ^= 1
    records.write_bytes(content)
    assert not desk.read(B)
    assert (desk.tier.counters.corrupt, desk.tier.counters.errors) == (1, 0)
    (line,) = [record.getMessage() for record in caplog.records]
    assert str(records.parent) in line and "the payload of record 1 is damaged" in line
    writer.store(D)
    desk.now_s += 1_000.0
    assert not desk.read(A)
    assert len(caplog.records) == 1 and desk.tier.counters.corrupt == 1
