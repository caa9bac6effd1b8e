# SPDX-License-Identifier: Apache-2.0
"""One client's connection to the HTTP server: requests in, answers out in their order.

A complete request of a hot path is answered at once in one write, without a task; if its head is plain, also without
the general parser (`plain_head.py`). Cold paths and answers that wait have a task each; a proxied request continues in
the callbacks of its sockets (`proxied_answer.py`, `direct_task.py`). uvicorn's server accepts the connections, keeps
the Date header and ends the connections. Only its `ServerState` and `shutdown` are used, through its documented `http=`
option.
"""

from __future__ import annotations

import asyncio
import select
import ssl
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from uvicorn.server import ServerState

from kvrouter.router.base.common.direct_task import DirectTask
from kvrouter.router.base.common.errors import HeadTooLarge, RouterError, TooManyConnections, TooSlow
from kvrouter.router.base.common.sockets import poller
from kvrouter.router.route.tokens.proxied_paths import route_of
from kvrouter.router.serve.api.http.deadlines import Deadlines, HttpLimits
from kvrouter.router.serve.api.http.http_api import STATUS_LINES, Answer, Forwarder, HttpApi
from kvrouter.router.serve.api.http.plain_head import PlainHead, plain_head
from kvrouter.router.serve.api.http.proxied_answer import ProxiedAnswer
from kvrouter.router.serve.api.http.request import CONTINUE, HttpRequest
from kvrouter.router.serve.api.http.request_parser import RequestParser
from kvrouter.router.serve.api.http.tls import TlsHandshake

# How often to check that a client that sends no more still reads. A request that no client waits for takes an engine's
# time; a check is one system call.
READER_LOOK_S = 0.1

# The minimum seconds for which a stopping server keeps an idle connection, for a request that is on its way.
LAST_REQUEST_S = 0.5


