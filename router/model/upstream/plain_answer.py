# SPDX-License-Identifier: Apache-2.0
"""A fast path around the general parser for plain answers: simple heads, and chunks that are complete in one read.

All other input goes through httptools in `connection.py`, which alone decides what is an answer: other versions, interim
answers, answers without a body or without a length, repeated lengths, trailers, chunk extensions, and anything cut.
`tests/property/test_plain_answer.py` checks that both paths agree. This module is compiled, see `setup.py`.
"""

from __future__ import annotations

from kvrouter.router.base.common.head_lines import digits, is_name, line_end, value_start

START = b"HTTP/1.1 "
# The index of the reason phrase, after `HTTP/1.1 200 `.
REASON_AT = 13
# Stands for the length of a body in chunks.
CHUNKED = -1
# Larger chunks go to the general parser. A chunk of an engine is one event, which never has 16 megabytes.
MAX_CHUNK_DIGITS = 6
KEEP_ALIVE = b"keep-alive"

# Kinds of headers that need a look; an answer with a JUDGED one goes to the general parser.
LENGTH, TRANSFER, CONNECTION, JUDGED = range(4)
KINDS = {
    b"content-length": LENGTH,
    b"transfer-encoding": TRANSFER,
    b"connection": CONNECTION,
    b"proxy-connection": JUDGED,
    b"upgrade": JUDGED,
}

_CR, _LF, _SPACE = map(ord, "\r\n ")
# The value of each byte as a hexadecimal digit; 16 for bytes that are none.
_HEX = bytes(int(chr(c), 16) if chr(c) in "0123456789abcdefABCDEF" else 16 for c in range(256))


class PlainAnswer:
    """The head of a plain answer."""

    def __init__(
        self, status: int, reason: bytes, headers: list[tuple[bytes, bytes]], length: int, body_start: int
    ) -> None:
        """Take the parts of the head.

        Args:
            status: The status code.
            reason: The reason phrase, which may be empty.
            headers: Names in lower case, and values.
            length: Bytes of the body, or CHUNKED.
            body_start: The index of the body in the bytes that were read.
        """
        self.status = status
        self.reason = reason
        self.headers = headers
        self.length = length
        self.body_start = body_start


def plain_answer(data: bytes, max_head_bytes: int) -> PlainAnswer | None:
    """Return the head at the beginning of `data`, or None if the head is not plain or not complete.

    The complete head must end within `max_head_bytes`.
    """
    end = line_end(data, 0)
    if end < REASON_AT or not data.startswith(START) or data[REASON_AT - 1] != _SPACE:
        return None
    if end > REASON_AT and (data[REASON_AT] == _SPACE or data[end - 1] == _SPACE):
        return None
    status = digits(data, len(START), REASON_AT - 1)
    if status < 200 or status > 599 or status == 204 or status == 304:
        return None
    reason = data[REASON_AT:end]
    headers: list[tuple[bytes, bytes]] = []
    length = -2
    start = end + 2
    while True:
        end = line_end(data, start)
        if end < 0 or end > max_head_bytes:
            return None
        if end == start:
            break
        colon = data.find(b":", start, end)
        if colon < 0 or not is_name(data, start, colon):
            return None
        value = value_start(data, colon + 1, end)
        if value < 0:
            return None
        name = data[start:colon].lower()
        content = data[value:end]
        kind = KINDS.get(name, -1)
        if kind == LENGTH:
            if length != -2:
                return None
            length = digits(data, value, end)
            if length < 0:
                return None
        elif kind == TRANSFER:
            if length != -2 or content.lower() != b"chunked":
                return None
            length = CHUNKED
        elif kind == CONNECTION:
            if content.lower() != KEEP_ALIVE:
                return None
        elif kind == JUDGED:
            return None
        headers.append((name, content))
        start = end + 2
    if length == -2:
        return None
    return PlainAnswer(status, reason, headers, length, end + 2)


def whole_chunks(data: bytes, start: int, parts: list[bytes]) -> int:
    """Add the contents of the chunks from `start` to the end of `data` to `parts`.

    Returns:
        1 if the last chunk of the body ends at the end of `data`, 0 if another chunk does, and -1 if no chunk ends there
        or a chunk has an extension or an unusual size line. After -1 the caller must ignore `parts`.
    """
    size = len(data)
    while start < size:
        at = start
        length = 0
        while at < size and _HEX[data[at]] < 16:
            length = length * 16 + _HEX[data[at]]
            at += 1
            if at - start > MAX_CHUNK_DIGITS:
                return -1
        if at == start or at + 2 > size or data[at] != _CR or data[at + 1] != _LF:
            return -1
        start = at + 2
        at = start + length
        if at + 2 > size or data[at] != _CR or data[at + 1] != _LF:
            return -1
        if length == 0:
            return 1 if at + 2 == size else -1
        parts.append(data[start:at])
        start = at + 2
    return 0
