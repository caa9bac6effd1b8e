# SPDX-License-Identifier: Apache-2.0
"""The general parser of a connection's bytes into requests, by httptools.

httptools has no bounds of its own: it accepts heads, chunk extensions and trailers of any size. This module bounds
heads in bytes and in headers.
"""

from __future__ import annotations

from typing import Protocol

import httptools

from kvrouter.router.base.common.errors import BadQuestion, HeadTooLarge
from kvrouter.router.serve.api.http.request import HttpRequest

# A header line has a colon, a space and a line end of two bytes besides name and value.
HEADER_LINE_BYTES = 4


class RequestSink(Protocol):
    """The receiver of the parser's results, in order. Its errors are raised by `RequestParser.feed`."""

    def on_request(self, request: HttpRequest) -> None:
        """Take a request whose head is complete."""

    def on_body(self, piece: bytes) -> None:
        """Take the next bytes of the body."""
        ...

    def on_whole(self) -> None:
        """Note that the body of the last request is complete."""


class RequestParser:
    """The parser of one connection."""

    def __init__(self, sink: RequestSink, max_head_bytes: int, max_headers: int) -> None:
        self._sink = sink
        self._max_head_bytes = max_head_bytes
        self._max_headers = max_headers
        self._parser = httptools.HttpRequestParser(self)
        # The bytes after a request with `Connection: close` are no error of that request.
        self._parser.set_dangerous_leniencies(lenient_data_after_close=True)
        # `in_message` is true from the first byte of a request to its last, `in_body` from the end of its head.
        self.in_message = self.in_body = False
        # The number of complete requests.
        self.messages = 0
        self._target = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._head_bytes = 0
        # The number of headers and trailers of the current message.
        self._fields = 0
        # The bytes fed since the parser last advanced; they may be a head, chunk extensions or trailers without an end.
        self._fruitless_bytes = 0

    def feed(self, data: bytes) -> None:
        """Parse the next bytes. Raises RouterError if they are refused; nothing may be fed after that."""
        self._fruitless_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            # The request that asks for an upgrade is the last of this connection.
            pass
        except httptools.HttpParserCallbackError as error:
            raise error.__context__ or error from None
        except httptools.HttpParserError:
            text = "these bytes are no HTTP request; speak HTTP/1.1 to this port"
            raise BadQuestion(text, code="invalid_http") from None
        if self._fruitless_bytes > self._max_head_bytes:
            raise self._head_too_large()

    def on_message_begin(self) -> None:
        """Begin a request. httptools calls this method and those below."""
        self._target, self._headers = b"", []
        self._head_bytes = self._fruitless_bytes = self._fields = 0
        self.in_message, self.in_body = True, False

    def on_url(self, url: bytes) -> None:
        """Take a piece of the target."""
        self._target += url
        self._count_head(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header or a trailer."""
        self._fields += 1
        self._count_head(len(name) + len(value) + HEADER_LINE_BYTES)
        # Trailers come here too, and are not headers (RFC 9110, 6.5.1).
        if not self.in_body:
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Pass the request on, now that its head is complete."""
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
        """Pass a piece of the body on."""
        self._fruitless_bytes = 0
        self._sink.on_body(piece)

    def on_message_complete(self) -> None:
        """Note that the request is complete."""
        self.in_message = self.in_body = False
        self._fruitless_bytes = 0
        self.messages += 1
        self._sink.on_whole()

    def _count_head(self, size: int) -> None:
        """Count bytes of the head. Raises HeadTooLarge if the head exceeds its bounds."""
        self._head_bytes += size
        if self._head_bytes > self._max_head_bytes or self._fields > self._max_headers:
            raise self._head_too_large()

    def _head_too_large(self) -> HeadTooLarge:
        return HeadTooLarge(
            f"the head is over {self._max_head_bytes} bytes or {self._max_headers} headers; send fewer and shorter ones"
        )
