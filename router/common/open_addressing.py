# SPDX-License-Identifier: Apache-2.0
"""Where a 64-bit block hash belongs in an open-addressing table. Linear probing; capacities need not be powers of
two."""

from __future__ import annotations

import numpy as np

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