class HttpConnection(asyncio.Protocol):
    """One connection, which answers requests in their order.

    A connection that exceeds a limit is closed, with an answer that gives the reason if the client waits for one.
    """

    _transport: asyncio.Transport
    _deadlines: Deadlines

    def __init__(self, api: HttpApi, limits: HttpLimits, server: ServerState) -> None:
        # Collaborators
        self._api = api
        self._limits = limits
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._parser = RequestParser(self, limits.max_head_bytes, limits.max_headers)
        # Requests

        # The requests without a complete answer, in order; the first one is being answered, or its body is awaited.
        self._queue: deque[HttpRequest] = deque()
        # The request whose body is arriving.
        self._incoming: HttpRequest | None = None
        self._proxied: ProxiedAnswer | None = None
        # Condition of the connection
        self._is_reading = True
        self._is_write_paused = False
        self._stops = False
        # Whether `_answer_next` is running.
        self._is_answering = False
        # The next check whether a client that closed its sending half still reads.
        self._reader_look: asyncio.TimerHandle | None = None

    # The transport's side.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take the transport, or refuse the connection if there are too many."""
        self._transport = transport
        self._deadlines = Deadlines(transport, self._loop, self._limits, self._on_late, self._on_unread)
        self._server.connections.add(self)  # type: ignore[arg-type]
        if len(self._server.connections) > self._limits.max_connections:
            text = f"the router has {self._limits.max_connections} connections already; close idle ones, or run more routers"
            self._refuse("connections", TooManyConnections(text))
        else:
            self._deadlines.expect(0, body=False)

    def data_received(self, data: bytes) -> None:
        """Parse the bytes, and answer the requests that are complete."""
        if self._transport.is_closing():
            # The client already has its last answer.
            return
        parser, deadlines = self._parser, self._deadlines
        deadlines.end_idling()
        if not (self._queue or parser.in_message or self._stops or self._api.shutdown.begun):
            api, limits = self._api, self._limits
            head = plain_head(
                data,
                api.plain_paths,
                api.forwarded_paths,
                api.plain_below,
                api.known_hosts,
                limits.max_head_bytes,
                limits.max_headers,
            )
            if head is not None and len(data) - head.body_start <= api.max_body_bytes:
                deadlines.expect_nothing()
                if self._take_plain(head, data):
                    return
        former_messages = parser.messages
        try:
            parser.feed(data)
        except RouterError as error:
            self._refuse("head_size" if isinstance(error, HeadTooLarge) else "invalid", error)
            return
        if parser.in_message or parser.messages == former_messages:
            deadlines.expect(parser.messages, body=parser.in_body)
        else:
            deadlines.expect_nothing()

    def eof_received(self) -> bool:
        """Handle the end of the client's bytes, and return whether to keep the router's half open for pending answers.

        The client hung up, or closed its sending half after its last request (RFC 9112, 9.6) and still reads.
        """
        if not self._transport.can_write_eof():
            # With TLS, asyncio ends both halves, so a client that closes one gives up its answers.
            self._transport.close()
            return False
        if self._parser.in_message or not self._queue:
            return False
        self._queue[-1].keep_alive = False
        if self._reader_look is None:
            self._look_for_reader(poller(self._transport, 0))
        return True

    def pause_writing(self) -> None:
        """Stop answering and reading, because the client does not read."""
        self._is_write_paused = True
        self._deadlines.await_reading()
        if self._proxied is not None:
            self._proxied.pause()
        self._regulate_reading()

    def resume_writing(self) -> None:
        """Continue, because the client reads again."""
        self._is_write_paused = False
        self._deadlines.end_reading()
        if self._proxied is not None:
            self._proxied.resume()
        self._answer_next()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel everything that belongs to the connection."""
        self._server.connections.discard(self)
        self._deadlines.cancel()
        if self._reader_look is not None:
            self._reader_look.cancel()
        if self._proxied is not None:
            self._proxied.cancel()
        self._queue.clear()

    # uvicorn's side.

    def shutdown(self) -> None:
        """Answer the requests that have arrived or are arriving, then close the connection, because the server stops.

        A client that was promised keep-alive with the head of an answer may send one more request.
        """
        self._stops = True
        if self._queue:
            is_promised = len(self._queue) == 1 and self._proxied is not None and self._proxied.has_begun
            self._queue[-1].keep_alive &= is_promised
        else:
            self._rest()

    # The parser's side.

    def on_request(self, request: HttpRequest) -> None:
        """Take a request whose head is complete, and refuse it early if possible."""
        request.path = self._api.paths.unversioned(request.path)
        if self._stops or self._api.shutdown.begun:
            request.keep_alive = False
        request.refusal = self._api.refusal(request)
        self._incoming = request
        self._queue.append(request)
        if request.refusal is not None or request.expects_continue or len(self._queue) > 1:
            self._answer_next()

    def on_body(self, piece: bytes) -> None:
        """Take a piece of the current request's body, up to the limit."""
        request = self._incoming
        assert request is not None
        if request.refusal is not None:
            return
        request.body += piece
        if len(request.body) > self._api.max_body_bytes:
            request.refusal = self._api.too_large()
            self._answer_next()

    def on_whole(self) -> None:
        """Answer the current request, whose body is complete."""
        request, self._incoming = self._incoming, None
        assert request is not None
        request.is_whole = True
        if request.answer_ended:
            # The request was refused before its body came.
            self._rest()
        else:
            self._answer_next()

    # The proxy's side.

    @property
    def is_write_paused(self) -> bool:
        """Whether the client does not read."""
        return self._is_write_paused

    @property
    def date_headers(self) -> list[tuple[bytes, bytes]]:
        """The headers of every answer, with the Date."""
        return self._server.default_headers

    @property
    def unread_bytes(self) -> int:
        """The number of bytes that were written but not yet accepted by the kernel."""
        return self._transport.get_write_buffer_size()

    def write(self, parts: list[bytes]) -> None:
        """Write bytes, unless the connection is closing."""
        transport = self._transport
        if not transport.is_closing():
            transport.write(parts[0] if len(parts) == 1 else b"".join(parts))

    def write_answer(self, request: HttpRequest, answer: Answer) -> None:
        """Write a whole answer and end the request."""
        status, headers, content = answer
        headers = [*headers, *self._api.cors.answer_headers(request.headers)]
        if (b"connection", b"close") in headers:
            request.keep_alive = False
        self._write_answer(status, headers, b"" if request.method == "HEAD" else content, request.keep_alive)
        self.end(request)

    def end(self, request: HttpRequest) -> None:
        """End the request, whose answer is written. Close the connection unless it is kept alive."""
        request.answer_ended = True
        if self._queue and self._queue[0] is request:
            self._queue.popleft()
        if not request.keep_alive:
            self._transport.close()
        else:
            self._rest()

    def abort(self) -> None:
        """Close the connection at once, without sending the rest."""
        self._transport.abort()

    # Answers.

    def _answer_next(self) -> None:
        """Answer requests in their order, as long as one can be answered now. A client that does not read waits."""
        queue = self._queue
        if self._is_answering:
            # The caller's answer has left the queue; the loop in the outer call continues.
            return
        self._is_answering = True
        try:
            while queue and not self._is_write_paused and not self._transport.is_closing():
                request = queue[0]
                if request.answer_begun:
                    break
                if request.refusal is not None:
                    request.answer_begun = True
                    self.write_answer(request, self._api.refuse(request, request.refusal))
                    continue
                if not request.is_whole:
                    if request.expects_continue:
                        request.expects_continue = False
                        self._transport.write(CONTINUE)
                    break
                request.answer_begun = True
                if request.encoding:
                    self._run(self._decode(request))
                    break
                if (forward := self._api.forwarder(request)) is not None:
                    task = DirectTask(self._forward(request, forward), self._loop, self._on_forwarded)
                    self._server.tasks.add(task)  # type: ignore[arg-type]
                    task.resume()
                    continue
                answer = self._api.respond(request)
                if not isinstance(answer, tuple):
                    self._run(self._answer_later(request, answer))
                    break
                self.write_answer(request, answer)
        finally:
            self._is_answering = False
        self._regulate_reading()

    def _take_plain(self, head: PlainHead, data: bytes) -> bool:
        """Answer the only request there is, and return True, or return False if it must take the general path.

        Writing is not paused here, because the connection does not read while it is.
        """
        if head.headers is None:
            return self._answer_plain(head, data)
        request = HttpRequest.plain(head)
        request.refusal = self._api.refusal(request)
        request.body = data[head.body_start :]
        self._queue.append(request)
        self._answer_next()
        return True

    def _answer_plain(self, head: PlainHead, data: bytes) -> bool:
        """Answer a hot request, without a task if none is needed. Return False as `_take_plain` does."""
        answer = self._api.respond_plain(head, data)
        if answer is None:
            return False
        if isinstance(answer, bytes):
            self._transport.write(
                b"%b%d\r\n\r\n%b" % (self._api.json_head(self._server.default_headers), len(answer), answer)
            )
            self._deadlines.begin_idling()
        elif isinstance(answer, tuple):
            self._write_answer(*answer, keep_alive=True)
            self._deadlines.begin_idling()
        else:
            request = HttpRequest.plain(head)
            request.answer_begun = True
            self._queue.append(request)
            self._run(self._answer_later(request, answer))
        return True

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        """Run the work in a task that belongs to the server."""
        # uvicorn waits for these tasks when it stops.
        task = self._loop.create_task(work)
        self._server.tasks.add(task)
        task.add_done_callback(self._server.tasks.discard)

    async def _decode(self, request: HttpRequest) -> None:
        """Decode the body of the next request, and continue with the request."""
        try:
            await self._api.decode(request)
        except RouterError as error:
            request.refusal = error
        except Exception:
            request.keep_alive = False
            self.write_answer(request, self._api.bug_answer(request.path, request.accept))
            return
        request.answer_begun = False
        self._answer_next()

    async def _answer_later(self, request: HttpRequest, answer: Coroutine[Any, Any, Answer]) -> None:
        """Await the answer, write it, and continue with the next request."""
        self.write_answer(request, await answer)
        self._answer_next()

    async def _forward(self, request: HttpRequest, forward: Forwarder) -> None:
        """Have the request answered piece by piece."""
        answer = self._proxied = ProxiedAnswer(self, request, self._api)
        try:
            await forward(answer)
        except asyncio.CancelledError:
            self._transport.close()
            if not answer.is_cancelled:
                # The server ended the task, not the client.
                raise
        except Exception:
            bug = self._api.bug_answer(route_of(request.path), "")
            request.keep_alive = False
            if answer.has_begun:
                self._transport.close()
            else:
                self.write_answer(request, bug)
        finally:
            if self._proxied is answer:
                self._proxied = None

    def _on_forwarded(self, task: DirectTask) -> None:
        self._server.tasks.discard(task)
        self._answer_next()

    def _write_answer(self, status: int, headers: list[tuple[bytes, bytes]], content: bytes, keep_alive: bool) -> None:
        """Write an answer, with the headers of every answer."""
        parts = [STATUS_LINES[status]]
        for name, value in (*self._server.default_headers, *headers):
            parts += (name, b": ", value, b"\r\n")
        if not keep_alive and (b"connection", b"close") not in headers:
            parts.append(b"connection: close\r\n")
        parts += (b"\r\n", content)
        self.write(parts)

    def _refuse(self, reason: str, error: RouterError) -> None:
        """Close the connection, with `error` as its last answer unless another one is under way or already sent."""
        self._api.count_cut(reason)
        queue = self._queue
        # While a head arrives, an answer under way belongs to the request before; while a body arrives, it belongs to
        # this one.
        if len(queue) == self._parser.in_body and not (queue and queue[0].answer_begun):
            status, headers, content = self._api.error_answer(error)
            if self._incoming is not None:
                headers = [*headers, *self._api.cors.answer_headers(self._incoming.headers)]
            self._write_answer(status, headers, content, keep_alive=False)
        self._transport.close()

    # Time and flow.

    def _regulate_reading(self) -> None:
        """Read unless a request waits behind another one, or the client does not read its answers."""
        reads = not self._is_write_paused and len(self._queue) < 2
        if reads == self._is_reading or self._transport.is_closing():
            return
        self._is_reading = reads
        if reads:
            self._deadlines.restart()
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()

    def _rest(self) -> None:
        """Begin idling unless a request is pending or arriving.

        If the server stops, keep the connection only as long as a client may be about to send a request.
        """
        if self._queue or self._parser.in_message:
            return
        if self._stops:
            kept_s = max(LAST_REQUEST_S, self._limits.next_request_s - self._deadlines.idle_s)
            self._loop.call_later(kept_s, self._close_idle)
        else:
            self._deadlines.begin_idling()

    def _on_late(self) -> None:
        """End the connection because the expected head or body did not come in time."""
        if self._transport.is_closing():
            return
        limits, parser = self._limits, self._parser
        if not self._is_reading:
            # The client waits for the router, which does not read now.
            self._deadlines.restart()
        elif parser.in_body:
            text = f"the body did not come in {limits.body_timeout_s:g} s; send it at once, or less of it"
            self._refuse("body_time", TooSlow(text))
        elif self._queue:
            # The head is slow, but a request before it is still being answered: that answer becomes the last one.
            self._queue[-1].keep_alive = False
        elif parser.in_message:
            self._refuse("head_time", TooSlow(f"the head did not come in {limits.head_timeout_s:g} s; send it at once"))
        else:
            # There was no request, so the client does not wait for an answer.
            self._api.count_cut("head_time")
            self._transport.close()

    def _on_unread(self) -> None:
        """Abort the connection because the client does not read its answers."""
        self._api.count_cut("send_time")
        # `close` would wait until everything was sent.
        self._transport.abort()

    def _look_for_reader(self, gone: select.poll) -> None:
        """Abort the connection if the client no longer reads. The kernel learns this once it has sent bytes."""
        if self._transport.is_closing():
            return
        if gone.poll(0):
            self._transport.abort()
            return
        if self._proxied is not None:
            self._proxied.probe_reader()
        self._reader_look = self._loop.call_later(READER_LOOK_S, self._look_for_reader, gone)

    def _close_idle(self) -> None:
        """Close an idle connection of a stopping server, unless bytes are waiting to be read."""
        if self._transport.is_closing() or self._queue or self._parser.in_message:
            return
        if poller(self._transport, select.POLLIN).poll(0):
            # A request has arrived, or the client's close; the loop will handle it.
            self._loop.call_later(LAST_REQUEST_S, self._close_idle)
        else:
            self._transport.close()


def connection_factory(
    api: HttpApi, limits: HttpLimits | None = None, tls: Callable[[], ssl.SSLContext | None] = lambda: None
) -> Callable[..., HttpConnection | TlsHandshake]:
    """Return the factory of connections that `uvicorn.Config(http=...)` takes.

    Args:
        api: The API behind the connections.
        limits: The limits of a connection; None takes the defaults.
        tls: Returns the context for a new connection; None makes it a plain one.
    """
    limits = limits or HttpLimits()

    def connection(*, server_state: ServerState, **_: Any) -> HttpConnection | TlsHandshake:
        http_connection = HttpConnection(api, limits, server_state)
        context = tls()
        return (
            http_connection
            if context is None
            else TlsHandshake(http_connection, context, limits, server_state, api.count_cut)
        )

    return connection
