# SPDX-License-Identifier: Apache-2.0
"""One HTTP request, with the checks of its head that the parser leaves open (RFC 9112; RFC 9110)."""

from __future__ import annotations

from typing import Self
from urllib.parse import unquote

import httptools

from kvrouter.router.base.common.errors import BadQuestion, NotSupported, RouterError, WrongVersion
from kvrouter.router.serve.access.browser_policy import HOST, SAFE_METHODS
from kvrouter.router.serve.access.key_bounds import KeyBounds
from kvrouter.router.serve.api.http.plain_head import PlainHead
from kvrouter.router.serve.proxy import headers as h
from kvrouter.router.serve.proxy.headers import Headers

VERSIONS = frozenset({"1.0", "1.1"})
# Headers that may come only once. Each one decides about access, the type of a body, or the target of a request, so
# with two of them the meaning would depend on whether a reader takes the first or the last. Host has an error of its
# own; the parser refuses two lengths and two transfer codings.
SINGLE = frozenset(
    {
        b"authorization",
        b"content-type",
        b"expect",
        b"last-event-id",
        b"origin",
        b"sec-fetch-site",
        h.DP_RANK,
        h.PIN,
        h.REQUEST_ID,
        h.SESSION_ID,
    }
)
SCHEMES = frozenset({b"http", b"https"})
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
NO_UPGRADE = "this server speaks HTTP/1.1 only; send no Upgrade header (in Java: HttpClient.Version.HTTP_1_1)"


