# SPDX-License-Identifier: Apache-2.0
"""uvicorn's HTTP protocol with bounds on what one client can hold: bytes of a head, time, unread answers, connections.

uvicorn bounds idle kept connections and its parser nothing else: it takes heads of any size from clients of any
slowness. The size of bodies is bounded in `outer.py` and `hot_protocol.py`. Bounds are a connection's; who opens many
is stopped by `max_connections`. Uses these parts of uvicorn's HttpToolsProtocol: the parser's callbacks, `cycle`,
`pipeline`, `flow`, `connections`, `send_400_response`, `server_state.default_headers`.
"""

from __future__ import annotations

import asyncio
import select
from http import HTTPStatus
from typing import Any, ClassVar

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from kvrouter.router.api.http.outer import OTHER_PATH, Answer, Outer
from kvrouter.router.api.http.request_heads import head_problem, origin_form
from kvrouter.router.common.errors import BadQuestion, HeadTooLarge, RouterError, TooManyConnections, TooSlow
from kvrouter.router.common.sockets import poller, untaken_bytes

STATUS_LINES = {status: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}

# A name, a colon, a space and a line's end.
HEADER_LINE_BYTES = 4

NO_UPGRADE = (
    "no other protocol than HTTP/1.1 is spoken here; send no Upgrade header (in Java: HttpClient.Version.HTTP_1_1)"
)
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

# Of a client that sends no more: how often it is looked whether it still reads. A request of its that runs for nobody
# takes an engine's time; a look is one system call.
READER_LOOK_S = 0.1
# And how many looks in a row an answer that has begun may stand still: with nothing to send, only patience tells who
# reads on from who hung up. Tokens come some times a second; an engine that pauses for 5 s does so under a stall.
STILL_LOOKS = 50

# When the server stops: how long an idle connection is kept for a request that is on its way. Who has just connected
# sends it a round trip later.
LAST_REQUEST_S = 0.5


class HttpLimits(msgspec.Struct, frozen=True):
    """What one connection may cost. `max_connections` is the process'."""

    # nginx' default (four buffers of 8 kB): proxies in front of us refuse what is larger themselves.
    max_head_bytes: int = 32 * 1024
    # Apache's LimitRequestFields.
    max_headers: int = 100
    # A head is one packet, or two; a client that connects ahead of its requests finds out by the close.
    head_timeout_s: float = 10.0
    # max_body_bytes at 0.5 MB/s; a usual prompt at a tenth of a modem's speed.
    body_timeout_s: float = 60.0
    # An answer is some kB, and clients wait for it.
    send_timeout_s: float = 30.0
    # Gateways keep some tens of connections each; one that does nothing costs some 20 kB here.
    max_connections: int = 4_096


