# SPDX-License-Identifier: Apache-2.0
"""The queue between the engine's thread and the reporter's thread, one step at a time."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator

import msgspec
import pytest

from kvrouter.engine_patch.reporter.event_queue import EventQueue, EventsDropped, EventsLost, Message
from kvrouter.events.patch.messages import ReportCleared
from tests.support.report_peer import fails, removed, said, stored


@pytest.fixture
def queue() -> Iterator[EventQueue]:
    queue = EventQueue(2, 3_000, lambda: 5.0)
    yield queue
    queue.close()


def alarmed(queue: EventQueue) -> bool:
    return bool(select.select([queue.fileno()], [], [], 0)[0])


def test_messages_are_taken_in_their_order(queue: EventQueue) -> None:
    make = said(stored([1]))
    queue.put(make, 7)
    queue.put(make, None)
    assert len(queue) == 2
    assert queue.take() == Message(make, 7, 5.0)
    assert queue.take() == Message(make, None, 5.0)
    assert queue.take() is None


def test_a_sleeping_reader_is_woken_once(queue: EventQueue) -> None:
    queue.put(said(), 1)
    assert not alarmed(queue)
    assert not queue.begin_wait(), "something waits"
    queue.end_wait()
    queue.take()
    assert queue.begin_wait()
    queue.put(said(), 2)
    assert alarmed(queue)
    queue.put(said(), 3)
    assert os.read(queue.fileno(), 64) == b"w"
    queue.end_wait()
    assert not alarmed(queue)
    queue.put(said(), 4)
    assert not alarmed(queue)


def test_a_message_that_does_not_fit_stays_in_compact_form(queue: EventQueue) -> None:
    clear = ReportCleared("CPU")
    for number in range(2):
        queue.put(said(), number)
    queue.put(
        said(stored([1], runs=[(1, 1)], kind="k", lora_name="l", ownership="o", locality="x"), removed([2]), clear), 2
    )
    queue.take()
    queue.put(said(stored([3])), 3)
    _, dropped = queue.take(), queue.take()
    assert isinstance(dropped, EventsDropped)
    compact = [stored([1], ownership="o", locality="x"), removed([2]), clear]
    assert msgspec.to_builtins(dropped.events) == msgspec.to_builtins(compact) and dropped.events[2] is clear
    # The queue was still full when this message came.
    assert isinstance(queue.take(), EventsDropped)


def test_an_unreadable_message_is_a_loss_in_its_place(queue: EventQueue) -> None:
    for make in (said(), said(), fails, said()):
        queue.put(make, None)
    assert [type(queue.take()) for _ in range(4)] == [Message, Message, EventsLost, EventsDropped]


def test_beyond_the_bound_the_queue_is_given_up_until_the_reader_sees_it(queue: EventQueue) -> None:
    for number in range(2):
        queue.put(said(), number)
    sized = said(stored(range(50)))
    for _ in range(4):
        queue.put(sized, None)
    assert len(queue) == 1, "three of 912 bytes fit, the fourth does not"
    queue.put(fails, None)
    queue.put(sized, None)
    assert len(queue) == 1
    lost = queue.take()
    assert isinstance(lost, EventsLost)
    assert (len(lost.given_up or ()), lost.unread) == (5, 2)
    # From here on, the queue behaves as at the start.
    queue.put(said(), 9)
    assert isinstance(queue.take(), Message)
    for _ in range(5):
        queue.put(sized, None)
    assert len(queue) == 5


def test_taken_messages_do_not_count_toward_the_bound(queue: EventQueue) -> None:
    sized = said(stored(range(50)))
    queue.put(said(), 0)
    queue.put(said(), 1)
    for _ in range(30):
        # Two messages stay queued; one message of 912 bytes at a time waits behind them.
        queue.put(sized, None)
        assert isinstance(queue.take(), Message | EventsDropped)


def test_nothing_is_raised_after_close() -> None:
    queue = EventQueue(2, 3_000, lambda: 5.0)
    queue.begin_wait()
    queue.close()
    queue.put(said(), 1)
    queue.wake()
