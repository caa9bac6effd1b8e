# SPDX-License-Identifier: Apache-2.0
"""Asks for the snapshot that a cursor wants, one at a time, each over a socket of its own so that answers cannot mix.

After a failure it waits, twice as long each time, and as long as a refusal says. The time is an argument; the caller
comes back at the time that `ask` returns.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from kvrouter.events.patch.cursor import ReportCursor
from kvrouter.events.patch.decode import MAX_ERROR_CHARS, Unreadable, read_answer
from kvrouter.events.patch.messages import Refused, SnapshotPart, SnapshotRequest
from kvrouter.events.patch.settings import ReportSettings
from kvrouter.events.transport.link import Link
from kvrouter.events.transport.permits import Permit, Permits

# Doublings of a pause, before its maximum cuts it off anyway.
_MAX_DOUBLINGS = 16


class SnapshotAsker:
    """The socket of the snapshot on its way, if any."""

    def __init__(
        self,
        cursor: ReportCursor,
        connect: Callable[[], Link],
        settings: ReportSettings,
        permits: Permits | None,
        wake: Callable[[], None],
    ) -> None:
        """connect: a new socket to the publisher's requests endpoint; may raise zmq.ZMQError, which is passed on. wake:
        called when `permits` lets it ask."""
        self._cursor = cursor
        self._connect = connect
        self._settings = settings
        self._permits = permits
        self._wake = wake
        self._permit: Permit | None = None
        self._link: Link | None = None
        self._id = 0
        self._asked_s = -math.inf
        self._due_s = math.inf
        # Refused until then.
        self._retry_s = -math.inf

    def read(self, now: float) -> bool:
        """Reads until nothing is left (False) or the turn's budget is spent (True)."""
        cursor = self._cursor
        budget = self._settings.turn_bytes
        for _ in range(self._settings.turn_messages):
            # What replaced its request has nothing to say; the next `ask` closes the socket.
            if self._link is None or cursor.request != self._id:
                return False
            frames = self._link.receive()
            if frames is None:
                return False
            reply = read_answer(frames)
            if isinstance(reply, Unreadable):
                cursor.malformed(f"an answer: {reply.reason}")
                cursor.snapshot_failed("an answer that cannot be read")
            elif isinstance(reply, SnapshotPart) and reply.id == self._id:
                self._due_s = now + self._settings.answer_timeout_s
                cursor.part(reply)
            elif isinstance(reply, Refused) and reply.id == self._id:
                self._refuse(reply, now)
            budget -= sum(map(len, frames))
            if budget <= 0:
                return True
        return True

    def judge(self, now: float) -> None:
        """Gives up an answer that is overdue; only right after all that had come was read."""
        if self._link is None or self._cursor.request != self._id or now < self._due_s:
            return
        if now - self._due_s > self._settings.grace_s:
            # We ourselves come too late: what was sent in time may still be in ZMQ's hands.
            self._due_s = now + self._settings.grace_s
        else:
            self._cursor.snapshot_overdue()

    def ask(self, now: float, settled_s: float | None) -> float:
        """Asks when it is time; returns when to come back.

        settled_s: from then on the live socket misses nothing; None: it has no peer.
        """
        cursor, settings = self._cursor, self._settings
        if self._link is not None:
            if cursor.request == self._id:
                self._link.take_news()
                return self._due_s
            self.close()
        if cursor.request is None or settled_s is None:
            self._end_permit()
            return math.inf
        doubled_s = settings.snapshot_pause_s * float(1 << min(cursor.failures, _MAX_DOUBLINGS))
        due_s = max(settled_s, self._asked_s + min(doubled_s, settings.max_snapshot_pause_s), self._retry_s)
        if now < due_s:
            return due_s
        if self._permit is None and self._permits is not None:
            self._permit = self._permits.ask(self._wake)
        if self._permit is not None and not self._permit.granted:
            return math.inf
        self._link = self._connect()
        self._id = cursor.request
        self._asked_s = now
        self._due_s = now + settings.answer_timeout_s
        self._link.send(b"", msgspec.msgpack.encode(SnapshotRequest(self._id)))
        cursor.asked()
        return self._due_s

    def readable(self) -> bool:
        """Whether an answer waits."""
        return self._link is not None and self._link.readable()

    def close(self) -> None:
        """Closes the socket at once, which also tells the publisher."""
        self._end_permit()
        if self._link is not None:
            self._link.close()
            self._link = None

    def _end_permit(self) -> None:
        if self._permit is not None:
            self._permit.end()
            self._permit = None

    def _refuse(self, refused: Refused, now: float) -> None:
        self._cursor.snapshot_failed(f"refused: {refused.reason[:MAX_ERROR_CHARS]}")
        wait_s, most_s = refused.retry_s, self._settings.max_snapshot_pause_s
        # "Never" may end with a restart of the engine.
        self._retry_s = now + (wait_s if wait_s is not None and 0 <= wait_s <= most_s else most_s)
