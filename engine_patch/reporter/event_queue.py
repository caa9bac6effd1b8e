# SPDX-License-Identifier: Apache-2.0
"""The queue from the engine's thread to the reporter's; it is bounded, and it never blocks or raises.

Putting a message costs the engine an append and, only while the reporter's thread sleeps, one byte into a pipe. When
the queue is full the message is dropped, but its changes stay in the queue in compact form, so that the ledger stays
exact. When these changes outgrow their own bound too, the whole queue is given up, and so is every message that is put
before the reporter's thread has taken `EventsLost`: the changes are then unknown, and the ledger starts empty.

One thread puts, and one thread takes. There is no lock, because the operations on a deque's ends are atomic and each
counter has one writer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeAlias

import msgspec

from kvrouter.events.patch.messages import ReportEvent, ReportRemoved, ReportStored
from kvrouter.events.transport.alarm import Alarm

Make: TypeAlias = Callable[[], Iterable[ReportEvent]]

# Bytes of a kept event and its queue slot without the hashes: structs, bytes headers, list and deque slots.
EVENT_OVERHEAD_BYTES = 256


class Message(NamedTuple):
    """A message to be sent."""

    # Returns the events of the message.
    make: Make
    # Seq of the engine's batch that the message repeats, or None.
    batch_seq: int | None
    # Seconds since 1970.
    ts: float


class EventsDropped(msgspec.Struct, frozen=True, eq=False):
    """The changes of a message that will not be sent, and the bytes that they occupy in the queue."""

    events: list[ReportEvent]
    size_bytes: int


class EventsLost(msgspec.Struct, eq=False):
    """A mark in the queue: all changes before it are unknown."""

    reason: str
    # Bytes of this mark itself.
    size_bytes: int
    # The queue that outgrew its bound. The taking thread frees it, because that may take a while.
    given_up: deque[Item] | None = None
    # Messages that were put after the queue was given up and before this mark was taken.
    unread: int = 0


Item: TypeAlias = Message | EventsDropped | EventsLost


class _Backlog:
    """The waiting items and the bytes of their kept changes.

    The putting thread alone increases `kept_bytes`, the taking thread alone `taken_bytes`.
    """

    def __init__(self) -> None:
        self.items: deque[Item] = deque()
        self.kept_bytes = 0
        self.taken_bytes = 0


class EventQueue:
    """The queue and the alarm that wakes its reader."""

    def __init__(self, max_messages: int, max_dropped_bytes: int, wall_clock: Callable[[], float]) -> None:
        """Start empty.

        Args:
            max_messages: Messages that may wait before new ones are dropped.
            max_dropped_bytes: Bytes of the changes of dropped messages that may wait.
            wall_clock: Returns seconds since 1970.
        """
        self._max_messages = max_messages
        self._max_dropped_bytes = max_dropped_bytes
        self._wall_clock = wall_clock
        self._backlog = _Backlog()
        self._asleep = False
        # The mark of a queue that was given up. Until the mark is taken, new messages are only counted.
        self._lost: EventsLost | None = None
        self._alarm = Alarm()

    def __len__(self) -> int:
        return len(self._backlog.items)

    def put(self, make: Make, batch_seq: int | None) -> None:
        """Queue a message; if the queue is full, run `make` at once and keep only its compact form."""
        items = self._backlog.items
        lost = self._lost
        if lost is not None:
            # If the mark is taken right now, the new ledger misses this message like those before it.
            lost.unread += 1
        elif len(items) < self._max_messages:
            items.append(Message(make, batch_seq, self._wall_clock()))
        else:
            self._keep(make)
        if self._asleep:
            self.wake()

    def wake(self) -> None:
        """End the taking thread's sleep; may be called from any thread."""
        self._asleep = False
        self._alarm.ring()

    def take(self) -> Item | None:
        """Return and remove the oldest item, or None if there is none."""
        backlog = self._backlog
        try:
            item = backlog.items.popleft()
        except IndexError:
            return None
        if not isinstance(item, Message):
            backlog.taken_bytes += item.size_bytes
            if item is self._lost:
                self._lost = None
        return item

    def fileno(self) -> int:
        """Return a file descriptor that is readable after `wake`."""
        return self._alarm.fileno()

    def begin_wait(self) -> bool:
        """Announce that the taking thread is about to sleep, and return whether it may, because nothing waits.

        `end_wait` must follow.
        """
        self._asleep = True
        # Checked only after the announcement: from there on, `put` wakes the thread.
        return not self._backlog.items

    def end_wait(self) -> None:
        """Announce that the taking thread is awake."""
        self._asleep = False
        self._alarm.silence()

    def close(self) -> None:
        """Free the alarm; items put afterwards are never taken."""
        self._alarm.close()

    def _keep(self, make: Make) -> None:
        backlog = self._backlog
        item: EventsDropped | EventsLost
        try:
            events = [_compact(event) for event in make()]
            size = EVENT_OVERHEAD_BYTES + sum(_size(event) for event in events)
            item = EventsDropped(events, size)
        except Exception as error:
            item = EventsLost(f"events of a dropped message cannot be read: {error!r}", EVENT_OVERHEAD_BYTES)
        backlog.kept_bytes += item.size_bytes
        if backlog.kept_bytes - backlog.taken_bytes <= self._max_dropped_bytes:
            backlog.items.append(item)
            return
        # The waiting items are void too. A new backlog takes their place, because emptying the old one would cost the
        # engine's time.
        new_backlog = _Backlog()
        self._lost = EventsLost("the queue was full for too long", 0, backlog.items)
        new_backlog.items.append(self._lost)
        self._backlog = new_backlog


def _compact(event: ReportEvent) -> ReportEvent:
    if not isinstance(event, ReportStored):
        return event
    return ReportStored(event.hashes, event.group_idx, event.medium, ownership=event.ownership, locality=event.locality)


def _size(event: ReportEvent) -> int:
    return EVENT_OVERHEAD_BYTES + (len(event.hashes) if isinstance(event, ReportStored | ReportRemoved) else 0)
