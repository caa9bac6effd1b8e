# SPDX-License-Identifier: Apache-2.0
"""What of a request's head is this server's to judge, where the parser leaves it open (RFC 9112; RFC 9110). Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

import httptools

from kvrouter.router.common.errors import BadQuestion, NotSupported, RouterError, WrongVersion

VERSIONS = frozenset({"1.0", "1.1"})
# uri-host [":" port]; empty where the target has no authority.
HOST = re.compile(rb"(\[[0-9A-Za-z:.%~_-]+\]|[0-9A-Za-z._~!$&'()*+,;=%-]*)(:[0-9]*)?\Z")
SCHEMES = frozenset({b"http", b"https"})


def head_problem(method: bytes, version: str, headers: Iterable[tuple[bytes, bytes]]) -> RouterError | None:
    """Why a request with this head is refused, whatever its path; None where it is not. headers: names in lower
    case."""
    if version not in VERSIONS:
        return WrongVersion("only HTTP/1.1 and HTTP/1.0 are spoken here; send one of these")
    if method == b"CONNECT":
        return NotSupported("this is no forward proxy: CONNECT is not done; send requests for this router's own paths")
    host = None
    for name, value in headers:
        if name == b"host":
            if host is not None:
                return BadQuestion("there is more than one Host header; send one", code="invalid_host")
            host = value
        elif name == b"transfer-encoding" and value.lower() != b"chunked":
            return NotSupported("of transfer codings only chunked is known here; send the body without another one")
    if host is None:
        # HTTP/1.0 knows none.
        return BadQuestion("there is no Host header; send one", code="invalid_host") if version == "1.1" else None
    if HOST.match(host) is None:
        return BadQuestion("the Host header is no host with an optional port; send one", code="invalid_host")
    return None


def origin_form(target: bytes) -> bytes:
    """A request's target as path and query: `http://router/v1/models?x` is `/v1/models?x`. What has neither stays as it
    is. Raises BadQuestion."""
    if target.startswith(b"/") or target == b"*":
        return target
    try:
        parts = httptools.parse_url(target)
    except httptools.HttpParserError:
        parts = None
    if parts is None or parts.schema is None or parts.schema.lower() not in SCHEMES:
        raise BadQuestion("the target is no path and no http URL; send a path like /v1/models", code="invalid_path")
    path = parts.path or b"/"
    return path if parts.query is None else path + b"?" + parts.query
