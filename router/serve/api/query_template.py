# SPDX-License-Identifier: Apache-2.0
"""The JSON of a `QueryReply` with its numbers left out, made once for each plan.

The numbers are all that differs between the answers to two prompts. `query_template.pyx` is the compiled version; this
module replaces it if there was no C compiler.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class QueryTemplate:
    """The text of a reply, and the places of its numbers.

    Args:
        pieces: The text before each number, and the text after the last one.
        cells: The index of each number in the table, counted row by row.
        columns: The number of columns of the table.
    """

    def __init__(self, pieces: list[bytes], cells: list[int], columns: int) -> None:
        self._text = b"%d".join(piece.replace(b"%", b"%%") for piece in pieces)
        self._cells = cells
        self._columns = columns

    def fill(self, found: NDArray[np.int64]) -> bytes:
        """Return the JSON with the numbers of this table, none of which may be negative.

        Raises ValueError and IndexError if the table has another shape.
        """
        if found.shape[1] != self._columns:
            raise ValueError(f"a table of {found.shape[0]} rows of {found.shape[1]}")
        numbers = found.ravel().tolist()
        return self._text % tuple([numbers[cell] for cell in self._cells])
