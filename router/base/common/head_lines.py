# SPDX-License-Identifier: Apache-2.0
"""Lines of an HTTP/1.1 head, for the fast paths past the general parsers, which accept printable ASCII only.

Compiled, see `setup.py`.
"""

from __future__ import annotations

# No body of a hundred gigabytes arrives in one read, so longer numbers need no fast path.
MAX_DIGITS = 11

_CR, _LF, _SPACE, _ZERO, _NINE, _LAST_PRINTABLE = map(ord, "\r\n 09~")
# For each byte value, whether it may stand in a header's name (RFC 9110, 5.6.2).
_IN_NAME = bytes(c < 128 and (chr(c).isalnum() or chr(c) in "!#$%&'*+-.^_`|~") for c in range(256))


def line_end(data: bytes, at: int) -> int:
    """Return the index of the CR LF that ends the line of printable ASCII at `at`; -1 if it contains anything else."""
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
    """Return the number from `start` to `end`, which must have no leading zero; -1 if it is not such a number."""
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
    """Return whether a header may have the name from `start` to `end`."""
    for at in range(start, end):
        if not _IN_NAME[data[at]]:
            return False
    return end > start


def value_start(data: bytes, at: int, end: int) -> int:
    """Return the index at which a header's value begins, after its colon; -1 if it is empty or ends with a space."""
    while at < end and data[at] == _SPACE:
        at += 1
    return -1 if at == end or data[end - 1] == _SPACE else at
