# SPDX-License-Identifier: Apache-2.0
"""Where a 64-bit block hash belongs in an open-addressing table. Linear probing; capacities need not be powers of
two."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvrouter.router.common.jit import kernel

_LOW32 = np.uint64(0xFFFFFFFF)
_S32 = np.uint64(32)
_S15 = np.uint64(15)
# Odd 32-bit multipliers (golden ratio; xxHash's PRIME32_2): products stay below 2**64, so plain numpy does not warn.
_MIX1 = np.uint64(0x9E3779B1)
_MIX2 = np.uint64(0x85EBCA77)


@kernel
def home(key: np.uint64, capacity: int) -> int:
    """Where the search for `key` begins. Mixes, because tests and small engines use small integers as hashes."""
    x = (key ^ (key >> _S32)) & _LOW32
    x = (x * _MIX1) & _LOW32
    x = x ^ (x >> _S15)
    x = (x * _MIX2) & _LOW32
    # To numba, int() of a uint64 stays unsigned, and unsigned minus signed is a float.
    return np.int64((x * np.uint64(capacity)) >> _S32)  # type: ignore[return-value]


@kernel
def close_gap(keys: NDArray[np.uint64], values: NDArray[np.generic], empty: int, hole: int) -> None:
    """Empties index `hole` and shifts back the entries behind it that the hole would cut off. values: beside the keys;
    `empty` marks a free place."""
    capacity = keys.shape[0]
    values[hole] = empty
    i = hole
    while True:
        i += 1
        if i == capacity:
            i = 0
        if values[i] == empty:
            break
        distance = i - home(keys[i], capacity)
        if distance < 0:
            distance += capacity
        gap = i - hole
        if gap < 0:
            gap += capacity
        if distance >= gap:
            keys[hole] = keys[i]
            values[hole] = values[i]
            values[i] = empty
            hole = i
