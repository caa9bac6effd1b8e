# SPDX-License-Identifier: Apache-2.0
"""The fleet's events, from who learns of them to who watches.

Every process has the whole fleet's, each once: those of the workers that it follows as they happen, and those of all
others from their logs in Redis. Publishing costs an append; events are written in batches, encoded once for all clients
that want the same. Belongs to one loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.follow.feed.backlog import Chunk, HeldChunks
from kvrouter.router.follow.feed.event_ring import EventRing
from kvrouter.router.follow.feed.fleet_event import (
    EventFilter,
    EventType,
    FleetEvent,
    NumberedEvent,
    event_id,
    sse,
)
from kvrouter.router.follow.feed.watch_metrics import WatchMetrics
from kvrouter.router.index.ingest.net_changes import Hashes

# How long events gather: nobody sees the difference, and a hundred clients cost two thousand writes a second.
FLUSH_S = 0.05
# The most unread bytes of one client. Twice the size of all kept events in JSON, so that a client that comes back is
# not cut because of the events it missed.
MAX_UNREAD_BYTES = 16 * 1024**2
# The most unread bytes of all clients together, each byte counted once. Clients with the same filter share bytes, so
# only clients with different filters, or ones that came back, come near this: sixteen of them at MAX_UNREAD_BYTES.
MAX_HELD_BYTES = 256 * 1024**2
# Each subscriber takes a descriptor, and up to 128 KiB in its connection.
MAX_SUBSCRIBERS = 256
# Without events a comment is sent, so that proxies and clients know that the connection lives.
PING_S = 15.0
PING = b": ping\n\n"

TOO_SLOW = "this client reads too slowly: ask for fewer events (type, worker, model), or read faster; come back with Last-Event-ID"
ALL_TOO_SLOW = (
    f"the clients of these events leave more than {MAX_HELD_BYTES >> 20} MiB unread together, this one the most: ask for "
    "fewer events (type, worker, model), or read faster; come back with Last-Event-ID"
)
STOPPING = "this router is shutting down; come back with Last-Event-ID"


class Subscriber(Protocol):
    """A client's connection."""

    @property
    def unread_bytes(self) -> int:
        """Return how many bytes were sent that the client has not taken."""
        ...

    def send(self, chunk: Chunk) -> None:
        """Send whole events. Never waits."""

    def end(self, comment: bytes) -> None:
        """End with this comment, and drop the bytes that are still unread. Repeating it changes nothing."""


