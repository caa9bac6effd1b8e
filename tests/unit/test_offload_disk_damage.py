# SPDX-License-Identifier: Apache-2.0
"""Damaged records and torn entries of the disk tier: never wrong bytes, and every loss is announced."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvrouter.engine_patch.offload.disk.format.file_ops import FileOps
from kvrouter.engine_patch.offload.disk.format.manifest import ENTRY_BYTES, HEADER_BYTES
from kvrouter.engine_patch.offload.disk.format.record_store import DONE, Found, RecordOutcome, Store
from kvrouter.engine_patch.setup.throttled_log import INTERVAL_S
from tests.support.disk_child import RECORD_BYTES, STRIDE_BYTES, identity, payload, salt_of
from tests.support.faulty_disk_desk import A, B, C, D, Desk, desks_in, files_of, lines, patch


@pytest.fixture
def desks(tmp_path: Path) -> Iterator[Callable[..., Desk]]:
    with desks_in(tmp_path) as make:
        yield make


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
    # The next start does not find the record again.
    again = desks()
    assert again.found == [A] and again.tier.counters.corrupt == 0
    # The record's place serves another chunk.
    assert again.write(B) and again.read(B)


def test_two_reads_of_a_damaged_record_report_it_once(desks: Callable[..., Desk], tmp_path: Path) -> None:
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
    # The third payload is cut short.
    records.write_bytes(records.read_bytes()[:-1])
    again = desks()
    assert again.found == [B] and again.tier.counters.corrupt == 2
    again.tier.close()
    third = desks()
    assert third.found == [B] and third.tier.counters.corrupt == 0


def test_a_damaged_header_drops_all_records(desks: Callable[..., Desk], tmp_path: Path) -> None:
    desks(3, A, B).tier.close()
    patch(files_of(tmp_path)[0], 30)
    again = desks(3)
    assert again.found == [] and again.tier.counters.corrupt == 2
    assert again.write(C)
    again.tier.close()
    assert desks().found == [C]


def test_a_torn_entry_is_never_found(desks: Callable[..., Desk]) -> None:
    desk = desks(2, A)
    # Half of the entry is written, and then neither the rest of it nor its void can be written.
    desk.files.fail("write", "manifest", None, "short", errno.EIO, errno.EIO)
    assert desk.write(B) is False
    desk.tier.close()
    again = desks(2)
    assert again.found == [A] and again.tier.counters.corrupt == 1


def test_the_rest_of_a_failed_entry_is_voided(desks: Callable[..., Desk]) -> None:
    desk = desks(2, A)
    desk.files.fail("write", "manifest", None, "short", errno.EIO)
    assert desk.write(B) is False
    desk.tier.close()
    again = desks(2)
    assert again.found == [A] and again.tier.counters.corrupt == 0


def store(folder: Path) -> Store:
    """Return the store of a folder without a tier, with three written records: A, B, and A again."""
    record_store = Store.open(folder, identity(), FileOps())
    record_store.recover(4)
    for record, name in enumerate([A, B, A]):
        data = memoryview(payload(name, RECORD_BYTES, record))
        assert record_store.write(name, record, record_store.generation, record, data) == DONE
    return record_store


def test_the_newer_of_two_entries_of_a_key_is_kept(tmp_path: Path) -> None:
    store(tmp_path).close()
    record_store = Store.open(tmp_path, identity(), FileOps())
    assert record_store.recover(4) == Found([(B, 1), (A, 2)], 3, 3, 0, 0)
    into = memoryview(bytearray(RECORD_BYTES))
    assert record_store.read(A, 2, record_store.generation, into) == DONE and salt_of(into) == 2
    # If the newer record goes, the older one does not come back.
    assert record_store.read(A, 0, record_store.generation, into).outcome is RecordOutcome.CORRUPT
    record_store.close()


@pytest.mark.parametrize("wrong", ["key", "generation"])
def test_an_entry_of_another_kind_is_not_loaded(tmp_path: Path, wrong: str) -> None:
    record_store = store(tmp_path)
    into = memoryview(bytearray(RECORD_BYTES))
    name, generation = (B, record_store.generation) if wrong == "key" else (A, record_store.generation + 1)
    assert record_store.read(name, 0, generation, into).outcome is RecordOutcome.CORRUPT
    assert bytes(into) == bytes(RECORD_BYTES)
    record_store.close()


def test_one_bad_record_does_not_stop_a_start_that_moves_it(desks: Callable[..., Desk], tmp_path: Path) -> None:
    desks(4, A, B, C, D).tier.close()
    patch(files_of(tmp_path)[1], 2 * STRIDE_BYTES)
    again = desks(2)
    assert again.found == [D] and again.read(D)
    assert (again.tier.counters.corrupt, again.tier.counters.evicted) == (1, 2)


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
    # The other records within the minute are reported together.
    assert desk.read(B) is False and desk.read(C) is False
    assert len(lines(caplog)) == 1
    desk.now += INTERVAL_S
    desk.tier.poll()
    line = lines(caplog)[1]
    assert "record 2" in line and "1 more since the last line; 3 such records" in line
    desk.now += 9 * INTERVAL_S
    desk.tier.poll()
    assert len(lines(caplog)) == 2
    # Damage that is found at a start is logged too.
    desk.tier.close()
    patch(manifest, HEADER_BYTES + 3 * ENTRY_BYTES + 60)
    desks(5)
    assert "1 records of an earlier engine are damaged" in lines(caplog)[2] and str(manifest.parent) in lines(caplog)[2]
