# SPDX-License-Identifier: Apache-2.0
"""The disk tier on a healthy disk: what it holds, evicts, tells, clears, and finds again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from disk_child import RECORD_BYTES, STRIDE_BYTES, FaultyFiles, HandExecutor, Slots, identity, key, payload

from kvrouter.engine_patch.offload.disk.disk_events import READ, WRITE, Finished
from kvrouter.engine_patch.offload.disk.format.checksum import CRC32
from kvrouter.engine_patch.offload.disk.format.folder import DiskFolderError, FolderInUse, ForeignFolder
from kvrouter.engine_patch.offload.disk.health import State
from kvrouter.engine_patch.offload.disk.tier import DiskTier
from kvrouter.engine_patch.offload.key import OffloadKey

A, B, C, D = (key(number) for number in range(4))
SLOTS = 8


class Desk:
    """A tier, its slots, and its work done by hand."""

    def __init__(self, folder: Path, records: int = 3, **options: Any) -> None:
        self.slots = Slots(SLOTS)
        self.hands = HandExecutor(options.pop("max_queued", 100))
        self.files = FaultyFiles()
        self.told: dict[OffloadKey, bool] = {}
        options = {"executor": lambda: self.hands, "files": self.files, "identity": identity()} | options
        self.tier = DiskTier(
            folder,
            record_bytes=RECORD_BYTES,
            budget_bytes=records * STRIDE_BYTES,
            slot_bytes_of=self.slots.view,
            **options,
        )
        self.found = self.tier.open()

    def write(self, name: OffloadKey, slot: int = 0) -> bool:
        self.slots.fill(slot, payload(name))
        return self.tier.write(name, slot)

    def store(self, *names: OffloadKey) -> None:
        """Written, each before the next, and told."""
        for name in names:
            assert self.write(name)
            self.hands.run_all()
            assert self.tier.poll() == [Finished(WRITE, name, 0, True)]
        self.tier.take_changes()

    def reads_back(self, name: OffloadKey) -> bool:
        self.slots.fill(7, bytes(RECORD_BYTES))
        assert self.tier.read(name, 7)
        self.hands.run_all()
        assert self.tier.poll() == [Finished(READ, name, 7, True)]
        return self.slots.bytes(7) == payload(name)

    def changes(self) -> list[tuple[str, OffloadKey]]:
        return [("+" if stored else "-", name) for stored, name in self.tier.take_changes()]


@pytest.fixture
def desks(tmp_path: Path) -> Iterator[Callable[..., Desk]]:
    made: list[Desk] = []

    def make(records: int = 3, **options: Any) -> Desk:
        made.append(Desk(tmp_path, records, **options))
        return made[-1]

    yield make
    for desk in made:
        desk.tier.close()


def test_stored_is_told_when_the_entry_is_written_and_not_before(desks: Callable[..., Desk]) -> None:
    desk = desks()
    assert desk.found == [] and desk.tier.state is State.ON
    assert desk.write(A, 2)
    assert (desk.tier.holds(A), desk.tier.writing(A), desk.tier.pending) == (False, True, 1)
    assert not desk.tier.read(A, 3)
    assert (desk.tier.poll(), desk.changes()) == ([], [])
    desk.hands.run()
    assert not desk.tier.holds(A)
    assert desk.tier.poll() == [Finished(WRITE, A, 2, True)]
    assert desk.changes() == [("+", A)]
    assert (desk.tier.holds(A), desk.tier.writing(A), desk.tier.pending) == (True, False, 0)
    assert desk.reads_back(A)
    counters = desk.tier.counters
    assert (counters.written_bytes, counters.read_bytes) == (RECORD_BYTES, RECORD_BYTES)
    assert (desk.tier.records, desk.tier.held_bytes) == (1, RECORD_BYTES)


def test_what_is_there_or_on_its_way_is_not_written_again(desks: Callable[..., Desk]) -> None:
    desk = desks()
    assert desk.write(A)
    assert not desk.write(A, 1)
    desk.hands.run_all()
    # Done, but not told yet.
    assert not desk.write(A, 1)
    desk.tier.poll()
    assert not desk.write(A, 1)
    assert (desk.tier.counters.repeated, desk.tier.counters.skipped, desk.tier.pending) == (3, 0, 0)


def test_the_longest_unused_is_told_removed_before_its_record_is_written(desks: Callable[..., Desk]) -> None:
    desk = desks()
    desk.store(A, B, C)
    assert desk.reads_back(A)
    desk.tier.touch([B, D])
    assert desk.write(D)
    assert desk.changes() == [("-", C)] and not desk.tier.holds(C)
    desk.hands.run_all()
    desk.tier.poll()
    assert desk.changes() == [("+", D)]
    assert desk.tier.counters.evicted == 1
    assert all(desk.reads_back(name) for name in (A, B, D))
    assert not desk.tier.read(C, 0)


def test_a_record_that_is_read_is_not_evicted(desks: Callable[..., Desk]) -> None:
    desk = desks(records=2)
    desk.store(A, B)
    assert desk.tier.read(A, 1) and desk.tier.read(A, 2)
    desk.tier.touch([B])
    assert desk.write(C)
    assert desk.changes() == [("-", B)]
    # One is read and one is written.
    assert not desk.write(D, 3)
    assert desk.tier.counters.skipped == 1
    desk.hands.run_all()
    assert sorted(finished.slot for finished in desk.tier.poll() if finished.ok) == [0, 1, 2]
    assert desk.slots.bytes(1) == desk.slots.bytes(2) == payload(A)
    assert desk.write(D, 3)


def test_a_full_queue_refuses_and_changes_nothing(desks: Callable[..., Desk]) -> None:
    desk = desks(records=1, max_queued=1)
    desk.store(A)
    assert desk.tier.read(A, 1)
    assert not desk.tier.read(A, 2)
    desk.hands.run_all()
    desk.tier.poll()
    assert desk.write(B)
    desk.hands.run_all()
    desk.tier.poll()
    desk.changes()
    desk.hands.max_queued = 0
    assert not desk.write(C, 1)
    assert (desk.tier.counters.skipped, desk.changes(), desk.tier.holds(B)) == (1, [], True)
    desk.hands.max_queued = 1


def test_disk_space_is_the_budget_and_taken_as_it_is_used(desks: Callable[..., Desk], tmp_path: Path) -> None:
    desk = desks(records=3)
    (file,) = tmp_path.glob("*/records")
    assert file.stat().st_size == 0
    desk.store(A)
    assert file.stat().st_size == RECORD_BYTES
    desk.store(*(key(number) for number in range(1, 20)))
    assert file.stat().st_size == 2 * STRIDE_BYTES + RECORD_BYTES
    assert desk.tier.records == 3


def test_a_clear_takes_all_also_what_is_under_way(desks: Callable[..., Desk]) -> None:
    desk = desks(records=4)
    desk.store(A, B)
    assert desk.write(C, 1) and desk.tier.read(A, 2)
    desk.tier.clear()
    assert desk.changes() == [("-", B), ("-", A)]
    assert not any(desk.tier.holds(name) or desk.tier.writing(name) for name in (A, B, C))
    # The same key again, while its old write is under way.
    desk.slots.fill(3, payload(C, salt=1))
    assert desk.tier.write(C, 3)
    desk.hands.run()
    assert desk.tier.poll() == [Finished(WRITE, C, 1, False)]
    assert desk.tier.writing(C) and not desk.tier.write(C, 4)
    desk.hands.run_all()
    assert [(done.kind, done.slot, done.ok) for done in desk.tier.poll()] == [(READ, 2, False), (WRITE, 3, True)]
    assert desk.changes() == [("+", C)]
    assert desk.tier.read(C, 5)
    desk.hands.run_all()
    assert desk.tier.poll()[0].ok and desk.slots.bytes(5) == payload(C, salt=1)
    assert desk.files.syncs == 1
    desk.tier.close()
    again = desks(records=4)
    assert again.found == [C]


def test_a_write_of_before_a_clear_that_was_done_is_not_told(desks: Callable[..., Desk]) -> None:
    desk = desks()
    assert desk.write(A)
    desk.hands.run_all()
    desk.tier.clear()
    assert desk.tier.poll() == [Finished(WRITE, A, 0, False)]
    assert desk.changes() == [] and not desk.tier.holds(A)


def test_records_in_use_at_a_clear_are_not_given_out_before_they_are_done(desks: Callable[..., Desk]) -> None:
    desk = desks(records=2)
    desk.store(A)
    assert desk.tier.read(A, 1) and desk.write(B, 2)
    desk.tier.clear()
    assert not desk.write(C, 3)
    desk.hands.run(0)
    desk.tier.poll()
    assert desk.write(C, 3)
    assert not desk.write(D, 4)
    desk.hands.run_all()
    desk.tier.poll()
    assert desk.write(D, 4)


def test_what_was_left_is_found_oldest_first(desks: Callable[..., Desk]) -> None:
    desk = desks()
    desk.store(A, B, C, D)
    desk.tier.close()
    again = desks()
    assert again.found == [B, C, D] and again.changes() == []
    assert again.tier.records == 3 and all(again.reads_back(name) for name in (B, C, D))
    again.store(A)
    again.tier.close()
    # Ages go on from where they were.
    assert desks().found == [C, D, A]


def test_a_cleared_folder_stays_cleared(desks: Callable[..., Desk]) -> None:
    desk = desks()
    desk.store(A, B, C)
    desk.tier.clear()
    desk.tier.close()
    assert desk.files.syncs == 1
    again = desks()
    assert again.found == []
    again.store(D)
    again.tier.close()
    assert desks().found == [D]


def test_a_smaller_budget_keeps_the_newest_and_gives_space_back(desks: Callable[..., Desk], tmp_path: Path) -> None:
    names = [key(number) for number in range(6)]
    desk = desks(records=6)
    desk.store(*names)
    desk.tier.close()
    # The newest lie at the end of the file and must move.
    again = desks(records=2)
    assert again.found == names[4:] and again.tier.counters.evicted == 4
    assert all(again.reads_back(name) for name in names[4:])
    (file,) = tmp_path.glob("*/records")
    assert file.stat().st_size <= 2 * STRIDE_BYTES
    again.tier.close()
    larger = desks(records=6)
    assert larger.tier.counters.corrupt == 0
    assert larger.found == names[4:] and all(larger.reads_back(name) for name in names[4:])
    larger.store(A)
    assert larger.tier.records == 3


def test_a_move_that_was_cut_short_is_done_again(desks: Callable[..., Desk], tmp_path: Path) -> None:
    names = [key(number) for number in range(4)]
    desk = desks(records=4)
    desk.store(*names)
    desk.tier.close()
    (manifest,) = tmp_path.glob("*/manifest")
    (records,) = tmp_path.glob("*/records")
    before = manifest.read_bytes(), records.read_bytes()
    again = desks(records=2)
    again.tier.close()
    # As if the process had been killed before the files were cut: moved, and still there.
    moved = manifest.read_bytes(), records.read_bytes()
    manifest.write_bytes(moved[0] + before[0][len(moved[0]) :])
    records.write_bytes(moved[1] + before[1][len(moved[1]) :])
    third = desks(records=2)
    assert third.found == names[2:] and third.tier.counters.corrupt == 0
    assert all(third.reads_back(name) for name in names[2:])


def test_other_identities_are_neither_found_nor_touched(desks: Callable[..., Desk], tmp_path: Path) -> None:
    desk = desks()
    desk.store(A)
    desk.tier.close()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    other = desks(identity=identity(model="other"))
    assert other.found == []
    other.store(B)
    other.tier.clear()
    assert {path: path.read_bytes() for path in before} == before


def test_a_renamed_folder_is_refused(desks: Callable[..., Desk], tmp_path: Path) -> None:
    desk = desks()
    desk.store(A)
    desk.tier.close()
    other = identity(model="other")
    (tmp_path / identity().folder_name()).rename(tmp_path / other.folder_name())
    with pytest.raises(ForeignFolder, match=other.folder_name()):
        desks(identity=other)
    # Even where the description was put right by hand.
    (tmp_path / other.folder_name() / "identity.json").write_text(other.readable())
    with pytest.raises(ForeignFolder, match="identity"):
        desks(identity=other)


def test_one_folder_has_one_engine(desks: Callable[..., Desk]) -> None:
    desk = desks()
    with pytest.raises(FolderInUse, match="set my_option to another folder"):
        desks(option="my_option")
    desk.tier.close()
    desks()


def test_files_that_cannot_be_opened_are_an_error_that_says_what_to_do(
    desks: Callable[..., Desk], tmp_path: Path
) -> None:
    (tmp_path / identity().folder_name() / "records").mkdir(parents=True)
    with pytest.raises(DiskFolderError, match="set disk_path"):
        desks()
    (tmp_path / identity().folder_name() / "records").rmdir()
    desks()


def test_close_tells_what_was_not_done(desks: Callable[..., Desk]) -> None:
    desk = desks()
    desk.store(A)
    assert desk.write(B, 1) and desk.tier.read(A, 2)
    desk.hands.run(0)
    desk.tier.close()
    assert desk.tier.poll() == [Finished(WRITE, B, 1, True), Finished(READ, A, 2, False)]
    assert desk.changes() == [("+", B)]
    assert (desk.tier.state, desk.tier.counters.abandoned, desk.tier.pending) == (State.CLOSED, 1, 0)
    assert not desk.tier.holds(A) and not desk.write(C) and not desk.tier.read(A, 1)
    desk.tier.clear()
    desk.tier.close()
    assert desk.changes() == []
    with pytest.raises(ValueError, match="opened before"):
        desk.tier.open()
    assert desks().found == [A, B]


def test_a_tier_that_was_never_opened_does_nothing(tmp_path: Path) -> None:
    slots = Slots(1)
    tier = DiskTier(tmp_path, identity(), RECORD_BYTES, STRIDE_BYTES, slots.view)
    assert not tier.write(A, 0) and not tier.read(A, 0) and not tier.holds(A) and tier.poll() == []
    tier.clear()
    tier.close()
    assert list(tmp_path.iterdir()) == []


def test_wrong_numbers_are_refused(tmp_path: Path) -> None:
    slots = Slots(1)
    with pytest.raises(ValueError, match="8191 bytes of disk hold no record of 8192 bytes"):
        DiskTier(tmp_path, identity(), RECORD_BYTES, STRIDE_BYTES - 1, slots.view)
    with pytest.raises(ValueError, match=r"records of 4096 bytes, but the identity says 5000"):
        DiskTier(tmp_path, identity(), 4_096, STRIDE_BYTES, slots.view)
    small = Desk(tmp_path)
    small.slots.memory[0] = bytearray(RECORD_BYTES - 1)
    with pytest.raises(ValueError, match="slot 0 has 4999 bytes, a record 5000"):
        small.tier.write(A, 0)
    assert small.tier.pending == 0 and not small.tier.writing(A)
    small.tier.close()


def test_slots_may_be_larger_than_records(desks: Callable[..., Desk]) -> None:
    desk = desks()
    desk.slots.memory[0] = bytearray(payload(A) + b"padding")
    assert desk.tier.write(A, 0)
    desk.hands.run_all()
    desk.tier.poll()
    assert desk.reads_back(A)


def test_crc32_where_there_is_no_xxhash(desks: Callable[..., Desk]) -> None:
    desk = desks(identity=identity(checksum=CRC32))
    desk.store(A)
    assert desk.reads_back(A)


def test_with_real_threads(tmp_path: Path) -> None:
    slots = Slots(16)
    tier = DiskTier(tmp_path, identity(), RECORD_BYTES, 100 * STRIDE_BYTES, slots.view, threads=4)
    assert tier.open() == []
    free, stored, unread = list(range(16)), set[OffloadKey](), {key(number) for number in range(100)}
    unwritten = sorted(unread)
    reads: dict[int, OffloadKey] = {}
    while unwritten or unread:
        for done in tier.poll():
            assert done.ok
            if done.kind == READ:
                assert slots.bytes(done.slot) == payload(done.key)
                unread.discard(done.key)
            free.append(done.slot)
        stored |= {name for there, name in tier.take_changes() if there}
        ready = [name for name in stored & unread if name not in reads.values()]
        while free and (unwritten or ready):
            slot = free.pop()
            if unwritten:
                name = unwritten.pop()
                slots.fill(slot, payload(name))
                assert tier.write(name, slot)
            else:
                reads[slot] = ready.pop()
                assert tier.read(reads[slot], slot)
        time.sleep(0.001)
    tier.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kv-disk")]
