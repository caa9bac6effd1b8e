# SPDX-License-Identifier: Apache-2.0
"""The limits of one client's use of the HTTP server, and the timers that enforce them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from kvrouter.router.base.common.sockets import untaken_bytes


class HttpLimits(msgspec.Struct, frozen=True):
    """The limits of one connection. `max_connections` is the limit of the process."""

    # nginx' default (four buffers of 8 kB): proxies in front of the router refuse larger heads themselves.
    max_head_bytes: int = 32 * 1024
    # Apache's LimitRequestFields.
    max_headers: int = 100
    # A handshake takes two round trips, and a millisecond of each side's CPU. It takes longer only for a client that is
    # not about to send a request.
    handshake_timeout_s: float = 10.0
    # A head is one packet, or two. A client that connects ahead of its requests learns of the limit when the connection
    # is closed.
    head_timeout_s: float = 10.0
    # This admits max_body_bytes at 0.5 MB/s, and a usual prompt at a tenth of a modem's speed.
    body_timeout_s: float = 60.0
    # An answer has some kB, and clients wait for it.
    send_timeout_s: float = 30.0
    # Longer than the usual keep-alive of clients and load balancers (60 s), so that they close first and no request
    # meets a closed connection.
    idle_timeout_s: float = 75.0
    # How long a stopping server keeps the connection of a client that has just connected, or has just read the end of
    # an answer that left the connection open. Such a client sends its next request once it is scheduled, which takes
    # seconds on a busy machine, and that request would be lost.
    next_request_s: float = 5.0
    # Gateways keep some tens of connections each; an idle connection costs about 20 kB here.
    max_connections: int = 4_096


class Deadlines:
    """The timers of one connection: for the next part of a request, for idling, and for answers that are not read."""

    def __init__(
        self,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        limits: HttpLimits,
        on_late: Callable[[], None],
        on_unread: Callable[[], None],
    ) -> None:
        self._transport = transport
        self._loop = loop
        self._limits = limits
        # Called if the head or the body did not come in time.
        self._on_late = on_late
        # Called if the client does not read.
        self._on_unread = on_unread
        # The part of the message for which the deadline was set: the message's number, and whether it is the body.
        self._awaited: tuple[int, bool] | None = None
        self._deadline: asyncio.TimerHandle | None = None
        # One timer for many requests: it checks how long ago the last of them ended.
        self._idle_look: asyncio.TimerHandle | None = None
        self._idle_since_s: float | None = loop.time()
        self._unread_bytes = 0
        self._send_deadline: asyncio.TimerHandle | None = None

    def expect(self, message: int, *, body: bool) -> None:
        """Set the deadline for the head or the body of the message with this number, unless it is set already."""
        if (message, body) == self._awaited:
            return
        self.expect_nothing()
        self._awaited = message, body
        timeout_s = self._limits.body_timeout_s if body else self._limits.head_timeout_s
        self._deadline = self._loop.call_later(timeout_s, self._on_late)

    def restart(self) -> None:
        """Begin the current deadline again, because nothing could arrive while the server did not read."""
        if self._awaited is not None:
            message, body = self._awaited
            self.expect_nothing()
            self.expect(message, body=body)

    def expect_nothing(self) -> None:
        """Cancel the deadline, because the expected part has arrived."""
        if self._awaited is not None:
            self._awaited = None
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

    def begin_idling(self) -> None:
        """Begin the idle time, because every request is answered."""
        self._idle_since_s = self._loop.time()
        if self._idle_look is None:
            self._idle_look = self._loop.call_later(self._limits.idle_timeout_s, self._look_at_idling)

    def end_idling(self) -> None:
        """End the idle time, because bytes have arrived."""
        self._idle_since_s = None

    @property
    def idle_s(self) -> float:
        """The seconds for which the connection has been idle. A new connection begins idle."""
        return 0.0 if self._idle_since_s is None else self._loop.time() - self._idle_since_s

    def await_reading(self) -> None:
        """Set the deadline for the client to read. It counts from the last byte that the client took."""
        if self._send_deadline is None:
            self._begin_send_deadline()

    def end_reading(self) -> None:
        """Cancel the deadline for reading, because the client reads again."""
        if self._send_deadline is not None:
            self._send_deadline.cancel()
            self._send_deadline = None

    def cancel(self) -> None:
        """Cancel all timers."""
        self.expect_nothing()
        self.end_reading()
        if self._idle_look is not None:
            self._idle_look.cancel()

    def _look_at_idling(self) -> None:
        """Close the connection if it has been idle for too long, and check again later if not."""
        self._idle_look = None
        if self._idle_since_s is None or self._transport.is_closing():
            return
        left_s = self._idle_since_s + self._limits.idle_timeout_s - self._loop.time()
        if left_s <= 0:
            self._transport.close()
        else:
            self._idle_look = self._loop.call_later(left_s, self._look_at_idling)

    def _begin_send_deadline(self) -> None:
        self._unread_bytes = untaken_bytes(self._transport)
        self._send_deadline = self._loop.call_later(self._limits.send_timeout_s, self._on_send_late)

    def _on_send_late(self) -> None:
        self._send_deadline = None
        if untaken_bytes(self._transport) < self._unread_bytes:
            # The client is slow, but reads: a proxied answer may be large.
            self._begin_send_deadline()
        else:
            self._on_unread()
