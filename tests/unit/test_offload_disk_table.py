# SPDX-License-Identifier: Apache-2.0
"""Pure parts of the disk tier: which record goes next, and when a disk in trouble is tried again."""

from __future__ import annotations

import logging

import pytest

from kvrouter.engine_patch.offload.disk.health import MAX_RETRY_S, Health, Permit, State
from kvrouter.engine_patch.offload.disk.record_table import RecordTable, Room
from tests.support.disk_child import key

A, B, C, D = (key(number) for number in range(4))


def full(records: int = 3) -> RecordTable:
    table = RecordTable(records)
    for name in (A, B, C)[:records]:
        room = table.room(True)
        assert room is not None
        table.hold(name, room.record)
    return table


def test_the_least_recently_used_record_is_replaced() -> None:
    table = full()
    table.touch(A)
    table.touch(D)
    assert table.room(True) == Room(1, False, B)
    assert list(table) == [C, A] and table.get(B) is None


def test_a_record_that_is_being_read_is_not_replaced() -> None:
    table = full()
    table.pin(0)
    table.pin(0)
    table.pin(1)
    assert table.room(True) == Room(2, False, C)
    assert table.room(True) is None
    table.unpin(0)
    assert table.room(True) is None
    table.unpin(0)
    assert table.room(True) == Room(0, False, A)
    assert list(table) == [B]


def test_a_record_that_is_being_written_belongs_to_no_key() -> None:
    table = RecordTable(1)
    assert table.room(True) == Room(0, True, None)
    assert table.room(True) is None and table.clear() == []
    table.give_back(0, False)
    assert table.room(True) == Room(0, False, None)


def test_growth_ends_at_the_budget_and_where_it_is_not_allowed() -> None:
    table = RecordTable(3)
    assert table.room(False) is None
    assert [table.room(True) for _ in range(4)] == [Room(0, True, None), Room(1, True, None), Room(2, True, None), None]
    # The place was given back as never written, so its use still takes space.
    table.give_back(1, True)
    assert table.room(False) is None
    assert table.room(True) == Room(1, True, None)
    table.give_back(0, False)
    assert table.room(False) == Room(0, False, None)


def test_dropped_records_are_used_again_in_their_order() -> None:
    table = full()
    table.drop(B)
    table.drop(A)
    assert [table.room(True), table.room(True)] == [Room(1, False, None), Room(0, False, None)]


def test_a_record_dropped_while_read_is_free_afterwards() -> None:
    table = full()
    table.pin(0)
    table.pin(1)
    table.drop(A)
    assert table.clear() == [B, C]
    assert [table.room(True), table.room(True)] == [Room(2, False, None), None]
    table.unpin(1)
    assert table.room(True) == Room(1, False, None)
    table.unpin(0)
    assert table.room(True) == Room(0, False, None)


def test_records_found_at_the_start_are_adopted() -> None:
    table = RecordTable(5)
    table.adopt([(B, 3), (A, 0)], 4)
    assert list(table) == [B, A]
    assert [table.room(True) for _ in range(4)] == [
        Room(1, False, None),
        Room(2, False, None),
        Room(4, True, None),
        Room(3, False, B),
    ]


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def health(clock: Clock) -> Health:
    disk_health = Health("/d", logging.getLogger("kv-disk-test"), clock, retry_s=10.0)
    disk_health.become(State.ON)
    return disk_health


def test_nothing_is_permitted_before_the_start_and_after_the_end() -> None:
    disk_health = Health("/d", logging.getLogger("kv-disk-test"), Clock())
    assert disk_health.permit() is Permit.NONE
    disk_health.become(State.ON)
    assert disk_health.permit() is Permit.GROW
    disk_health.become(State.CLOSED)
    assert disk_health.permit() is Permit.NONE


