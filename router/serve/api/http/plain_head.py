# SPDX-License-Identifier: Apache-2.0
"""A fast path past the general parser, for a request that arrives whole in one read and has a plain head.

Every other request is left to `request_parser.py`, which alone decides what is a request and what is refused. Such
requests have another method or version, a repeated header, a folded line, a bare line feed, a transfer or content
coding, a byte after the body, a Host that was not admitted before, or a content type other than `application/...`. If
the headers go on to an engine, any header name without a meaning here is accepted; otherwise, only names that clients
nearly always send. The general parser understands every accepted request in the same way, which
`tests/property/test_plain_head.py` checks. Compiled, see `setup.py`.
"""

from __future__ import annotations

from kvrouter.router.base.common.head_lines import digits, is_name, line_end, value_start

POST, DELETE = b"POST ", b"DELETE "
VERSION = b" HTTP/1.1\r\n"

# The headers that are accepted, each at most once. The first two are required, and the router does not use those after
# the fifth. Clients and the gateways between nearly always send these headers.
HOST, CONTENT_LENGTH, CONTENT_TYPE, ACCEPT, CONNECTION, IGNORED = range(6)
NAMES = (
    *(b"host", b"content-length", b"content-type", b"accept", b"connection"),
    *(b"user-agent", b"accept-encoding", b"accept-language", b"x-request-id", b"traceparent", b"tracestate"),
    *(b"x-forwarded-for", b"x-forwarded-proto", b"x-forwarded-host", b"forwarded", b"via"),
    *(b"x-session-id", b"x-kvrouter-worker", b"x-data-parallel-rank"),
)
KNOWN = {name: kind for kind, name in enumerate(NAMES)}
# Requests with a header that may decide how they are read are not accepted, wherever their headers go.
JUDGED_NAMES = frozenset(
    {
        b"transfer-encoding",
        b"content-encoding",
        b"expect",
        b"upgrade",
        b"http2-settings",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"keep-alive",
        # Headers that browsers send (`router/serve/access/browser_policy.py`).
        b"origin",
        b"sec-fetch-site",
    }
)
AUTHORIZATION = b"authorization"
_COLON = ord(":")
# This bit makes an ASCII letter lower case.
_LOWER = 0x20
_A = ord("a")
# Whether each byte may occur in a host's name.
_IN_HOST = bytes(c < 128 and (chr(c).isalnum() or chr(c) in ".-") for c in range(256))
# Whether each byte may occur in a target that is identical to its path: without escapes and without a query.
_IN_PATH = bytes(c < 128 and (chr(c).isalnum() or chr(c) in ".-_~/") for c in range(256))


class PlainHead:
    """The head of a plain request."""

    def __init__(
        self,
        method: str,
        path: str,
        content_type: str,
        accept: str,
        authorization: str,
        headers: list[tuple[bytes, bytes]] | None,
        body_start: int,
    ) -> None:
        self.method = method
        # The path as in `paths` and `forwarded`, or the target unchanged if it matches `below`.
        self.path = path
        # Each is "" if the header is absent.
        self.content_type = content_type
        self.accept = accept
        self.authorization = authorization
        # All headers, names in lower case; None if they do not go on to an engine.
        self.headers = headers
        # The index of the body in the bytes that were read.
        self.body_start = body_start


def is_host(data: bytes, start: int, end: int) -> bool:
    """Return whether the bytes are a name or an IPv4 address, with or without a port. Other hosts exist."""
    at = start
    while at < end and data[at] != _COLON:
        if not _IN_HOST[data[at]]:
            return False
        at += 1
    return at > start and (at == end or digits(data, at + 1, end) >= 0)


def is_path(target: bytes) -> bool:
    """Return whether the target is identical to its path, without escapes and without a query."""
    for at in range(len(target)):
        if not _IN_PATH[target[at]]:
            return False
    return True


def plain_head(
    data: bytes,
    paths: dict[bytes, str],
    forwarded: dict[bytes, str],
    below: tuple[bytes, ...],
    hosts: set[bytes] | None,
    max_head_bytes: int,
    max_headers: int,
) -> PlainHead | None:
    """Return the head of the request in `data`, or None if `data` is not exactly one plain request.

    Args:
        data: The bytes of one read.
        paths: Targets of POST that are accepted, and their paths.
        forwarded: Targets of POST whose headers go on to an engine, and their paths.
        below: Prefixes of other targets of POST and DELETE that are accepted.
        hosts: Values of Host that are accepted; None accepts all.
        max_head_bytes: The largest size of the head.
        max_headers: The largest number of headers.
    """
    is_post = data.startswith(POST)
    if not (is_post or (below and data.startswith(DELETE))):
        return None
    at = line_end(data, 0)
    if at < 0 or data[at - len(VERSION) + 2 : at + 2] != VERSION:
        return None
    target = data[len(POST) if is_post else len(DELETE) : at - len(VERSION) + 2]
    headers: list[tuple[bytes, bytes]] | None = None
    path = paths.get(target) if is_post else None
    if path is None and is_post:
        path = forwarded.get(target)
        if path is not None:
            headers = []
    if path is None:
        if not (below and target.startswith(below) and is_path(target)):
            return None
        path = target.decode("ascii")
    content_type = accept = authorization = ""
    # A DELETE usually has no body, and therefore no length.
    length = -1 if is_post else 0
    seen = 0
    left = max_headers
    start = at + 2
    while True:
        end = line_end(data, start)
        if end < 0 or end > max_head_bytes:
            return None
        if end == start:
            break
        colon = data.find(b":", start, end)
        if colon < 0:
            return None
        name = data[start:colon].lower()
        kind = KNOWN.get(name, -1)
        left -= 1
        if left < 0 or (kind < 0 and (headers is None or name in JUDGED_NAMES or not is_name(data, start, colon))):
            return None
        value = value_start(data, colon + 1, end)
        if value < 0:
            return None
        if headers is not None:
            headers.append((name, data[value:end]))
        if kind < 0:
            if name == AUTHORIZATION:
                if authorization:
                    return None
                authorization = data[value:end].decode("latin-1")
            start = end + 2
            continue
        if seen >> kind & 1:
            return None
        seen |= 1 << kind
        if kind >= IGNORED:
            pass
        elif kind == HOST:
            if not is_host(data, value, end) or (hosts is not None and data[value:end] not in hosts):
                return None
        elif kind == CONTENT_LENGTH:
            length = digits(data, value, end)
            if length < 0:
                return None
        elif kind == CONTENT_TYPE:
            # Leave forms and plain text, which a page of any origin may send, to the general parser.
            if data[value] | _LOWER != _A:
                return None
            content_type = data[value:end].decode("latin-1")
        elif kind == ACCEPT:
            accept = data[value:end].decode("latin-1")
        elif data[value:end].lower() != b"keep-alive":
            return None
        start = end + 2
    if not seen >> HOST & 1 or end + 2 + length != len(data) or length < 0:
        return None
    return PlainHead("POST" if is_post else "DELETE", path, content_type, accept, authorization, headers, end + 2)
