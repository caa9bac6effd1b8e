# SPDX-License-Identifier: Apache-2.0
"""The JSON of a `QueryReply` with its numbers left out, made once for a plan: the numbers are all that differs between
the answers to two prompts. Compiled, see `setup.py`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# No 64-bit number has more.
MAX_DIGITS = 20

_ZERO = ord("0")


class QueryTemplate:
    """pieces: what stands before each number, and behind the last one. rows, columns: where each number is in the
    table."""

    def __init__(self, pieces: list[bytes], rows: list[int], columns: list[int]) -> None:
        self.text = b"".join(pieces)
        self.ends = np.cumsum([len(piece) for piece in pieces], dtype=np.int64)
        self.rows = np.array(rows, np.int64)
        self.columns = np.array(columns, np.int64)

    def fill(self, found: NDArray[np.int64]) -> bytes:
        """The JSON with the numbers of this table, none of them below zero."""
        numbers = self.rows.shape[0]
        room = bytearray(len(self.text) + MAX_DIGITS * numbers)
        out = room
        at = start = 0
        for i in range(numbers + 1):
            for j in range(start, self.ends[i]):
                out[at] = self.text[j]
                at += 1
            start = self.ends[i]
            if i == numbers:
                break
            number = rest = found[self.rows[i], self.columns[i]]
            at += 1
            while rest >= 10:
                rest //= 10
                at += 1
            j = at - 1
            while True:
                out[j] = _ZERO + number % 10
                number //= 10
                j -= 1
                if number == 0:
                    break
        return bytes(room[:at])
