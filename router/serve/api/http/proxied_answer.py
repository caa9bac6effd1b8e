# SPDX-License-Identifier: Apache-2.0
"""An answer that comes in pieces on its client's connection: the client's side of `router.proxy`, and of `/events`.

Bytes go from the engine's socket to the client's in one callback, without a task or an event for each piece."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Protocol

from kvrouter.router.base.common.errors import RouterError
from kvrouter.router.model.upstream.connection import NO_CONTENT, AnswerHead
from kvrouter.router.serve.api.http.http_api import Answer, HttpApi
from kvrouter.router.serve.api.http.request import CONTINUE, HttpRequest
from kvrouter.router.serve.proxy.downstream import Source
from kvrouter.router.serve.proxy.headers import Headers

LAST_CHUNK = b"0\r\n\r\n"

# Checks in a row for which a started answer may stand still if the client closed its sending half: with nothing to
# send, only time distinguishes a client that still reads from one that hung up. Tokens come several times a second; an
# engine that pauses for 5 s is stalled.
STILL_LOOKS = 50


class ClientConnection(Protocol):
    """What the answer uses of its connection."""

    @property
    def is_write_paused(self) -> bool: ...

    @property
    def date_headers(self) -> list[tuple[bytes, bytes]]: ...

    @property
    def unread_bytes(self) -> int: ...

    def write(self, parts: list[bytes]) -> None: ...

    def write_answer(self, request: HttpRequest, answer: Answer) -> None: ...

    def end(self, request: HttpRequest) -> None: ...

    def abort(self) -> None: ...


class ProxiedAnswer:
    """Satisfies `router.proxy.downstream.Client`; made in the task that forwards the request."""

    def __init__(self, connection: ClientConnection, request: HttpRequest, api: HttpApi) -> None:
        self._connection = connection
        self._request = request
        self._api = api
        self.path = request.path
        self.url = request.url
        self.headers = request.headers
        self.bounds = request.bounds
        self.body = bytes(request.body)
        request.body = b""
        self._task = asyncio.current_task()
        self._source: Source | None = None
        # The part of the head that was not sent yet; it goes with the first bytes of the body.
        self._unsent: list[bytes] = []
        self._is_chunked = False
        self._is_probed = False
        # Looks in a row at a client that sends no more in which its answer stood still.
        self._still_looks = 0
        self.has_begun = False
        self.is_cancelled = False

    # The connection's side.

    def cancel(self) -> None:
        """The client hung up."""
        if not self._request.answer_ended and self._task is not None:
            self.is_cancelled = True
            self._task.cancel()

    def pause(self) -> None:
        """The client does not read."""
        if self._source is not None:
            self._source.pause()

    def resume(self) -> None:
        if self._source is not None:
            self._source.resume()

    def probe_reader(self) -> None:
        """To a client that sends no more, a word that every one of HTTP/1.1 skips: nobody who hung up takes it. Ends an
        answer that has begun and stands still."""
        if self.has_begun:
            self._still_looks += 1
            if self._still_looks > STILL_LOOKS:
                self._connection.abort()
        elif self._request.speaks_1_1 and not self._is_probed:
            self._is_probed = True
            self._connection.write([CONTINUE])

    # The side of who answers.

    @property
    def unread_bytes(self) -> int:
        return self._connection.unread_bytes

    def begin(self, head: AnswerHead, headers: Headers, source: Source) -> None:
        self._source = source
        self.has_begun = True
        self._api.count_answer(self.path, head.status)
        parts = [b"HTTP/1.1 %d " % head.status, head.reason or _phrase(head.status), b"\r\n"]
        has_date = False
        for name, value in (*headers, *self._api.cors.answer_headers(self.headers)):
            parts += (name, b": ", value, b"\r\n")
            has_date = has_date or name == b"date"
        # The engine's own Date, where it has one.
        if not has_date:
            for name, value in self._connection.date_headers:
                parts += (name, b": ", value, b"\r\n")
        if head.status in NO_CONTENT:
            # A length would announce a body.
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
        self._still_looks = 0
        out, self._unsent = self._unsent, []
        if self._is_chunked:
            out += (b"%x\r\n" % sum(map(len, parts)), *parts, b"\r\n")
        else:
            out += parts
        self._connection.write(out)

    def finish(self) -> None:
        out, self._unsent = self._unsent, []
        if self._is_chunked:
            out.append(LAST_CHUNK)
        if out:
            self._connection.write(out)
        self._end()

    def break_off(self) -> None:
        # Without the last chunk, or with fewer bytes than announced; what was sent before arrives.
        self._request.keep_alive = False
        self._end()

    def refuse(self, error: RouterError, headers: Headers) -> None:
        status, own, content = self._api.error_answer(error, self.path)
        self.has_begun = True
        self._connection.write_answer(self._request, (status, [*own, *headers], content))

    def _end(self) -> None:
        self._source = None
        self._connection.end(self._request)


def _phrase(status: int) -> bytes:
    try:
        return HTTPStatus(status).phrase.encode()
    except ValueError:
        return b""
