# SPDX-License-Identifier: Apache-2.0
"""An answer that comes in pieces on its client's connection: the client's side of the proxy, and of `/events`.

Bytes go from the engine's socket to the client's in one callback, without a task or an event for each piece.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Protocol

from kvrouter.router.base.common.errors import RouterError
from kvrouter.router.model.upstream.connection import NO_CONTENT, AnswerHead
from kvrouter.router.route.tokens.proxied_paths import route_of
from kvrouter.router.serve.api.http.http_api import Answer, HttpApi
from kvrouter.router.serve.api.http.request import CONTINUE, HttpRequest
from kvrouter.router.serve.proxy.downstream import Source
from kvrouter.router.serve.proxy.headers import Headers

LAST_CHUNK = b"0\r\n\r\n"

# The number of consecutive checks for which a started answer may stand still if the client closed its sending half.
# With nothing to send, only time distinguishes a client that still reads from one that hung up. Tokens come several
# times a second; an engine that pauses for 5 s is stalled.
STILL_LOOKS = 50


class ClientConnection(Protocol):
    """The part of `HttpConnection` that the answer uses."""

    @property
    def is_write_paused(self) -> bool:
        """Whether the client does not read."""
        ...

    @property
    def date_headers(self) -> list[tuple[bytes, bytes]]:
        """The headers that every answer has, among them the current Date."""
        ...

    @property
    def unread_bytes(self) -> int:
        """The number of bytes that were written but not yet accepted by the kernel."""
        ...

    def write(self, parts: list[bytes]) -> None:
        """Write bytes, unless the connection is closing."""
        ...

    def write_answer(self, request: HttpRequest, answer: Answer) -> None:
        """Write a whole answer and end the request."""
        ...

    def end(self, request: HttpRequest) -> None:
        """End the request, whose answer is written."""
        ...

    def abort(self) -> None:
        """Close the connection at once, without sending the rest."""
        ...


class ProxiedAnswer:
    """The answer to one request: the `Client` of `downstream.py`.

    Create it in the task that forwards the request.
    """

    def __init__(self, connection: ClientConnection, request: HttpRequest, api: HttpApi) -> None:
        self._connection = connection
        self._request = request
        self._api = api
        self.method = request.method
        self.path = request.path
        self.url = request.url
        self.headers = request.headers
        self.bounds = request.bounds
        self.body = bytes(request.body)
        request.body = b""
        self._task = asyncio.current_task()
        self._source: Source | None = None
        # The part of the head that was not sent yet; it is sent with the first bytes of the body.
        self._unsent: list[bytes] = []
        self._is_chunked = False
        self._is_probed = False
        # The consecutive checks in which the answer stood still, for a client that sends no more.
        self._still_looks = 0
        self.has_begun = False
        self.is_cancelled = False

    # The connection's side.

    def cancel(self) -> None:
        """Cancel the task, because the client hung up."""
        if not self._request.answer_ended and self._task is not None:
            self.is_cancelled = True
            self._task.cancel()

    def pause(self) -> None:
        """Pause the source, because the client does not read."""
        if self._source is not None:
            self._source.pause()

    def resume(self) -> None:
        """Resume the source, because the client reads again."""
        if self._source is not None:
            self._source.resume()

    def probe_reader(self) -> None:
        """Check a client that sends no more, and end an answer that has begun and stands still.

        Before the answer has begun, the check sends an interim response, which every client of HTTP/1.1 skips; one that
        hung up does not take it.
        """
        if self.has_begun:
            self._still_looks += 1
            if self._still_looks > STILL_LOOKS:
                self._connection.abort()
        elif self._request.speaks_1_1 and not self._is_probed:
            self._is_probed = True
            self._connection.write([CONTINUE])

    # The handler's side.

    @property
    def unread_bytes(self) -> int:
        """The number of bytes that were sent but not yet accepted by the kernel."""
        return self._connection.unread_bytes

    def begin(self, head: AnswerHead, headers: Headers, source: Source) -> None:
        """Begin an answer with these headers. `source` is paused while the client does not read."""
        self._source = source
        self.has_begun = True
        self._api.count_answer(route_of(self.path), head.status)
        parts = [b"HTTP/1.1 %d " % head.status, head.reason or _phrase(head.status), b"\r\n"]
        has_date = False
        for name, value in (*headers, *self._api.cors.answer_headers(self.headers)):
            parts += (name, b": ", value, b"\r\n")
            has_date = has_date or name == b"date"
        # The engine's own Date is kept if there is one.
        if not has_date:
            for name, value in self._connection.date_headers:
                parts += (name, b": ", value, b"\r\n")
        if head.status in NO_CONTENT:
            # A length would announce a body, which answers with these statuses do not have.
            pass
        elif head.length is not None:
            parts.append(b"content-length: %d\r\n" % head.length)
        elif self._request.speaks_1_1:
            self._is_chunked = True
            parts.append(b"transfer-encoding: chunked\r\n")
        else:
            self._request.keep_alive = False
        if not self._request.keep_alive:
            parts.append(b"connection: close\r\n")
        parts.append(b"\r\n")
        self._unsent = parts
        if self._connection.is_write_paused:
            source.pause()

    def send(self, parts: list[bytes]) -> None:
        """Send the next bytes of the body. Never waits."""
        self._still_looks = 0
        if self._is_chunked:
            body = parts[0] if len(parts) == 1 else b"".join(parts)
            parts = [b"%x\r\n%b\r\n" % (len(body), body)]
        if self._unsent:
            parts, self._unsent = [*self._unsent, *parts], []
        self._connection.write(parts)

    def finish(self) -> None:
        """End the body, which is complete."""
        out, self._unsent = self._unsent, []
        if self._is_chunked:
            out.append(LAST_CHUNK)
        if out:
            self._connection.write(out)
        self._end()

    def break_off(self) -> None:
        """End the answer early, so that the client sees that the body is incomplete."""
        # The last chunk is missing, or the bytes are fewer than announced. All bytes that were sent before still
        # arrive.
        self._request.keep_alive = False
        self._end()

    def refuse(self, error: RouterError, headers: Headers) -> None:
        """Send the router's own error in place of an engine's answer."""
        status, own, content = self._api.error_answer(error, route_of(self.path))
        self.has_begun = True
        self._connection.write_answer(self._request, (status, [*own, *headers], content))

    def _end(self) -> None:
        self._source = None
        self._connection.end(self._request)


def _phrase(status: int) -> bytes:
    """Return the standard phrase of a status, or an empty one."""
    try:
        return HTTPStatus(status).phrase.encode()
    except ValueError:
        return b""
