# SPDX-License-Identifier: Apache-2.0
"""A JSON array of plain integers, straight from the body's bytes to numpy.

What a question brings is nearly all numbers: 512 hashes are 10 kB of digits. Through Python integers they cost 35 us
(125 us as i64), here 10 us. Anything else than integers of 64 bits is left to msgspec, whose errors say what and where.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvrouter.router.common.jit import kernel

NOT_PLAIN = -1

_OPEN, _CLOSE, _COMMA, _MINUS, _ZERO, _NINE = (np.uint8(ord(c)) for c in "[],-09")
_SPACE = np.uint8(ord(" "))
_MAX_TENTH = np.uint64((2**64 - 1) // 10)
_MAX_LAST = np.uint64((2**64 - 1) % 10)
_TEN = np.uint64(10)
# Any number with this many digits fits 64 bits.
_SAFE_DIGITS = np.uint64(19)
_ONE = np.uint64(1)
_ALL = np.uint64(2**64 - 1)
_MOST_NEGATIVE = np.uint64(2**63)


@kernel
def parse_integers(text: NDArray[np.uint8], out: NDArray[np.uint64]) -> int:
    """Fill `out` with the integers of a JSON array, negative ones as two's complement; returns how many, or NOT_PLAIN.

    NOT_PLAIN: the text is no array of integers from -2**63 to 2**64-1. out: shape of at least len(text) // 2 + 1.
    """
    # Unsigned positions, because signed ones are checked for being negative at every access.
    end = np.uint64(text.shape[0])
    i = np.uint64(0)
    count = 0
    # 0: before the first element, 1: after an element, 2: after a comma.
    expects = 0
    while i < end and text[i] <= _SPACE:
        i += _ONE
    if i == end or text[i] != _OPEN:
        return NOT_PLAIN
    i += _ONE
    while i < end:
        c = text[i]
        if c <= _SPACE:
            i += _ONE
            continue
        if c == _CLOSE:
            if expects == 2:
                return NOT_PLAIN
            i += _ONE
            while i < end and text[i] <= _SPACE:
                i += _ONE
            return count if i == end else NOT_PLAIN
        if expects == 1:
            if c != _COMMA:
                return NOT_PLAIN
            expects = 2
            i += _ONE
            continue
        negative = c == _MINUS
        if negative:
            i += _ONE
        start = i
        safe = min(end, start + _SAFE_DIGITS)
        value = np.uint64(0)
        while i < safe and text[i] >= _ZERO and text[i] <= _NINE:
            value = value * _TEN + np.uint64(text[i] - _ZERO)
            i += _ONE
        while i < end and text[i] >= _ZERO and text[i] <= _NINE:
            digit = np.uint64(text[i] - _ZERO)
            if value > _MAX_TENTH or (value == _MAX_TENTH and digit > _MAX_LAST):
                return NOT_PLAIN
            value = value * _TEN + digit
            i += _ONE
        if i == start or (text[start] == _ZERO and i - start > _ONE):
            return NOT_PLAIN
        if negative:
            if value > _MOST_NEGATIVE:
                return NOT_PLAIN
            if value != 0:
                value = (value ^ _ALL) + _ONE
        out[count] = value
        count += 1
        expects = 1
    return NOT_PLAIN


def integers_of(raw: bytes | memoryview) -> NDArray[np.uint64] | None:
    """uint64, shape (n,), or None when `raw` is no JSON array of plain integers."""
    text = np.frombuffer(raw, np.uint8)
    out = np.empty(len(text) // 2 + 1, np.uint64)
    count = parse_integers(text, out)
    return None if count == NOT_PLAIN else out[:count]
