# SPDX-License-Identifier: Apache-2.0
"""The shell of a subscriber: links are read in turns of one asyncio loop, and items are handed to one consumer.

It runs on asyncio's own loop and on uvloop. Plain ZMQ sockets are read through their file descriptors, because
zmq.asyncio costs some 40 us a message. These descriptors are edge-triggered, and any call on the socket may consume
their notice, so each turn ends with a check of what is still readable, and schedules another turn if anything is. A
turn is bounded, so that other work on the loop gets its time. It reads first and judges afterwards, so that a stall of
this process never looks like a peer's silence. No message from the wire causes an exception.
"""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Generic, TypeVar

import zmq

from kvrouter.events.transport.curve import CurveClient
from kvrouter.events.transport.flood_watch import FloodWatch
from kvrouter.events.transport.holding_cursor import HoldingCursor
from kvrouter.events.transport.link import Link
from kvrouter.events.transport.outbox import Outbox
from kvrouter.events.transport.request_client import RequestClient
from kvrouter.events.transport.settings import StreamSettings

Item = TypeVar("Item")


class SubscriberClosed(Exception):
    """A call of `next` or `start` on a closed subscriber."""


class Subscription(ABC, Generic[Item]):
    """One publisher's stream. Call `start`, then `next` repeatedly from one task, then `close`."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        settings: StreamSettings,
        cursor: HoldingCursor[Item, Any],
        *,
        size_bytes: Callable[[Item], int],
        curve: CurveClient | None = None,
        watch: FloodWatch | None = None,
    ) -> None:
        """Open nothing yet.

        Args:
            context: Makes the sockets.
            settings: Bounds and times of the stream.
            cursor: Turns messages into items.
            size_bytes: Returns the size of one item.
            curve: As in `Link`, for every link.
            watch: As in `Link`, for every link.
        """
        self._context = context
        self._settings = settings
        self._cursor = cursor
        self._curve = curve
        self._watch = watch or FloodWatch()
        self._outbox: Outbox[Item] = Outbox(
            settings.max_waiting, settings.max_waiting_bytes, size_bytes=size_bytes, on_room=self._schedule
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._turn: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None
        # When this turn began.
        self._now_s = -math.inf
        # Whether reading has ended.
        self._ended = False
        self._closed = False

    @property
    def waiting(self) -> int:
        """Number of items that the consumer has not taken yet."""
        return len(self._outbox)

    @property
    def held(self) -> int:
        """Number of messages held back while an answer is under way."""
        return self._cursor.held

    async def start(self) -> None:
        """Connect without waiting for the peer. Raises zmq.ZMQError if an endpoint is no address."""
        if self._closed:
            raise SubscriberClosed
        if self._loop is not None:
            raise RuntimeError("the subscriber was started before")
        self._loop = asyncio.get_running_loop()
        self._now_s = self._loop.time()
        try:
            self._open()
        except BaseException:
            await self.close()
            raise
        self._schedule()

    async def next(self) -> list[Item]:
        """Return the next items, at least one, at most `max_items`. One caller at a time.

        Raises SubscriberClosed if it is closed, also while waiting, and zmq.ZMQError if the sockets cannot be used any
        longer. A cancelled call loses nothing.
        """
        if self._closed:
            raise SubscriberClosed
        return await self._outbox.take(self._settings.max_items)

    async def close(self) -> None:
        """Close sockets and timers at once, and drop the items that were not taken. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        self._end(SubscriberClosed())
        self._outbox.clear()

    @abstractmethod
    def _open(self) -> None:
        """Connect the first links. Raises zmq.ZMQError."""

    @abstractmethod
    def _links(self) -> Iterable[Link | RequestClient | None]:
        """Return all links that may be open."""

    @abstractmethod
    def _read(self) -> bool:
        """Read until no message is left (returns False) or the turn's budget is spent (returns True)."""

    @abstractmethod
    def _act(self) -> float:
        """Do the work that is due after reading. Returns when to do so again."""

    def _connect(self, endpoint: str, receive_hwm: int, *, topic: bytes | None = None, lasting: bool = True) -> Link:
        assert self._loop is not None
        return Link(
            self._context,
            endpoint,
            self._settings,
            loop=self._loop,
            on_readable=self._schedule,
            receive_hwm=receive_hwm,
            topic=topic,
            curve=self._curve,
            lasting=lasting,
            watch=self._watch,
            on_flood=partial(self._on_flood, topic is not None),
            max_unread_bytes=None if lasting else self._settings.answer_max_unread_bytes,
        )

    def _on_flood(self, is_live: bool, reason: str) -> None:
        self._cursor.flooded(reason, is_live=is_live)

    def _schedule(self) -> None:
        if self._turn is None and not self._ended and self._loop is not None:
            self._turn = self._loop.call_soon(self._run_turn)

    def _run_turn(self) -> None:
        assert self._loop is not None
        self._turn = None
        self._now_s = self._loop.time()
        more, failure = False, None
        try:
            if self._outbox.full:
                # `on_room` schedules the next turn. Reading the sockets' state makes their descriptors unreadable;
                # otherwise the loop would call this at once again.
                self._is_readable()
            else:
                more = self._read()
                self._arm(self._act())
                more = more or self._is_readable()
        except zmq.ZMQError as error:
            # Without a socket, a descriptor or a context the stream cannot continue, so the consumer must know.
            failure = error
        self._outbox.put(self._cursor.take())
        if failure is not None:
            self._end(failure)
        elif more:
            self._schedule()

    def _is_readable(self) -> bool:
        return any(link.readable() for link in self._links() if link is not None)

    def _arm(self, due_s: float) -> None:
        assert self._loop is not None
        if self._timer is not None:
            if self._timer.when() <= due_s:
                # This is soon enough; the turn that the timer causes computes the time again.
                return
            self._timer.cancel()
            self._timer = None
        if due_s < math.inf:
            self._timer = self._loop.call_at(due_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._schedule()

    def _end(self, error: Exception) -> None:
        self._ended = True
        for handle in (self._timer, self._turn):
            if handle is not None:
                handle.cancel()
        self._timer = self._turn = None
        for link in self._links():
            if link is not None:
                link.close()
        self._outbox.end(error)
