# SPDX-License-Identifier: Apache-2.0
"""The loops of the copy counts: keys (uint64) beside counts (uint16, 0 is empty). Callers make room first."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvrouter.router.common.jit import kernel
from kvrouter.router.common.open_addressing import close_gap, home

U64 = NDArray[np.uint64]
U16 = NDArray[np.uint16]

# A count above this stays there; the removals that follow then reach zero early, which can only under-credit.
MAX_COPIES = 65_535


@kernel
def place_of(keys: U64, counts: U16, key: np.uint64) -> int:
    """Where `key` is, or the empty place where it would go."""
    capacity = keys.shape[0]
    i = home(key, capacity)
    while counts[i] != 0 and keys[i] != key:
        i += 1
        if i == capacity:
            i = 0
    return i


@kernel
def count_up(keys: U64, counts: U16, hashes: U64, now: U16) -> int:
    """One copy more of every hash; now[i] becomes its new count. Returns how many hashes are new. Room must be
    there."""
    fresh = 0
    for h in range(hashes.shape[0]):
        key = hashes[h]
        i = place_of(keys, counts, key)
        if counts[i] == 0:
            keys[i] = key
            fresh += 1
        if counts[i] < MAX_COPIES:
            counts[i] += np.uint16(1)
        now[h] = counts[i]
    return fresh


@kernel
def count_down(keys: U64, counts: U16, hashes: U64, was: U16) -> int:
    """One copy less of every hash; was[i] becomes its old count, 0 when it had none. Returns how many are gone."""
    gone = 0
    for h in range(hashes.shape[0]):
        key = hashes[h]
        i = place_of(keys, counts, key)
        was[h] = counts[i]
        if counts[i] == 0:
            continue
        counts[i] -= np.uint16(1)
        if counts[i] != 0:
            continue
        gone += 1
        close_gap(keys, counts, 0, i)
    return gone


@kernel
def count_set(keys: U64, counts: U16, hashes: U64, values: U16) -> int:
    """Set the counts (>= 1) of hashes; returns how many are new. Room must be there."""
    fresh = 0
    for h in range(hashes.shape[0]):
        key = hashes[h]
        i = place_of(keys, counts, key)
        if counts[i] == 0:
            keys[i] = key
            fresh += 1
        counts[i] = values[h]
    return fresh


@kernel
def count_rehash(keys: U64, counts: U16, new_keys: U64, new_counts: U16) -> None:
    """Move all counts into an empty table of another capacity."""
    for j in range(keys.shape[0]):
        if counts[j] == 0:
            continue
        i = place_of(new_keys, new_counts, keys[j])
        new_keys[i] = keys[j]
        new_counts[i] = counts[j]
