# SPDX-License-Identifier: Apache-2.0
"""What one client may hold of the HTTP server, and the timers that end it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from kvrouter.router.base.common.sockets import untaken_bytes


class HttpLimits(msgspec.Struct, frozen=True):
    """What one connection may cost. `max_connections` is the process'."""

    # nginx' default (four buffers of 8 kB): proxies in front of us refuse what is larger themselves.
    max_head_bytes: int = 32 * 1024
    # Apache's LimitRequestFields.
    max_headers: int = 100
    # Two round trips, and a millisecond of each side's CPU; longer only for a client that is not about to ask anything.
    handshake_timeout_s: float = 10.0
    # A head is one packet, or two; a client that connects ahead of its requests finds out by the close.
    head_timeout_s: float = 10.0
    # max_body_bytes at 0.5 MB/s; a usual prompt at a tenth of a modem's speed.
    body_timeout_s: float = 60.0
    # An answer is some kB, and clients wait for it.
    send_timeout_s: float = 30.0
    # Longer than the usual keep-alive of clients and load balancers (60 s), so that they close first and no request
    # meets a closed connection.
    idle_timeout_s: float = 75.0
    # When the server stops, of who has just connected, or has just read the end of an answer that left the connection open:
    # it sends its next request once it is scheduled, which on a busy machine takes seconds, and that would be lost.
    next_request_s: float = 5.0
    # Gateways keep some tens of connections each; one that does nothing costs some 20 kB here.
    max_connections: int = 4_096


class Deadlines:
    """The timers of one connection: what comes next of a request, a connection that is idle, answers nobody reads.

    on_late: the head or the body did not come in time. on_unread: the client does not read."""

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
        self._on_late = on_late
        self._on_unread = on_unread
        # Which part of which message the deadline was set for.
        self._awaited: tuple[int, bool] | None = None
        self._deadline: asyncio.TimerHandle | None = None
        # Set once for many requests: it looks how long ago the last of them ended.
        self._idle_look: asyncio.TimerHandle | None = None
        self._idle_since_s: float | None = loop.time()
        self._unread_bytes = 0
        self._send_deadline: asyncio.TimerHandle | None = None

    def expect(self, message: int, *, body: bool) -> None:
        """The head or the body of the message of this number has to come; a deadline that is set for it stays."""
        if (message, body) == self._awaited:
            return
        self.expect_nothing()
        self._awaited = message, body
        timeout_s = self._limits.body_timeout_s if body else self._limits.head_timeout_s
        self._deadline = self._loop.call_later(timeout_s, self._on_late)

    def restart(self) -> None:
        """What is awaited could not come, as nobody read: its time begins now."""
        if self._awaited is not None:
            message, body = self._awaited
            self.expect_nothing()
            self.expect(message, body=body)

    def expect_nothing(self) -> None:
        """What was awaited is there."""
        if self._awaited is not None:
            self._awaited = None
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

    def begin_idling(self) -> None:
        """Every request is answered."""
        self._idle_since_s = self._loop.time()
        if self._idle_look is None:
            self._idle_look = self._loop.call_later(self._limits.idle_timeout_s, self._look_at_idling)

    def end_idling(self) -> None:
        self._idle_since_s = None

    @property
    def idle_s(self) -> float:
        """For how long nothing was to be done; a new connection begins so."""
        return 0.0 if self._idle_since_s is None else self._loop.time() - self._idle_since_s

    def await_reading(self) -> None:
        """The client has to read on; the deadline is for the next byte that it takes."""
        if self._send_deadline is None:
            self._begin_send_deadline()

    def end_reading(self) -> None:
        """The client reads again."""
        if self._send_deadline is not None:
            self._send_deadline.cancel()
            self._send_deadline = None

    def cancel(self) -> None:
        self.expect_nothing()
        self.end_reading()
        if self._idle_look is not None:
            self._idle_look.cancel()

    def _look_at_idling(self) -> None:
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
            # Slow, and reading: a proxied answer may be large.
            self._begin_send_deadline()
        else:
            self._on_unread()