def test_a_full_disk_is_written_in_place_and_tried_once_a_while() -> None:
    clock = Clock()
    disk_health = health(clock)
    disk_health.no_space(True, "ENOSPC")
    assert (disk_health.state, disk_health.reason, disk_health.permit()) == (State.FULL, "ENOSPC", Permit.REUSE)
    disk_health.wrote_well(False)
    disk_health.read_well()
    clock.now += 9.9
    assert (disk_health.state, disk_health.permit()) == (State.FULL, Permit.REUSE)
    clock.now += 0.1
    assert [disk_health.permit(), disk_health.permit()] == [Permit.GROW, Permit.REUSE]
    disk_health.no_space(True, "ENOSPC")
    # The second wait is twice as long.
    clock.now += 19.9
    assert disk_health.permit() is Permit.REUSE
    clock.now += 0.1
    assert disk_health.permit() is Permit.GROW
    disk_health.wrote_well(True)
    assert (disk_health.state, disk_health.reason, disk_health.permit()) == (State.ON, "", Permit.GROW)
    disk_health.no_space(True, "ENOSPC")
    clock.now += 10.0
    assert disk_health.permit() is Permit.GROW


def test_several_failures_at_once_wait_no_longer_than_one() -> None:
    clock = Clock()
    disk_health = health(clock)
    for _ in range(5):
        disk_health.no_space(True, "ENOSPC")
    clock.now += 10.0
    assert disk_health.permit() is Permit.GROW


def test_failing_overwrites_end_writes_until_one_succeeds() -> None:
    clock = Clock()
    disk_health = health(clock)
    disk_health.no_space(False, "ENOSPC")
    disk_health.read_well()
    assert (disk_health.state, disk_health.permit()) == (State.FULL, Permit.NONE)
    disk_health.no_space(True, "ENOSPC")
    assert disk_health.permit() is Permit.NONE
    clock.now += 10.0
    assert [disk_health.permit(), disk_health.permit()] == [Permit.GROW, Permit.NONE]
    disk_health.wrote_well(False)
    assert disk_health.state is State.ON


def test_errors_in_a_row_turn_it_off_and_others_do_not() -> None:
    disk_health = health(Clock())
    assert not disk_health.failed("EIO") and not disk_health.failed("EIO")
    disk_health.read_well()
    assert not disk_health.failed("EIO") and not disk_health.failed("EIO")
    disk_health.wrote_well(False)
    assert not disk_health.failed("EIO") and not disk_health.failed("EIO")
    assert disk_health.failed("EROFS")
    assert (disk_health.state, disk_health.permit()) == (State.OFF, Permit.NONE)
    assert disk_health.reason == "3 errors in a row, the last: EROFS"
    # The failure is reported once.
    assert not disk_health.failed("EIO") and not disk_health.failed("EIO") and not disk_health.failed("EIO")
    disk_health.no_space(True, "ENOSPC")
    assert disk_health.state is State.OFF


def test_trials_while_off_come_ever_later_up_to_a_bound() -> None:
    clock = Clock()
    disk_health = health(clock)
    disk_health.turn_off("EIO")
    waits = []
    for _ in range(12):
        start = clock.now
        while not disk_health.trial_due():
            clock.now += 10.0
        waits.append(clock.now - start)
        disk_health.trial_ended("EIO")
    assert (waits[:4], waits[-1]) == ([10.0, 20.0, 40.0, 80.0], MAX_RETRY_S)
    disk_health.trial_ended(None)
    assert disk_health.state is State.ON
    # An earlier error no longer counts.
    assert not disk_health.failed("EIO") and not disk_health.failed("EIO")
    disk_health.turn_off("EIO")
    clock.now += 10.0
    assert disk_health.trial_due()


def test_states_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    disk_health = health(Clock())
    with caplog.at_level(logging.INFO):
        disk_health.no_space(True, "ENOSPC")
        disk_health.no_space(True, "ENOSPC")
        disk_health.turn_off("EIO")
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", "kvrouter: disk tier /d is full (ENOSPC): no new room is taken; tried again in 10 s at the latest"),
        (
            "WARNING",
            "kvrouter: disk tier /d is off (EIO): it is left alone, and what it holds is withdrawn; tried again in 20 s",
        ),
    ]
