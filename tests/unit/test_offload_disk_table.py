# SPDX-License-Identifier: Apache-2.0
"""Which record goes next, and when a disk in trouble is tried again: the pure parts of the disk tier."""

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


def test_the_longest_unused_goes() -> None:
    table = full()
    table.touch(A)
    table.touch(D)
    assert table.room(True) == Room(1, False, B)
    assert list(table) == [C, A] and table.get(B) is None


def test_a_record_that_is_read_does_not_go() -> None:
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


def test_a_record_that_is_written_is_nobodys() -> None:
    table = RecordTable(1)
    assert table.room(True) == Room(0, True, None)
    assert table.room(True) is None and table.clear() == []
    table.give_back(0, False)
    assert table.room(True) == Room(0, False, None)


def test_growth_ends_at_the_budget_and_where_it_is_not_allowed() -> None:
    table = RecordTable(3)
    assert table.room(False) is None
    assert [table.room(True) for _ in range(4)] == [Room(0, True, None), Room(1, True, None), Room(2, True, None), None]
    # Given back as never written: still takes space.
    table.give_back(1, True)
    assert table.room(False) is None
    assert table.room(True) == Room(1, True, None)
    table.give_back(0, False)
    assert table.room(False) == Room(0, False, None)


def test_a_place_that_failed_comes_last() -> None:
    table = full()
    table.drop(B)
    table.drop(A)
    assert [table.room(True), table.room(True)] == [Room(1, False, None), Room(0, False, None)]


def test_what_is_dropped_while_it_is_read_is_free_afterwards() -> None:
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


def test_what_is_there_at_the_start() -> None:
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
    made = Health("/d", logging.getLogger("kv-disk-test"), clock, retry_s=10.0)
    made.become(State.ON)
    return made


def test_nothing_is_permitted_before_and_after() -> None:
    made = Health("/d", logging.getLogger("kv-disk-test"), Clock())
    assert made.permit() is Permit.NONE
    made.become(State.ON)
    assert made.permit() is Permit.GROW
    made.become(State.CLOSED)
    assert made.permit() is Permit.NONE


def test_a_full_disk_is_written_in_place_and_tried_once_a_while() -> None:
    clock = Clock()
    made = health(clock)
    made.no_space(True, "ENOSPC")
    assert (made.state, made.reason, made.permit()) == (State.FULL, "ENOSPC", Permit.REUSE)
    made.wrote_well(False)
    made.read_well()
    clock.now += 9.9
    assert (made.state, made.permit()) == (State.FULL, Permit.REUSE)
    clock.now += 0.1
    assert [made.permit(), made.permit()] == [Permit.GROW, Permit.REUSE]
    made.no_space(True, "ENOSPC")
    # Twice as long.
    clock.now += 19.9
    assert made.permit() is Permit.REUSE
    clock.now += 0.1
    assert made.permit() is Permit.GROW
    made.wrote_well(True)
    assert (made.state, made.reason, made.permit()) == (State.ON, "", Permit.GROW)
    made.no_space(True, "ENOSPC")
    clock.now += 10.0
    assert made.permit() is Permit.GROW


def test_several_failures_at_once_wait_no_longer_than_one() -> None:
    clock = Clock()
    made = health(clock)
    for _ in range(5):
        made.no_space(True, "ENOSPC")
    clock.now += 10.0
    assert made.permit() is Permit.GROW


def test_no_space_even_in_place_ends_writes_until_one_goes_well() -> None:
    clock = Clock()
    made = health(clock)
    made.no_space(False, "ENOSPC")
    made.read_well()
    assert (made.state, made.permit()) == (State.FULL, Permit.NONE)
    made.no_space(True, "ENOSPC")
    assert made.permit() is Permit.NONE
    clock.now += 10.0
    assert [made.permit(), made.permit()] == [Permit.GROW, Permit.NONE]
    made.wrote_well(False)
    assert made.state is State.ON


def test_errors_in_a_row_turn_it_off_and_others_do_not() -> None:
    made = health(Clock())
    assert not made.failed("EIO") and not made.failed("EIO")
    made.read_well()
    assert not made.failed("EIO") and not made.failed("EIO")
    made.wrote_well(False)
    assert not made.failed("EIO") and not made.failed("EIO")
    assert made.failed("EROFS")
    assert (made.state, made.permit()) == (State.OFF, Permit.NONE)
    assert made.reason == "3 errors in a row, the last: EROFS"
    # Said once.
    assert not made.failed("EIO") and not made.failed("EIO") and not made.failed("EIO")
    made.no_space(True, "ENOSPC")
    assert made.state is State.OFF


def test_trials_while_off_come_ever_later_up_to_a_bound() -> None:
    clock = Clock()
    made = health(clock)
    made.turn_off("EIO")
    waits = []
    for _ in range(12):
        start = clock.now
        while not made.trial_due():
            clock.now += 10.0
        waits.append(clock.now - start)
        made.trial_ended("EIO")
    assert waits[:4] == [10.0, 20.0, 40.0, 80.0]
    assert waits[-1] == MAX_RETRY_S
    made.trial_ended(None)
    assert made.state is State.ON
    # An earlier error no longer counts.
    assert not made.failed("EIO") and not made.failed("EIO")
    made.turn_off("EIO")
    clock.now += 10.0
    assert made.trial_due()


def test_states_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    made = health(Clock())
    with caplog.at_level(logging.INFO):
        made.no_space(True, "ENOSPC")
        made.no_space(True, "ENOSPC")
        made.turn_off("EIO")
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", "kvrouter: disk tier /d is full (ENOSPC): no new room is taken; tried again in 20 s at the latest"),
        (
            "WARNING",
            "kvrouter: disk tier /d is off (EIO): it is left alone, and what it holds is withdrawn; tried again in 20 s",
        ),
    ]
