# SPDX-License-Identifier: Apache-2.0
"""The JSON of a `QueryReply` with its numbers left out, made once for a plan: the numbers are all that differs between
the answers to two prompts. `query_template.pyx` does the same, compiled; this stands for it where there was no C
compiler."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class QueryTemplate:
    """pieces: what stands before each number, and behind the last one. cells: where each number is in the table,
    counted row by row; columns: of a row."""

    def __init__(self, pieces: list[bytes], cells: list[int], columns: int) -> None:
        self._text = b"%d".join(piece.replace(b"%", b"%%") for piece in pieces)
        self._cells = cells
        self._columns = columns

    def fill(self, found: NDArray[np.int64]) -> bytes:
        """The JSON with the numbers of this table, none of them below zero. Raises ValueError and IndexError for a table
        of another shape."""
        if found.shape[1] != self._columns:
            raise ValueError(f"a table of {found.shape[0]} rows of {found.shape[1]}")
        numbers = found.ravel().tolist()
        return self._text % tuple([numbers[cell] for cell in self._cells])
