# SPDX-License-Identifier: Apache-2.0
"""From the engine's thread to the reporter's: a queue that never blocks, never raises and is bounded.

The engine's side is an append and, only while the other side sleeps, one byte into a pipe. When the queue is full the
message is dropped, but its changes stay in the queue in compact form, so that the ledger stays exact. When even these
outgrow their bound, the whole queue is given up, with everything put until the other side has taken `EventsLost`: the
changes are then unknown, and the ledger starts empty.

One thread puts, one takes. There is no lock: deque's ends are atomic, and each counter has one writer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeAlias

import msgspec

from kvrouter.events.patch.messages import ReportEvent, ReportRemoved, ReportStored
from kvrouter.events.transport.alarm import Alarm

Make: TypeAlias = Callable[[], Iterable[ReportEvent]]

# Bytes of a kept event and its queue slot besides the hashes: structs, bytes headers, list and deque slots.
EVENT_OVERHEAD_BYTES = 256


class Message(NamedTuple):
    """A message to be sent. ts: seconds since 1970."""

    make: Make
    batch_seq: int | None
    ts: float


class EventsDropped(msgspec.Struct, frozen=True, eq=False):
    """A message that will not be sent: its changes, and their bytes."""

    events: list[ReportEvent]
    size_bytes: int


class EventsLost(msgspec.Struct, eq=False):
    """Changes before this are unknown. size_bytes: its own."""

    reason: str
    size_bytes: int
    # The queue when it outgrew its bound; the taking side frees it, because that may take a while.
    given_up: deque[Item] | None = None
    # Messages put after that and before this was taken.
    unread: int = 0


Item: TypeAlias = Message | EventsDropped | EventsLost


class _Backlog:
    """The waiting items. kept_bytes grows on the putting side, taken_bytes on the taking side."""

    def __init__(self) -> None:
        self.items: deque[Item] = deque()
        self.kept_bytes = 0
        self.taken_bytes = 0


class EventQueue:
    """The queue and the alarm that wakes its reader."""

    def __init__(self, max_messages: int, max_dropped_bytes: int, wall_clock: Callable[[], float]) -> None:
        self._max_messages = max_messages
        self._max_dropped_bytes = max_dropped_bytes
        self._wall_clock = wall_clock
        self._backlog = _Backlog()
        self._asleep = False
        # Until it is taken, new messages are only counted.
        self._lost: EventsLost | None = None
        self._alarm = Alarm()

    def __len__(self) -> int:
        return len(self._backlog.items)

    def put(self, make: Make, batch_seq: int | None) -> None:
        """Queues a message. Runs `make` at once, and keeps only its compact form, when the queue is full."""
        items = self._backlog.items
        lost = self._lost
        if lost is not None:
            # If it is taken right now, the new ledger misses this message like those before it.
            lost.unread += 1
        elif len(items) < self._max_messages:
            items.append(Message(make, batch_seq, self._wall_clock()))
        else:
            self._keep(make)
        if self._asleep:
            self.wake()

    def wake(self) -> None:
        """Ends the other side's sleep, from any thread."""
        self._asleep = False
        self._alarm.ring()

    def take(self) -> Item | None:
        """The oldest item, None when there is none."""
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
        """Readable after `wake`."""
        return self._alarm.fileno()

    def begin_wait(self) -> bool:
        """The taking side is about to sleep: whether nothing waits, so that it may. `end_wait` must follow."""
        self._asleep = True
        # Checked only now: from here on, `put` wakes.
        return not self._backlog.items

    def end_wait(self) -> None:
        """The taking side is awake."""
        self._asleep = False
        self._alarm.silence()

    def close(self) -> None:
        """Frees the alarm; what is put afterwards is never taken."""
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
        # The waiting items are void too. A fresh backlog, because emptying this one would cost the engine's time.
        fresh = _Backlog()
        self._lost = EventsLost("the queue was full for too long", 0, backlog.items)
        fresh.items.append(self._lost)
        self._backlog = fresh


def _compact(event: ReportEvent) -> ReportEvent:
    if not isinstance(event, ReportStored):
        return event
    return ReportStored(event.hashes, event.group_idx, event.medium, ownership=event.ownership, locality=event.locality)


def _size(event: ReportEvent) -> int:
    return EVENT_OVERHEAD_BYTES + (len(event.hashes) if isinstance(event, ReportStored | ReportRemoved) else 0)
