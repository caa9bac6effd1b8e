# SPDX-License-Identifier: Apache-2.0
"""Where a 64-bit block hash belongs in an open-addressing table. Linear probing; capacities need not be powers of
two."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_LOW32 = 0xFFFFFFFF
# Odd 32-bit multipliers (golden ratio; xxHash's PRIME32_2): products stay below 2**64, so plain numpy does not warn.
_MIX1 = 0x9E3779B1
_MIX2 = 0x85EBCA77


def home(key: np.uint64, capacity: int) -> int:
    """Where the search for `key` begins. Mixes, because tests and small engines use small integers as hashes."""
    x = (key ^ (key >> 32)) & _LOW32
    x = (x * _MIX1) & _LOW32
    x = x ^ (x >> 15)
    x = (x * _MIX2) & _LOW32
    return int((x * capacity) >> 32)


def homes(keys: NDArray[np.uint64], capacity: int, out: NDArray[np.int64]) -> None:
    """The home of every key, into `out`."""
    for i in range(keys.shape[0]):
        out[i] = home(keys[i], capacity)


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
