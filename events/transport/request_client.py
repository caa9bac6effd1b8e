# SPDX-License-Identifier: Apache-2.0
"""The socket of one request at a time, its permit and the deadline of its answer. The time is an argument."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable

from kvrouter.events.transport.deadline import Deadline
from kvrouter.events.transport.link import Link
from kvrouter.events.transport.permits import Permit, Permits
from kvrouter.events.transport.settings import StreamSettings


class RequestClient(ABC):
    """A fresh link for each request, so that answers cannot mix. A subclass says what is wanted, and when."""

    def __init__(
        self, connect: Callable[[], Link], settings: StreamSettings, permits: Permits | None, wake: Callable[[], None]
    ) -> None:
        """connect: a new link to the endpoint; may raise zmq.ZMQError, which is passed on. wake: called when `permits`
        grants a permit that had to be waited for."""
        self._connect = connect
        self._settings = settings
        self._permits = permits
        self._wake = wake
        # The request that this link and permit are for; 0: none.
        self._number = 0
        self._permit: Permit | None = None
        self._link: Link | None = None
        self._deadline = Deadline(settings.grace_s)

    def read(self, now_s: float) -> bool:
        """Reads until nothing is left (False) or the turn's budget is spent (True). Gives up an overdue answer."""
        if self._link is None:
            return False

        def handle(frames: list[bytes]) -> None:
            # The answer to a request that was replaced no longer counts.
            if self._number == self._wanted():
                self._handle(frames, now_s)

        more = self._link.read(handle, self._settings.turn_messages, self._settings.turn_bytes)
        if not more and self._number == self._wanted():
            if self._link.flood:
                self._fail(self._link.flood)
            elif self._deadline.has_passed(now_s):
                self._give_up()
        return more

    def readable(self) -> bool:
        """Whether an answer waits."""
        return self._link is not None and self._link.readable()

    def close(self) -> None:
        """Closes the link at once, which also ends the request at the publisher. Safe to call twice."""
        self._number = 0
        self._deadline.due_s = math.inf
        if self._permit is not None:
            self._permit.end()
            self._permit = None
        if self._link is not None:
            self._link.close()
            self._link = None

    @abstractmethod
    def _wanted(self) -> int:
        """The number of the request that is wanted; 0: none."""

    @abstractmethod
    def _handle(self, frames: list[bytes], now_s: float) -> None:
        """Takes a message of the answer that is wanted."""

    @abstractmethod
    def _give_up(self) -> None:
        """The answer that is wanted is overdue."""

    @abstractmethod
    def _fail(self, reason: str) -> None:
        """End the request without an answer."""

    def _send(self, now_s: float, *frames: bytes) -> bool:
        """Sends the request that is wanted once it has a permit; whether that was now."""
        self._number = self._wanted()
        if self._permit is None and self._permits is not None:
            self._permit = self._permits.request(self._wake)
        if self._permit is not None and not self._permit.granted:
            return False
        self._link = self._connect()
        self._link.send(*frames)
        self._extend(now_s)
        return True

    def _extend(self, now_s: float) -> None:
        """The answer goes on: it has its whole time again."""
        self._deadline.due_s = now_s + self._settings.answer_timeout_s
