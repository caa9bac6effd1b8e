# SPDX-License-Identifier: Apache-2.0
"""The disk tier on a healthy disk: its contents, evictions, announcements and clears."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvrouter.engine_patch.offload.disk.disk_events import READ, WRITE, Finished
from kvrouter.engine_patch.offload.disk.format.checksum import CRC32
from kvrouter.engine_patch.offload.disk.health import State
from kvrouter.engine_patch.offload.disk.tier import DiskTier
from kvrouter.engine_patch.offload.key import OffloadKey
from tests.support.disk_child import RECORD_BYTES, STRIDE_BYTES, Slots, identity, key, payload
from tests.support.disk_desk import A, B, C, D, Desk, desks_in


@pytest.fixture
def desks(tmp_path: Path) -> Iterator[Callable[..., Desk]]:
    with desks_in(tmp_path) as make:
        yield make


def test_a_record_is_announced_once_its_entry_is_written(desks: Callable[..., Desk]) -> None:
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
    assert desk.tier.records == 1


def test_a_present_or_pending_record_is_not_written_again(desks: Callable[..., Desk]) -> None:
    desk = desks()
    assert desk.write(A)
    assert not desk.write(A, 1)
    desk.hands.run_all()
    # The write is done, but not reported yet.
    assert not desk.write(A, 1)
    desk.tier.poll()
    assert not desk.write(A, 1)
    assert desk.tier.pending == 0


def test_an_evicted_record_is_withdrawn_before_it_is_overwritten(desks: Callable[..., Desk]) -> None:
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
    # One record is being read and the other is being written.
    assert not desk.write(D, 3)
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
    assert (desk.changes(), desk.tier.holds(B)) == ([], True)
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


def test_a_clear_covers_writes_under_way(desks: Callable[..., Desk]) -> None:
    desk = desks(records=4)
    desk.store(A, B)
    assert desk.write(C, 1) and desk.tier.read(A, 2)
    desk.tier.clear()
    assert desk.changes() == [("-", B), ("-", A)]
    assert not any(desk.tier.holds(name) or desk.tier.writing(name) for name in (A, B, C))
    # The same key is written again, while its old write is under way.
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
    assert desks(records=4).found == [C]


def test_a_write_before_a_clear_is_not_announced(desks: Callable[..., Desk]) -> None:
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


def test_closing_reports_unfinished_work(desks: Callable[..., Desk]) -> None:
    desk = desks()
    desk.store(A)
    assert desk.write(B, 1) and desk.tier.read(A, 2)
    desk.hands.run(0)
    desk.tier.close()
    assert desk.tier.poll() == [Finished(WRITE, B, 1, True), Finished(READ, A, 2, False)]
    assert desk.changes() == [("+", B)]
    assert (desk.tier.state, desk.tier.pending) == (State.CLOSED, 0)
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


def test_crc32_protects_records_without_xxhash(desks: Callable[..., Desk]) -> None:
    desk = desks(identity=identity(checksum=CRC32))
    desk.store(A)
    assert desk.reads_back(A)


def test_real_threads_write_and_read_every_record(tmp_path: Path) -> None:
    slots = Slots(16)
    tier = DiskTier(tmp_path, identity(), RECORD_BYTES, 100 * STRIDE_BYTES, slots.view, threads=4)
    assert tier.open() == []
    free, stored, unread = list(range(16)), set[OffloadKey](), {key(number) for number in range(100)}
    unwritten = sorted(unread)
    reads: dict[int, OffloadKey] = {}
    while unwritten or unread:
        for finished in tier.poll():
            assert finished.ok
            if finished.kind == READ:
                assert slots.bytes(finished.slot) == payload(finished.key)
                unread.discard(finished.key)
            free.append(finished.slot)
        stored |= {name for is_stored, name in tier.take_changes() if is_stored}
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
