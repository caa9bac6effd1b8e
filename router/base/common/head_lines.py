# SPDX-License-Identifier: Apache-2.0
"""The lines of an HTTP/1.1 head, as the short ways past the general parsers take them: printable ASCII alone.
Compiled, see `setup.py`."""

from __future__ import annotations

# A body of a hundred gigabytes does not lie in one read.
MAX_DIGITS = 11

_CR, _LF, _SPACE, _ZERO, _NINE, _LAST_PRINTABLE = map(ord, "\r\n 09~")
# By byte: whether it may stand in a header's name (RFC 9110, 5.6.2).
_IN_NAME = bytes(c < 128 and (chr(c).isalnum() or chr(c) in "!#$%&'*+-.^_`|~") for c in range(256))


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


def is_name(data: bytes, start: int, end: int) -> bool:
    """Whether a header may have this name."""
    for at in range(start, end):
        if not _IN_NAME[data[at]]:
            return False
    return end > start


def value_start(data: bytes, at: int, end: int) -> int:
    """Where a header's value begins behind its colon; -1 where there is none, or a space behind it."""
    while at < end and data[at] == _SPACE:
        at += 1
    return -1 if at == end or data[end - 1] == _SPACE else at