class HttpRequest:
    """A request and the progress of its answer."""

    __slots__ = (
        "accept",
        "answer_begun",
        "answer_ended",
        "authorization",
        "body",
        "bounds",
        "content_length",
        "content_type",
        "encoding",
        "expects_continue",
        "fetch_site",
        "headers",
        "host",
        "is_whole",
        "keep_alive",
        "method",
        "origin",
        "path",
        "refusal",
        "speaks_1_1",
        "url",
    )

    def __init__(
        self, method: bytes, version: str, target: bytes, headers: Headers, *, keep_alive: bool, upgrades: bool
    ) -> None:
        """Check the head of a request.

        Raises RouterError if a request with this head is refused whatever its path.

        Args:
            method: The method.
            version: The version of HTTP, such as 1.1.
            target: The target exactly as the client sent it.
            headers: The headers, with names in lower case.
            keep_alive: Whether the head lets the connection stay open.
            upgrades: Whether the parser takes the following bytes for another protocol.
        """
        if version not in VERSIONS:
            raise WrongVersion("this server speaks HTTP/1.1 and HTTP/1.0 only; send one of these")
        if method == b"CONNECT":
            raise NotSupported(
                "this is no forward proxy: CONNECT is not supported; send requests for this router's paths"
            )
        self.speaks_1_1 = version == "1.1"
        self.accept = self.authorization = self.content_type = ""
        # The headers Origin and Sec-Fetch-Site, empty if absent.
        self.origin = self.fetch_site = b""
        self.content_length: bytes | None = None
        # The values of Content-Encoding; empty if there are none, or once the body is decoded.
        self.encoding = b""
        self.expects_continue = False
        host = None
        chunked = False
        seen: set[bytes] = set()
        for name, value in headers:
            if name in SINGLE:
                if name in seen:
                    shown = name.decode("ascii")
                    raise BadQuestion(f"there is more than one {shown} header; send one", code="repeated_header")
                seen.add(name)
            if name == b"content-type":
                self.content_type = value.decode("latin-1")
            elif name == b"accept":
                self.accept = value.decode("latin-1")
            elif name == b"content-length":
                self.content_length = value
            elif name == h.CONTENT_ENCODING:
                self.encoding = b"%b, %b" % (self.encoding, value) if self.encoding else value
            elif name == b"authorization":
                self.authorization = value.decode("latin-1")
            elif name == b"host":
                if host is not None:
                    raise BadQuestion("there is more than one Host header; send one", code="invalid_host")
                host = value
            elif name == b"origin":
                self.origin = value
            elif name == b"sec-fetch-site":
                self.fetch_site = value
            elif name == b"expect":
                # Clients of HTTP/1.0 do not know interim answers.
                self.expects_continue = self.speaks_1_1 and value.lower() == b"100-continue"
            elif name == b"transfer-encoding":
                if value.lower() != b"chunked":
                    raise NotSupported(
                        "the only transfer coding supported is chunked; send the body without another one"
                    )
                chunked = True
        if host is None:
            # HTTP/1.0 has no Host header.
            if self.speaks_1_1:
                raise BadQuestion("there is no Host header; send one", code="invalid_host")
        elif HOST.match(host) is None:
            raise BadQuestion("the Host header is no host with an optional port; send one", code="invalid_host")
        if upgrades and (chunked or self.content_length not in (None, b"0")):
            # The parser would take the body for bytes of the other protocol.
            raise BadQuestion(NO_UPGRADE, code="upgrade_not_supported")
        self.method = method.decode("ascii")
        if self.method in SAFE_METHODS:
            # Nobody reads the body of such a request.
            self.encoding = b""
        self.headers = headers
        # The target in origin form, with its query.
        self.url, authority = split_target(target)
        # RFC 9112, 3.2.2: the host in the target overrides the Host header. It is empty if both are absent, or if the
        # fast path has already judged it.
        self.host = host or b"" if authority is None else authority
        # The target without its query, escapes resolved.
        self.path = _path_of(self.url)
        self.keep_alive = keep_alive and self.speaks_1_1 and not upgrades
        self.body: bytes | bytearray = bytearray()
        # The error with which the request is answered, whatever its body contains.
        self.refusal: RouterError | None = None
        # The models and salts that the request's key may name; None means any.
        self.bounds: KeyBounds | None = None
        self.is_whole = self.answer_begun = self.answer_ended = False

    @classmethod
    def plain(cls, head: PlainHead) -> Self:
        """Return a complete request with a plain head. It has no headers unless they go on to an engine."""
        self = cls.__new__(cls)
        self.method, self.speaks_1_1, self.keep_alive = head.method, True, True
        self.path, self.url = head.path, head.path.encode()
        self.content_type, self.accept, self.authorization = head.content_type, head.accept, head.authorization
        self.headers, self.content_length, self.refusal = head.headers or [], None, None
        self.host = self.origin = self.fetch_site = self.encoding = b""
        self.bounds = None
        self.body = bytearray()
        self.is_whole = True
        self.expects_continue = self.answer_begun = self.answer_ended = False
        return self


def split_target(target: bytes) -> tuple[bytes, bytes | None]:
    """Return a request's target as path and query, and the host that it names, or None if it names none.

    `http://router/v1/models?x` becomes `/v1/models?x` and `router`. A target without a path is returned unchanged.
    Raises BadQuestion if the target is neither a path nor an http URL.
    """
    if target.startswith(b"/") or target == b"*":
        return target, None
    try:
        parts = httptools.parse_url(target)
    except httptools.HttpParserError:
        parts = None
    if parts is None or parts.schema is None or parts.schema.lower() not in SCHEMES:
        raise BadQuestion("the target is no path and no http URL; send a path like /v1/models", code="invalid_path")
    path = parts.path or b"/"
    # An IPv6 address comes without its brackets.
    host = b"[%b]" % parts.host if b":" in parts.host else parts.host
    authority = host if parts.port is None else b"%b:%d" % (host, parts.port)
    return path if parts.query is None else path + b"?" + parts.query, authority


def _path_of(url: bytes) -> str:
    """Return the path of a target, with escapes resolved. Raises BadQuestion if it is not ASCII."""
    try:
        path = url.partition(b"?")[0].decode("ascii")
    except UnicodeDecodeError:
        raise BadQuestion("the path has bytes outside ASCII; escape them", code="invalid_path") from None
    return unquote(path) if "%" in path else path
