# SPDX-License-Identifier: Apache-2.0
"""What `json_numbers.pyx` does, compiled: arrays of plain integers, straight from a body's bytes to numpy.

What a question brings is nearly all numbers: 512 hashes are 10 kB of digits. This stands for it where there was no C
compiler: it leaves all arrays to msgspec, which reads the same out of them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def integers_of(raw: bytes | memoryview) -> NDArray[np.uint64] | None:
    """The integers of a JSON array, uint64, negative ones as two's complement. None: left to msgspec, as is all that is
    no array of integers from -2**63 to 2**64-1."""
    return None


def split_integers(data: bytes, start: int, names: tuple[bytes, ...]) -> tuple[bytes, int, NDArray[np.uint64]] | None:
    """A JSON object from `start` on, in which one field of these at most four names is an array as `integers_of` takes
    it: the object with null in the array's place, the name's index, and the integers.

    None: left to msgspec. Of the other fields it sees the quotes and brackets alone, so what is returned may be no JSON
    if `data` is none."""
    return None


def all_bits(ids: NDArray[np.uint64]) -> int:
    """Every bit that is set in any of them."""
    return int(np.bitwise_or.reduce(ids))