class EventFeed:
    """The events of one process, and its subscribers."""

    def __init__(self, *, life: str, wall_clock: Callable[[], float], metrics: WatchMetrics) -> None:
        """Begin without events. life: names this process's numbering, which differs after each start. wall_clock:
        returns seconds since 1970."""
        self._life = life
        self._wall_clock = wall_clock
        self._metrics = metrics
        self._ring = EventRing()
        # The bytes that subscribers have not taken.
        self.held = HeldChunks()
        self._subscribers: dict[EventFilter, list[Subscriber]] = {}
        # Published since the last flush; kept only for subscribers.
        self._fresh: list[NumberedEvent] = []
        self._flush_due: asyncio.TimerHandle | None = None
        # Whether it is for events, and not for a ping.
        self._due_soon = False
        self._closed = False
        metrics.subscribers.set_function(lambda: self.subscribers)
        metrics.held_bytes.set_function(lambda: self.held.size_bytes)

    @property
    def subscribers(self) -> int:
        return sum(map(len, self._subscribers.values()))

    def now(self) -> float:
        """Seconds since 1970."""
        return self._wall_clock()

    def publish(self, event: FleetEvent, hashes: Hashes | None = None) -> None:
        added = self._ring.add(event, hashes)
        self._metrics.events[event.type].inc()
        if self._subscribers:
            self._fresh.append(added)
            if not self._due_soon:
                self._due_soon = True
                self._flush_in(FLUSH_S)

    def of_worker(self, event_type: EventType, worker: WorkerKey, hashes: Hashes | None = None, **more: Any) -> None:
        """Publish an event about a worker. more: fields of FleetEvent."""
        self.publish(FleetEvent(event_type, self._wall_clock(), *worker, **more), hashes)

    def subscribe(self, wanted: EventFilter, subscriber: Subscriber, last_id: str | None) -> None:
        """Sends what came after `last_id` and is still kept, then everything as it happens. Ended subscribers must
        `unsubscribe`."""
        self._flush()
        first = self._missed(wanted, last_id) + b"id: %b\n\n" % event_id(self._life, self._ring.number)
        subscriber.send(Chunk(first))
        self._subscribers.setdefault(wanted, []).append(subscriber)
        self._keep_within_budget()
        if self._flush_due is None:
            self._flush_in(PING_S)

    def unsubscribe(self, wanted: EventFilter, subscriber: Subscriber) -> None:
        """Repeating it changes nothing."""
        alike = self._subscribers.get(wanted, [])
        if subscriber in alike:
            alike.remove(subscriber)
        if not alike:
            self._subscribers.pop(wanted, None)

    def close(self, reason: str = STOPPING) -> None:
        """Ends all subscribers, and whoever comes."""
        self._flush()
        self._closed = True
        for wanted, subscribers in list(self._subscribers.items()):
            for subscriber in list(subscribers):
                self._cut(wanted, subscriber, reason)
        if self._flush_due is not None:
            self._flush_due.cancel()

    @property
    def refusal(self) -> str | None:
        """Why nobody can subscribe now."""
        if self._closed:
            return STOPPING
        if self.subscribers >= MAX_SUBSCRIBERS:
            return f"{MAX_SUBSCRIBERS} clients watch the events of this router process already; end one of them"
        return None

    def _missed(self, wanted: EventFilter, last_id: str | None) -> bytes:
        if last_id is None:
            return b""
        life, _, digits = last_id.rpartition("-")
        try:
            if life != self._life:
                raise ValueError
            events, missed = self._ring.since(int(digits))
        except ValueError:
            return self._lost(f"event {last_id[:80]} is not of this router process, or of its life before a restart")
        found = b"".join(self._encoded(events, wanted))
        return found if not missed else self._lost(f"{missed} events are not kept any longer", count=missed) + found

    def _lost(self, reason: str, **more: Any) -> bytes:
        event = FleetEvent(
            EventType.LOST, self._wall_clock(), reason=f"{reason}: GET /workers has how everything is now", **more
        )
        return sse(NumberedEvent(self._ring.number, event), self._life, with_hashes=False)

    def _encoded(self, events: list[NumberedEvent], wanted: EventFilter) -> list[bytes]:
        return [sse(one, self._life, with_hashes=wanted.with_hashes) for one in events if wanted.wants(one.event)]

    def _flush_in(self, pause_s: float) -> None:
        if self._flush_due is not None:
            self._flush_due.cancel()
        self._flush_due = asyncio.get_running_loop().call_later(pause_s, self._flush_and_ping)

    def _flush_and_ping(self) -> None:
        self._flush_due, self._due_soon = None, False
        quiet = not self._fresh
        self._flush()
        if quiet:
            for wanted in list(self._subscribers):
                self._send(wanted, PING)
        if self._subscribers:
            self._flush_in(PING_S)

    def _flush(self) -> None:
        fresh, self._fresh = self._fresh, []
        if fresh:
            for wanted in list(self._subscribers):
                self._send(wanted, b"".join(self._encoded(fresh, wanted)))

    def _send(self, wanted: EventFilter, data: bytes) -> None:
        if not data:
            return
        chunk = Chunk(data)
        # The budget may have cut off the last subscriber with this filter.
        for subscriber in list(self._subscribers.get(wanted, ())):
            if subscriber.unread_bytes > MAX_UNREAD_BYTES:
                self._metrics.subscribers_cut.inc()
                self._cut(wanted, subscriber, TOO_SLOW)
            else:
                subscriber.send(chunk)
        self._keep_within_budget()

    def _keep_within_budget(self) -> None:
        """Cut off the subscribers with the most unread bytes until all together hold no more than they may."""
        while self.held.size_bytes > MAX_HELD_BYTES:
            wanted, slowest = max(
                ((wanted, subscriber) for wanted, alike in self._subscribers.items() for subscriber in alike),
                key=lambda entry: entry[1].unread_bytes,
            )
            self._metrics.subscribers_cut.inc()
            self._cut(wanted, slowest, ALL_TOO_SLOW)

    def _cut(self, wanted: EventFilter, subscriber: Subscriber, reason: str) -> None:
        self.unsubscribe(wanted, subscriber)
        # A comment: the client's last id stays that of the last event it was sent.
        subscriber.end(f": {reason}\n\n".encode())
