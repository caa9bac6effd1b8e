# SPDX-License-Identifier: Apache-2.0
"""The short way past the general parser: a request that lies whole in one read, with a head that leaves nothing to judge.

All else is not taken, and goes through `request_parser.py`, which decides alone what is a request and what is refused:
any other method, version, header, repeated header, folded line, bare line feed, transfer coding, or byte behind the
body. What is taken it would understand in the same way; `tests/property/test_plain_head.py` holds the two together.
Compiled, see `setup.py`."""

from __future__ import annotations

POST, DELETE = b"POST ", b"DELETE "
VERSION = b" HTTP/1.1\r\n"

# The headers that are taken, each at most once; the first two must be there, and nothing hangs on those after the fifth:
# what clients, and the gateways between, nearly always send.
HOST, CONTENT_LENGTH, CONTENT_TYPE, ACCEPT, CONNECTION, IGNORED = range(6)
NAMES = (
    *(b"host", b"content-length", b"content-type", b"accept", b"connection"),
    *(b"user-agent", b"accept-encoding", b"accept-language", b"x-request-id", b"traceparent", b"tracestate"),
    *(b"x-forwarded-for", b"x-forwarded-proto", b"x-forwarded-host", b"forwarded", b"via"),
)
KNOWN = {name: kind for kind, name in enumerate(NAMES)}
# A body of a hundred gigabytes does not lie in one read.
MAX_DIGITS = 11

_CR, _LF, _SPACE, _COLON, _ZERO, _NINE, _LAST_PRINTABLE = map(ord, "\r\n :09~")
# By byte: whether it may stand in a host's name.
_IN_HOST = bytes(c < 128 and (chr(c).isalnum() or chr(c) in ".-") for c in range(256))
# The same in a target that is its own path: without escapes and without a query.
_IN_PATH = bytes(c < 128 and (chr(c).isalnum() or chr(c) in ".-_~/") for c in range(256))


class PlainHead:
    """path: as in `paths`, or its own, below. content_type, accept: "" where absent. body_start: index in what was
    read."""

    def __init__(self, method: str, path: str, content_type: str, accept: str, body_start: int) -> None:
        self.method = method
        self.path = path
        self.content_type = content_type
        self.accept = accept
        self.body_start = body_start


def line_end(data: bytes, at: int) -> int:
    """Index of the CR LF that ends the line of printable ASCII from `at`; -1 where anything else stands in it."""
    size = len(data)
    while at < size:
        c = data[at]
        if c == _CR:
            return at if at + 1 < size and data[at + 1] == _LF else -1
        if c < _SPACE or c > _LAST_PRINTABLE:
            return -1
        at += 1
    return -1


def digits(data: bytes, start: int, end: int) -> int:
    """The number without a leading zero from `start` to `end`, or -1."""
    if start == end or end - start > MAX_DIGITS or (data[start] == _ZERO and end - start > 1):
        return -1
    value = 0
    for at in range(start, end):
        c = data[at]
        if c < _ZERO or c > _NINE:
            return -1
        value = value * 10 + (c - _ZERO)
    return value


def is_host(data: bytes, start: int, end: int) -> bool:
    """Whether it is a name or an IPv4 address, with or without a port; there are other hosts."""
    at = start
    while at < end and data[at] != _COLON:
        if not _IN_HOST[data[at]]:
            return False
        at += 1
    return at > start and (at == end or digits(data, at + 1, end) >= 0)


def is_path(target: bytes) -> bool:
    """Whether it is what it says, character by character."""
    for at in range(len(target)):
        if not _IN_PATH[target[at]]:
            return False
    return True


def plain_head(data: bytes, paths: dict[bytes, str], below: bytes, max_head_bytes: int) -> PlainHead | None:
    """The head of the one request that `data` is, or None where it is not that plain. paths: targets of POST that are
    taken; below: with what others of POST and DELETE begin, b"": none."""
    is_post = data.startswith(POST)
    if not (is_post or (below and data.startswith(DELETE))):
        return None
    at = line_end(data, 0)
    if at < 0 or data[at - len(VERSION) + 2 : at + 2] != VERSION:
        return None
    target = data[len(POST) if is_post else len(DELETE) : at - len(VERSION) + 2]
    path = paths.get(target) if is_post else None
    if path is None:
        if not (below and target.startswith(below) and is_path(target)):
            return None
        path = target.decode("ascii")
    content_type = accept = ""
    # A DELETE usually has no body, and then no length.
    length = -1 if is_post else 0
    seen = 0
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
        kind = KNOWN.get(data[start:colon].lower(), -1)
        if kind < 0:
            return None
        value = colon + 1
        while value < end and data[value] == _SPACE:
            value += 1
        if value == end or data[end - 1] == _SPACE:
            return None
        if seen >> kind & 1:
            return None
        seen |= 1 << kind
        if kind >= IGNORED:
            pass
        elif kind == HOST:
            if not is_host(data, value, end):
                return None
        elif kind == CONTENT_LENGTH:
            length = digits(data, value, end)
            if length < 0:
                return None
        elif kind == CONTENT_TYPE:
            content_type = data[value:end].decode("latin-1")
        elif kind == ACCEPT:
            accept = data[value:end].decode("latin-1")
        elif data[value:end].lower() != b"keep-alive":
            return None
        start = end + 2
    if not seen >> HOST & 1 or end + 2 + length != len(data) or length < 0:
        return None
    return PlainHead("POST" if is_post else "DELETE", path, content_type, accept, end + 2)
