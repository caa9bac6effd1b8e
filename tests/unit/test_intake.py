# SPDX-License-Identifier: Apache-2.0
"""The queue between the two threads, one step at a time."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator

import pytest
from report_peer import fails, removed, said, stored

from kvrouter.engine_patch.reporter.event_queue import EventsDropped, EventsLost, Intake, Message
from kvrouter.events.patch.messages import ReportCleared, ReportStored


@pytest.fixture
def intake() -> Iterator[Intake]:
    intake = Intake(2, 3_000, lambda: 5.0)
    yield intake
    intake.close()


def alarmed(intake: Intake) -> bool:
    return bool(select.select([intake.fileno()], [], [], 0)[0])


def test_first_in_first_out(intake: Intake) -> None:
    make = said(stored([1]))
    intake.put(make, 7)
    intake.put(make, None)
    assert len(intake) == 2
    assert intake.take() == Message(make, 7, 5.0)
    assert intake.take() == Message(make, None, 5.0)
    assert intake.take() is None


def test_only_a_sleeper_is_woken_and_once(intake: Intake) -> None:
    intake.put(said(), 1)
    assert not alarmed(intake)
    assert not intake.lie_down(), "something waits"
    intake.rise()
    intake.take()
    assert intake.lie_down()
    intake.put(said(), 2)
    assert alarmed(intake)
    intake.put(said(), 3)
    assert os.read(intake.fileno(), 64) == b"w"
    intake.rise()
    assert not alarmed(intake)
    intake.put(said(), 4)
    assert not alarmed(intake)


def test_what_does_not_fit_keeps_its_place_in_a_compact_form(intake: Intake) -> None:
    clear = ReportCleared("CPU")
    for number in range(2):
        intake.put(said(), number)
    intake.put(
        said(stored([1], runs=[(1, 1)], kind="k", lora_name="l", ownership="o", locality="x"), removed([2]), clear), 2
    )
    assert isinstance(intake.take(), Message)
    intake.put(said(stored([3])), 3)
    assert isinstance(intake.take(), Message)
    dropped = intake.take()
    assert isinstance(dropped, EventsDropped)
    kept = dropped.events[0]
    assert isinstance(kept, ReportStored)
    assert (kept.runs, kept.kind, kept.lora_name, kept.ownership, kept.locality) == ([], None, None, "o", "x")
    assert dropped.events[2] is clear
    # Still full when it came.
    assert isinstance(intake.take(), EventsDropped)


def test_one_that_cannot_be_read_is_a_loss_in_its_place(intake: Intake) -> None:
    for make in (said(), said(), fails, said()):
        intake.put(make, None)
    kinds = [type(intake.take()) for _ in range(4)]
    assert kinds == [Message, Message, EventsLost, EventsDropped]


def test_beyond_the_bound_all_is_given_up_until_it_is_seen(intake: Intake) -> None:
    for number in range(2):
        intake.put(said(), number)
    sized = said(stored(range(50)))
    for _ in range(4):
        intake.put(sized, None)
    assert len(intake) == 1, "three of 912 bytes fit, the fourth does not"
    intake.put(fails, None)
    intake.put(sized, None)
    assert len(intake) == 1
    lost = intake.take()
    assert isinstance(lost, EventsLost)
    assert lost.given_up is not None
    assert (len(lost.given_up), lost.unread) == (5, 2)
    # From here on it is as at the start.
    intake.put(said(), 9)
    assert isinstance(intake.take(), Message)
    for _ in range(5):
        intake.put(sized, None)
    assert len(intake) == 5


def test_what_was_taken_counts_no_more(intake: Intake) -> None:
    sized = said(stored(range(50)))
    intake.put(said(), 0)
    intake.put(said(), 1)
    for _ in range(30):
        # Two messages stay queued; one of 912 bytes at a time waits behind them.
        intake.put(sized, None)
        taken = intake.take()
        assert isinstance(taken, Message | EventsDropped)


def test_nothing_is_raised_after_close() -> None:
    intake = Intake(2, 3_000, lambda: 5.0)
    intake.lie_down()
    intake.close()
    intake.put(said(), 1)
    intake.wake()
