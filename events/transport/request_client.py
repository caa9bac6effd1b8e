# SPDX-License-Identifier: Apache-2.0
"""The socket of one request at a time, with its permit and the deadline of its answer. The time is an argument."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable

from kvrouter.events.transport.deadline import Deadline
from kvrouter.events.transport.link import Link
from kvrouter.events.transport.permits import Permit, Permits
from kvrouter.events.transport.settings import StreamSettings


class RequestClient(ABC):
    """A client that opens a new link for each request, so that answers cannot mix.

    A subclass says which request is wanted, and when.
    """

    def __init__(
        self, connect: Callable[[], Link], settings: StreamSettings, permits: Permits | None, wake: Callable[[], None]
    ) -> None:
        """Create a client without a request.

        Args:
            connect: Opens a link to the endpoint. It may raise zmq.ZMQError, which is passed on.
            settings: Bounds and times of the stream.
            permits: The permits that requests need; None if they need none.
            wake: Called when `permits` grants a permit that had to be waited for.
        """
        self._connect = connect
        self._settings = settings
        self._permits = permits
        self._wake = wake
        # The number of the request under way, 0 if there is none. It waits for its permit, or has an open connection.
        self._number = 0
        self._permit: Permit | None = None
        self._link: Link | None = None
        self._deadline = Deadline(settings.grace_s)

    def read(self, now_s: float) -> bool:
        """Read until no message is left (returns False) or the turn's budget is spent (returns True).

        A request whose answer is overdue is given up.
        """
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
        """Return whether an answer waits."""
        return self._link is not None and self._link.readable()

    def close(self) -> None:
        """Close the link at once, which also ends the request at the publisher. Safe to call twice."""
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
        """Return the number of the wanted request; 0 for none."""

    @abstractmethod
    def _handle(self, frames: list[bytes], now_s: float) -> None:
        """Handle a message of the answer to the wanted request."""

    @abstractmethod
    def _give_up(self) -> None:
        """Give up the wanted answer, which is overdue."""

    @abstractmethod
    def _fail(self, reason: str) -> None:
        """End the request without an answer."""

    def _send(self, now_s: float, *frames: bytes) -> bool:
        """Send the wanted request if it has a permit. Returns whether it was sent."""
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
        """Give the answer its whole time again, as it makes progress."""
        self._deadline.due_s = now_s + self._settings.answer_timeout_s
