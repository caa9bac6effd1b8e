# SPDX-License-Identifier: Apache-2.0
"""The fleet's events, from the code that observes them to the clients that watch.

Every process has each event of the whole fleet once: events of the workers that it follows as they happen, and events
of all other workers from their logs in Redis. Publishing costs an append. Events are written in batches, and encoded
once for all clients with the same filter. A feed belongs to one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from kvrouter.contract.fleet_event import EventType, FleetEvent
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.follow.feed.backlog import Chunk, HeldChunks
from kvrouter.router.follow.feed.event_ring import EventRing
from kvrouter.router.follow.feed.fleet_event import EventFilter, NumberedEvent, event_id, sse
from kvrouter.router.follow.feed.watch_metrics import WatchMetrics
from kvrouter.router.index.ingest.net_changes import Hashes

# How long events gather before they are written: nobody sees the difference, and a hundred clients cost two thousand
# writes a second.
FLUSH_S = 0.05
# The most unread bytes of one client. Twice the size of all kept events in JSON, so a client that reconnects is not cut
# off because of the events it missed.
MAX_UNREAD_BYTES = 16 * 1024**2
# The most unread bytes of all clients together, each byte counted once. Clients with the same filter share bytes, so
# only clients with different filters, or clients that reconnected, come near this: sixteen of them at MAX_UNREAD_BYTES.
MAX_HELD_BYTES = 256 * 1024**2
# The most clients: each takes a descriptor, and up to 128 KiB in its connection.
MAX_SUBSCRIBERS = 256
# After this time without events a comment is sent, so that proxies and clients know that the connection lives.
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
        """The number of bytes that were sent and that the client has not taken."""
        ...

    def send(self, chunk: Chunk) -> None:
        """Send a chunk of whole events without waiting."""

    def end(self, comment: bytes) -> None:
        """End the answer with this comment and drop all unread bytes; do nothing if it has ended."""


class EventFeed:
    """The events of one process, and its subscribers."""

    def __init__(self, *, life: str, wall_clock: Callable[[], float], metrics: WatchMetrics) -> None:
        """Begin without events.

        Args:
            life: Identifies this process's numbering of events; it differs after each start of the process.
            wall_clock: Returns the seconds since 1970.
            metrics: Counts the events and the subscribers.
        """
        self._life = life
        self._wall_clock = wall_clock
        self._metrics = metrics
        self._ring = EventRing()
        # The number of the last event before the first client that wanted block hashes; None until one comes. Hashes of events
        # up to it are not kept, because they would take most of the ring's memory, and most clients do not want them.
        self._hashes_after: int | None = None
        # The bytes that subscribers have not taken.
        self.held = HeldChunks()
        self._subscribers: dict[EventFilter, list[Subscriber]] = {}
        # Events published since the last flush; kept only while there are subscribers.
        self._fresh: list[NumberedEvent] = []
        self._flush_due: asyncio.TimerHandle | None = None
        # Whether the timer is set for new events, not for a ping.
        self._due_soon = False
        self._closed = False
        metrics.subscribers.set_function(lambda: self.subscribers)
        metrics.held_bytes.set_function(lambda: self.held.size_bytes)

    @property
    def subscribers(self) -> int:
        """The number of clients that watch."""
        return sum(map(len, self._subscribers.values()))

    def now(self) -> float:
        """Return the current time in seconds since 1970."""
        return self._wall_clock()

    def publish(self, event: FleetEvent, hashes: Hashes | None = None) -> None:
        """Add the event to the kept ones, and send it to the subscribers within FLUSH_S.

        Args:
            event: The event, without its block hashes.
            hashes: The uint64 block hashes that the event is about, for clients that want them; None if it has none.
        """
        added = self._ring.add(event, None if self._hashes_after is None else hashes)
        self._metrics.events[event.type].inc()
        if self._subscribers:
            self._fresh.append(added)
            if not self._due_soon:
                self._due_soon = True
                self._flush_in(FLUSH_S)

    def of_worker(self, event_type: EventType, worker: WorkerKey, hashes: Hashes | None = None, **more: Any) -> None:
        """Publish an event about a worker that happens now.

        Args:
            event_type: The type of the event.
            worker: The worker that the event is about.
            hashes: See `publish`.
            **more: Further fields of FleetEvent.
        """
        self.publish(FleetEvent(event_type, self._wall_clock(), *worker, **more), hashes)

    def subscribe(self, wanted: EventFilter, subscriber: Subscriber, last_id: str | None) -> None:
        """Send the kept events after `last_id`, then each new event that the filter admits.

        The caller must `unsubscribe` when the subscriber has ended.

        Args:
            wanted: Selects the events.
            subscriber: Receives the events.
            last_id: The client's Last-Event-ID; None sends new events only.
        """
        self._flush()
        if wanted.with_hashes and self._hashes_after is None:
            self._hashes_after = self._ring.number
        first = self._missed(wanted, last_id) + b"id: %b\n\n" % event_id(self._life, self._ring.number)
        subscriber.send(Chunk(first))
        self._subscribers.setdefault(wanted, []).append(subscriber)
        self._keep_within_budget()
        if self._flush_due is None:
            self._flush_in(PING_S)

    def unsubscribe(self, wanted: EventFilter, subscriber: Subscriber) -> None:
        """Send the subscriber no more events; do nothing if it is not subscribed."""
        alike = self._subscribers.get(wanted, [])
        if subscriber in alike:
            alike.remove(subscriber)
        if not alike:
            self._subscribers.pop(wanted, None)

    def close(self, reason: str = STOPPING) -> None:
        """Send the remaining events, end all subscribers, and refuse new ones."""
        self._flush()
        self._closed = True
        for wanted, subscribers in list(self._subscribers.items()):
            for subscriber in list(subscribers):
                self._cut(wanted, subscriber, reason)
        if self._flush_due is not None:
            self._flush_due.cancel()

    @property
    def refusal(self) -> str | None:
        """The reason why no client can subscribe now, or None if one can."""
        if self._closed:
            return STOPPING
        if self.subscribers >= MAX_SUBSCRIBERS:
            return f"{MAX_SUBSCRIBERS} clients watch the events of this router process already; end one of them"
        return None

    def _missed(self, wanted: EventFilter, last_id: str | None) -> bytes:
        """Return the encoded events after `last_id`, preceded by a `lost` event if some of them are gone."""
        if last_id is None:
            return b""
        life, _, digits = last_id.rpartition("-")
        try:
            if life != self._life:
                raise ValueError
            events, missed = self._ring.since(int(digits))
            if wanted.with_hashes and self._hashes_after is not None:
                whole = [numbered for numbered in events if numbered.number > self._hashes_after]
                events, missed = whole, missed + len(events) - len(whole)
        except ValueError:
            return self._lost(f"event {last_id[:80]} is not of this router process, or of its life before a restart")
        data = b"".join(self._encoded(events, wanted))
        return data if not missed else self._lost(f"{missed} events are not kept any longer", count=missed) + data

    def _lost(self, reason: str, **more: Any) -> bytes:
        """Return an encoded `lost` event with the number of the newest event, so that the client's last id is valid."""
        event = FleetEvent(
            EventType.LOST, self._wall_clock(), reason=f"{reason}: GET /workers has how everything is now", **more
        )
        return sse(NumberedEvent(self._ring.number, event), self._life, with_hashes=False)

    def _encoded(self, events: list[NumberedEvent], wanted: EventFilter) -> list[bytes]:
        return [
            sse(numbered, self._life, with_hashes=wanted.with_hashes)
            for numbered in events
            if wanted.wants(numbered.event)
        ]

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
        """Cut off the subscriber with the most unread bytes, repeatedly, until at most MAX_HELD_BYTES are held."""
        while self.held.size_bytes > MAX_HELD_BYTES:
            wanted, slowest = max(
                ((wanted, subscriber) for wanted, alike in self._subscribers.items() for subscriber in alike),
                key=lambda entry: entry[1].unread_bytes,
            )
            self._metrics.subscribers_cut.inc()
            self._cut(wanted, slowest, ALL_TOO_SLOW)

    def _cut(self, wanted: EventFilter, subscriber: Subscriber, reason: str) -> None:
        self.unsubscribe(wanted, subscriber)
        # A comment has no id, so the client's last id stays that of the last event it was sent.
        subscriber.end(f": {reason}\n\n".encode())