class LimitedProtocol(HttpToolsProtocol):
    """A protocol that closes connections over the limits: with an answer that says why, where the client waits for
    one."""

    outer: ClassVar[Outer]
    limits: ClassVar[HttpLimits]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_bytes = 0
        # Headers and trailers of the message that comes.
        self._fields = 0
        # Bytes fed since the parser last got on: a head, chunk extensions or trailers without an end.
        self._fruitless_bytes = 0
        self._in_message = False
        self._in_body = False
        # Completed messages; with the phase it names what a deadline was set for.
        self._messages = 0
        self._awaited: tuple[int, bool] | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._unread_bytes = 0
        self._send_deadline: asyncio.TimerHandle | None = None
        # While the client sends no more.
        self._reader_look: asyncio.TimerHandle | None = None
        self._gone: select.poll | None = None
        self._stops = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.limits.max_connections:
            text = f"the router has {self.limits.max_connections} connections already; close idle ones, or run more routers"
            self._refuse("connections", TooManyConnections(text))
            return
        self._await((0, False))

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends no more: it hung up, or closed its half behind its last request (RFC 9112, 9.6) and still
        reads. True: there are answers to give, so our half stays open."""
        if self._in_message or not self._answering:
            return False
        self.cycle.keep_alive = False
        if self._reader_look is None:
            self._gone = poller(self.transport, 0)
            self._look_for_reader()
        return True

    def _look_for_reader(self) -> None:
        """Whether somebody reads the answers: the kernel knows once something was sent to nobody."""
        assert self._gone is not None
        if self.transport.is_closing():
            return
        if self._gone.poll(0):
            self.transport.abort()
            return
        self.probe_reader()
        self._reader_look = self.loop.call_later(READER_LOOK_S, self._look_for_reader)

    def probe_reader(self) -> None:
        """Sends something that a client has to expect, once, where its answer is not begun."""

    def connection_lost(self, exc: Exception | None) -> None:
        self._await(None)
        self._stop_send_deadline()
        if self._reader_look is not None:
            self._reader_look.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            # It had its last answer.
            return
        before = self._messages
        self._fruitless_bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._fruitless_bytes > self.limits.max_head_bytes:
            self._refuse_head()
        elif self._in_message or self._messages == before:
            self._await((self._messages, self._in_body))
        else:
            self._await(None)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes = self._fruitless_bytes = self._fields = 0
        self._in_message, self._in_body = True, False

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count_head(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_body:
            super().on_header(name, value)
        # Trailers come here too, and are nobody's headers (RFC 9110, 6.5.1).
        self._fields += 1
        self._count_head(len(name) + len(value) + HEADER_LINE_BYTES)

    def on_headers_complete(self) -> None:
        self.begin_body()
        super().on_headers_complete()
        if self.is_last_message:
            self.cycle.keep_alive = False

    @property
    def is_last_message(self) -> bool:
        """Whether nothing is taken behind this one: the server stops, or what follows is another protocol's to the
        parser."""
        return self._stops or self.outer.shutdown.begun or self.parser.should_upgrade()

    def shutdown(self) -> None:
        """The server stops. What was asked is answered, also what is just coming; then the connection ends."""
        self._stops = True
        if self._answering:
            self.cycle.keep_alive = False
        elif not self._in_message:
            self.loop.call_later(LAST_REQUEST_S, self._close_idle)

    def _close_idle(self) -> None:
        if self.transport.is_closing() or self._answering or self._in_message:
            return
        if poller(self.transport, select.POLLIN).poll(0):
            # A request, or the client's own end; the loop comes to it.
            self.loop.call_later(LAST_REQUEST_S, self._close_idle)
        else:
            self.transport.close()

    def check_head(self) -> None:
        """Before anything is made of a head. Raises HttpParserError, behind an answer that says what is wrong."""
        parser = self.parser
        version: str = parser.get_http_version()
        problem = head_problem(parser.get_method(), version, self.headers)
        if problem is None:
            try:
                self.url = origin_form(self.url)
            except BadQuestion as error:
                problem = error
        if problem is None and parser.should_upgrade() and self._announces_body():
            # The parser takes the body for the other protocol.
            problem = BadQuestion(NO_UPGRADE, code="upgrade_not_supported")
        if version != "1.1":
            # Its clients know no interim answers.
            self.expect_100_continue = False
        if problem is not None:
            self._refuse("invalid", problem)
            # Nothing else stops the parser in the middle of what it was fed.
            raise httptools.HttpParserError("the head is refused")

    def _announces_body(self) -> bool:
        return any(
            name == b"transfer-encoding" or (name == b"content-length" and value != b"0")
            for name, value in self.headers
        )

    def on_body(self, body: bytes) -> None:
        self.got_on()
        super().on_body(body)

    def on_message_complete(self) -> None:
        self.end_message()
        super().on_message_complete()

    def begin_body(self) -> None:
        """The head is whole. For who takes a callback over, as the next two."""
        self._in_body = True
        self._fruitless_bytes = 0

    def got_on(self) -> None:
        """A piece of the body came."""
        self._fruitless_bytes = 0

    def end_message(self) -> None:
        """The body is whole."""
        self._in_message = self._in_body = False
        self._fruitless_bytes = 0
        self._messages += 1

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.flow.write_paused:
            # Who does not read answers gets no further questions in.
            self.flow.pause_reading()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.flow.pause_reading()
        if self._send_deadline is None:
            self._await_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_send_deadline()
        if not self.transport.is_closing():
            self.flow.resume_reading()

    def send_400_response(self, msg: str) -> None:
        if not self.transport.is_closing():
            error = BadQuestion("what was sent is no HTTP request; speak HTTP/1.1 to this port", code="invalid_http")
            self._refuse("invalid", error)

    def write_answer(self, answer: Answer, *, keep_alive: bool) -> None:
        """Sends a whole answer; without keep_alive it is the last one."""
        status, headers, content = answer
        parts = [STATUS_LINES[HTTPStatus(status)]]
        for name, value in (*self.server_state.default_headers, *headers):
            parts += (name, b": ", value, b"\r\n")
        if not keep_alive and (b"connection", b"close") not in headers:
            parts.append(b"connection: close\r\n")
        parts += (b"\r\n", content)
        if not self.transport.is_closing():
            self.transport.write(b"".join(parts))
            if not keep_alive:
                self.transport.close()

    def _count_head(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > self.limits.max_head_bytes or self._fields > self.limits.max_headers:
            self._refuse_head()
            # Nothing else stops the parser in the middle of what it was fed.
            raise httptools.HttpParserError("the head is over the limit")

    def _refuse_head(self) -> None:
        limits = self.limits
        text = f"the head is over {limits.max_head_bytes} bytes or {limits.max_headers} headers; send fewer and shorter ones"
        self._refuse("head_size", HeadTooLarge(text))

    def _await(self, awaited: tuple[int, bool] | None) -> None:
        """Sets the deadline for what is awaited now, unless it is set; None: for nothing."""
        if awaited == self._awaited:
            return
        self._awaited = awaited
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if awaited is not None:
            limits = self.limits
            timeout_s = limits.body_timeout_s if self._in_body else limits.head_timeout_s
            self._deadline = self.loop.call_later(timeout_s, self._on_late)

    def _on_late(self) -> None:
        self._deadline = None
        if self.transport.is_closing():
            return
        if not self._in_body and self._answering:
            # A slow head behind a request that is still being answered: that answer is the last one.
            self.cycle.keep_alive = False
            return
        limits = self.limits
        if self._in_body:
            text = f"the body did not come in {limits.body_timeout_s:g} s; send it at once, or less of it"
            self._refuse("body_time", TooSlow(text))
        elif self._in_message:
            self._refuse("head_time", TooSlow(f"the head did not come in {limits.head_timeout_s:g} s; send it at once"))
        else:
            # Nothing was asked, so nobody reads an answer.
            self.outer.count_cut("head_time")
            self.transport.close()

    def _await_reading(self) -> None:
        self._unread_bytes = untaken_bytes(self.transport)
        self._send_deadline = self.loop.call_later(self.limits.send_timeout_s, self._on_unread)

    def _on_unread(self) -> None:
        self._send_deadline = None
        if untaken_bytes(self.transport) < self._unread_bytes:
            # Slow, and reading: a proxied answer may be large.
            self._await_reading()
            return
        self.outer.count_cut("send_time")
        # Not close, which waits until everything was sent.
        self.transport.abort()

    def _stop_send_deadline(self) -> None:
        if self._send_deadline is not None:
            self._send_deadline.cancel()
            self._send_deadline = None

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _refuse(self, reason: str, error: RouterError) -> None:
        """Ends the connection, with `error` as its last answer unless another one is under way or was given already."""
        self.outer.count_cut(reason)
        # While a head comes, an answer under way is the one before; while a body comes, it is this one's.
        next_in_line = self._answering == self._in_body and not self.pipeline
        if next_in_line and not (self._answering and getattr(self.cycle, "response_started", False)):
            self.write_answer(self.outer.error_answer(error, OTHER_PATH, ""), keep_alive=False)
        else:
            self.transport.close()
