# SPDX-License-Identifier: Apache-2.0
"""A JSON array of plain integers, straight from the body's bytes to numpy.

What a question brings is nearly all numbers: 512 hashes are 10 kB of digits. Through Python integers they cost 35 us
(125 us as i64), here 10 us. Anything else than integers of 64 bits is left to msgspec, whose errors say what and where.
Compiled, see `setup.py`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

NOT_PLAIN = -1

_OPEN, _CLOSE, _COMMA, _MINUS, _ZERO, _NINE = map(ord, "[],-09")
_SPACE = ord(" ")
_MAX_TENTH = (2**64 - 1) // 10
_MAX_LAST = (2**64 - 1) % 10
# Any number with this many digits fits 64 bits.
_SAFE_DIGITS = 19
_ALL = 2**64 - 1
_MOST_NEGATIVE = 2**63


def parse_integers(text: bytes | memoryview, out: NDArray[np.uint64]) -> int:
    """Fill `out` with the integers of a JSON array, negative ones as two's complement; returns how many, or NOT_PLAIN.

    NOT_PLAIN: the text is no array of integers from -2**63 to 2**64-1. out: shape of at least len(text) // 2 + 1.
    """
    end = len(text)
    i = 0
    count = 0
    # 0: before the first element, 1: after an element, 2: after a comma.
    expects = 0
    while i < end and text[i] <= _SPACE:
        i += 1
    if i == end or text[i] != _OPEN:
        return NOT_PLAIN
    i += 1
    while i < end:
        c = text[i]
        if c <= _SPACE:
            i += 1
            continue
        if c == _CLOSE:
            if expects == 2:
                return NOT_PLAIN
            i += 1
            while i < end and text[i] <= _SPACE:
                i += 1
            return count if i == end else NOT_PLAIN
        if expects == 1:
            if c != _COMMA:
                return NOT_PLAIN
            expects = 2
            i += 1
            continue
        negative = c == _MINUS
        if negative:
            i += 1
        start = i
        safe = start + _SAFE_DIGITS
        value = 0
        while i < end:
            c = text[i]
            if c < _ZERO or c > _NINE:
                break
            digit = c - _ZERO
            if i >= safe and (value > _MAX_TENTH or (value == _MAX_TENTH and digit > _MAX_LAST)):
                return NOT_PLAIN
            value = value * 10 + digit
            i += 1
        if i == start or (text[start] == _ZERO and i - start > 1):
            return NOT_PLAIN
        if negative:
            if value > _MOST_NEGATIVE:
                return NOT_PLAIN
            if value != 0:
                value = (value ^ _ALL) + 1
        out[count] = value
        count += 1
        expects = 1
    return NOT_PLAIN


def integers_of(raw: bytes | memoryview) -> NDArray[np.uint64] | None:
    """uint64, shape (n,), or None when `raw` is no JSON array of plain integers."""
    out = np.empty(len(raw) // 2 + 1, np.uint64)
    count = parse_integers(raw, out)
    return None if count == NOT_PLAIN else out[:count]
