# SPDX-License-Identifier: Apache-2.0
"""Arrays of plain integers in JSON, read from a body's bytes into numpy; the compiled version is `json_numbers.pyx`.

Nearly all bytes of a question are numbers: 512 hashes are 10 kB of digits. This module replaces the compiled one where
there was no C compiler. It leaves all arrays to msgspec, which reads the same values.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def integers_of(raw: bytes | memoryview) -> NDArray[np.uint64] | None:
    """Return the integers of a JSON array as uint64, negative ones as two's complement; None if msgspec must read it.

    None is returned for everything that is not an array of integers from -2**63 to 2**64-1.
    """
    return None


def split_integers(data: bytes, start: int, names: tuple[bytes, ...]) -> tuple[bytes, int, NDArray[np.uint64]] | None:
    """Cut one array of integers out of a JSON object, so that msgspec decodes only the rest.

    Args:
        data: The bytes that contain the object.
        start: Index in `data` at which the object begins.
        names: Names of fields, at most four. Exactly one of them must be in the object, as an array that `integers_of`
            accepts.

    Returns:
        The object with null in place of the array, the index of the field's name in `names`, and the integers; None if
        msgspec must read all of it. Only quotes and brackets of the other fields are checked, so the returned object is
        invalid JSON if `data` is.
    """
    return None


def all_bits(ids: NDArray[np.uint64]) -> int:
    """Return the bitwise OR of all ids."""
    return int(np.bitwise_or.reduce(ids))
