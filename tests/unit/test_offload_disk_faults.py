# SPDX-License-Identifier: Apache-2.0
"""The disk tier on a disk that fails or is full: never an exception, and every loss is announced."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvrouter.engine_patch.offload.disk.format.folder import DiskFolderError
from kvrouter.engine_patch.offload.disk.health import State
from kvrouter.engine_patch.offload.disk.tier import UNCLEARED, DiskTier
from kvrouter.engine_patch.setup.throttled_log import INTERVAL_S
from tests.support.disk_child import RECORD_BYTES, STRIDE_BYTES, FaultyFiles, Slots, identity, payload
from tests.support.faulty_disk_desk import RETRY_S, A, B, C, D, Desk, E, desks_in, files_of, lines


@pytest.fixture
def desks(tmp_path: Path) -> Iterator[Callable[..., Desk]]:
    with desks_in(tmp_path) as make:
        yield make


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
    # This write replaces a record, so it needs no new space.
    assert desk.write(C) and desk.changes() == [("-", A), ("+", C)]
    assert desk.read(B) and desk.tier.state is State.FULL
    desk.now += RETRY_S
    assert desk.write(D) and desk.changes() == [("+", D)]
    assert (desk.tier.state, desk.tier.reason) == (State.ON, "")
    assert desk.write(E) and desk.changes() == [("+", E)]
    assert desk.tier.records == 4


@pytest.mark.parametrize("number", [errno.EDQUOT, errno.EFBIG])
def test_every_error_of_a_full_disk_is_recognised(desks: Callable[..., Desk], number: int) -> None:
    desk = desks(4, A)
    desk.files.fail("write", "records", number)
    assert desk.write(B) is False and desk.tier.state is State.FULL


def test_a_disk_full_from_the_start_takes_nothing(desks: Callable[..., Desk]) -> None:
    desk = desks(4)
    desk.files.always[("write", "records")] = errno.ENOSPC
    assert desk.write(A) is False
    assert desk.write(A) is None and desk.write(B) is None
    desk.now += RETRY_S
    assert desk.write(A) is False
    assert desk.write(A) is None


def test_failing_overwrites_do_not_drain_the_tier(desks: Callable[..., Desk]) -> None:
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
    assert desk.tier.counters.errors == 3
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


def test_writes_that_end_while_off_are_reported_when_it_is_back(desks: Callable[..., Desk]) -> None:
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


def test_a_failed_clear_is_repeated(desks: Callable[..., Desk]) -> None:
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


def test_a_failed_clear_is_repeated_at_the_end(desks: Callable[..., Desk]) -> None:
    desk = desks(3, A, B)
    desk.files.fail("write", "manifest", errno.EIO)
    desk.tier.clear()
    desk.tier.close()
    assert desks().found == []


def test_a_trial_before_a_failed_clear_does_not_count(desks: Callable[..., Desk]) -> None:
    desk = desks(3, A)
    desk.files.fail("write", "records", errno.EIO, errno.EIO, errno.EIO)
    assert [desk.write(B), desk.write(B), desk.write(B)] == [False, False, False]
    desk.now += RETRY_S
    desk.tier.poll()
    # The trial has ended, but the tier has not seen its end yet.
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
    # The failed start gave the lock back.
    again = Desk(tmp_path, 3)
    assert again.found == [A]
    again.tier.close()


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
