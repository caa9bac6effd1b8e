# SPDX-License-Identifier: Apache-2.0
"""From the bytes of one connection to its requests, by httptools; heads are bounded in bytes and headers.

httptools bounds nothing itself: it takes heads, chunk extensions and trailers of any size."""

from __future__ import annotations

from typing import Protocol

import httptools

from kvrouter.router.base.common.errors import BadQuestion, HeadTooLarge
from kvrouter.router.serve.api.http.request import HttpRequest

# A name, a colon, a space and a line's end.
HEADER_LINE_BYTES = 4


class RequestSink(Protocol):
    """Takes what the parser finds, in order. What it raises leaves `RequestParser.feed`."""

    def on_request(self, request: HttpRequest) -> None:
        """A head is whole."""

    def on_body(self, piece: bytes) -> None: ...

    def on_whole(self) -> None:
        """The body of the last request is whole."""


class RequestParser:
    """The parser of one connection. `in_message` from the first byte of a request to its last, `in_body` from the end
    of its head; `messages`: requests that are whole."""

    def __init__(self, sink: RequestSink, max_head_bytes: int, max_headers: int) -> None:
        self._sink = sink
        self._max_head_bytes = max_head_bytes
        self._max_headers = max_headers
        self._parser = httptools.HttpRequestParser(self)
        # What follows a request with `Connection: close` is no error of that request's.
        self._parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self.in_message = self.in_body = False
        self.messages = 0
        self._target = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._head_bytes = 0
        # Headers and trailers of the message that comes.
        self._fields = 0
        # Bytes fed since the parser last advanced: a head, chunk extensions or trailers without an end.
        self._fruitless_bytes = 0

    def feed(self, data: bytes) -> None:
        """Takes the next bytes. Raises RouterError where they are refused; nothing may be fed after that."""
        self._fruitless_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            # That request was the last of this connection.
            pass
        except httptools.HttpParserCallbackError as error:
            raise error.__context__ or error from None
        except httptools.HttpParserError:
            text = "these bytes are no HTTP request; speak HTTP/1.1 to this port"
            raise BadQuestion(text, code="invalid_http") from None
        if self._fruitless_bytes > self._max_head_bytes:
            raise self._head_too_large()

    def on_message_begin(self) -> None:
        self._target, self._headers = b"", []
        self._head_bytes = self._fruitless_bytes = self._fields = 0
        self.in_message, self.in_body = True, False

    def on_url(self, url: bytes) -> None:
        self._target += url
        self._count_head(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._fields += 1
        self._count_head(len(name) + len(value) + HEADER_LINE_BYTES)
        # Trailers come here too, and are not headers (RFC 9110, 6.5.1).
        if not self.in_body:
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        parser = self._parser
        request = HttpRequest(
            parser.get_method(),
            parser.get_http_version(),
            self._target,
            self._headers,
            keep_alive=parser.should_keep_alive(),
            upgrades=parser.should_upgrade(),
        )
        self.in_body = True
        self._fruitless_bytes = 0
        self._sink.on_request(request)

    def on_body(self, piece: bytes) -> None:
        self._fruitless_bytes = 0
        self._sink.on_body(piece)

    def on_message_complete(self) -> None:
        self.in_message = self.in_body = False
        self._fruitless_bytes = 0
        self.messages += 1
        self._sink.on_whole()

    def _count_head(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > self._max_head_bytes or self._fields > self._max_headers:
            raise self._head_too_large()

    def _head_too_large(self) -> HeadTooLarge:
        return HeadTooLarge(
            f"the head is over {self._max_head_bytes} bytes or {self._max_headers} headers; send fewer and shorter ones"
        )
