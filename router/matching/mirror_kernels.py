# SPDX-License-Identifier: Apache-2.0
"""The loops of the mirror: open addressing on 64-bit block hashes, linear probing, no tombstones.

Table: keys (uint64) and heads (int32, EMPTY or the first record). A record is one uint64, so that visiting it is one
memory access: next record (upper 32 bits), worker slot (16), place bits (16). Callers make room first: no kernel
allocates.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvrouter.router.common.jit import kernel
from kvrouter.router.common.open_addressing import close_gap, home

U64 = NDArray[np.uint64]
U16 = NDArray[np.uint16]
I32 = NDArray[np.int32]
I64 = NDArray[np.int64]

EMPTY = -1

# Columns of the mirror's int64 state array.
KEYS_USED, RECORDS_USED, FREE_HEAD, RECORDS_LIVE, STATE_COLUMNS = range(5)

_U16 = np.uint64(16)
_U32 = np.uint64(32)
_LOW16 = np.uint64(0xFFFF)
_LOW32 = np.uint64(0xFFFFFFFF)
_HIGH32 = np.uint64(0xFFFFFFFF00000000)
_END = np.uint64(0xFFFFFFFF)


@kernel
def record_next(record: np.uint64) -> int:
    """The record after this one, or EMPTY."""
    link = record >> _U32
    if link == _END:
        return EMPTY
    return np.int64(link)  # type: ignore[return-value]


@kernel
def record_slot(record: np.uint64) -> int:
    return np.int64((record >> _U16) & _LOW16)  # type: ignore[return-value]


@kernel
def link_to(record: np.uint64, following: int) -> np.uint64:
    """The record with another successor; EMPTY ends the list."""
    rest = record & _LOW32
    if following == EMPTY:
        return rest | _HIGH32
    return rest | (np.uint64(following) << _U32)


@kernel
def find(keys: U64, heads: I32, key: np.uint64) -> int:
    """The index of `key`, or -1."""
    capacity = keys.shape[0]
    i = home(key, capacity)
    while heads[i] != EMPTY:
        if keys[i] == key:
            return i
        i += 1
        if i == capacity:
            i = 0
    return -1


@kernel
def add(keys: U64, heads: I32, records: U64, state: I64, slot_records: I64, slot: int, bit: int, hashes: U64) -> None:
    """Set place `bit` of worker `slot` for every hash. Room for len(hashes) keys and records must be there."""
    capacity = keys.shape[0]
    mask = np.uint64(1) << np.uint64(bit)
    fresh = (np.uint64(slot) << _U16) | mask
    for h in range(hashes.shape[0]):
        key = hashes[h]
        i = home(key, capacity)
        while heads[i] != EMPTY and keys[i] != key:
            i += 1
            if i == capacity:
                i = 0
        first = int(heads[i])
        if first == EMPTY:
            keys[i] = key
            state[KEYS_USED] += 1
        at = first
        while at != EMPTY and record_slot(records[at]) != slot:
            at = record_next(records[at])
        if at != EMPTY:
            records[at] |= mask
            continue
        at = int(state[FREE_HEAD])
        if at != EMPTY:
            state[FREE_HEAD] = record_next(records[at])
        else:
            at = int(state[RECORDS_USED])
            state[RECORDS_USED] += 1
        records[at] = link_to(fresh, first)
        heads[i] = at
        state[RECORDS_LIVE] += 1
        slot_records[slot] += 1


@kernel
def drop_record(
    keys: U64, heads: I32, records: U64, state: I64, slot_records: I64, index: int, before: int, at: int
) -> bool:
    """Unlink record `at` of table entry `index`; True when that emptied the entry (another may now stand there)."""
    record = records[at]
    following = record_next(record)
    records[at] = link_to(record, int(state[FREE_HEAD]))
    state[FREE_HEAD] = at
    state[RECORDS_LIVE] -= 1
    slot_records[record_slot(record)] -= 1
    if before != EMPTY:
        records[before] = link_to(records[before], following)
        return False
    heads[index] = following
    if following != EMPTY:
        return False
    close_gap(keys, heads, EMPTY, index)
    state[KEYS_USED] -= 1
    return True


@kernel
def discard(
    keys: U64, heads: I32, records: U64, state: I64, slot_records: I64, slot: int, bit: int, hashes: U64
) -> None:
    """Clear place `bit` of worker `slot` for every hash; absent ones are left alone."""
    mask = np.uint64(1) << np.uint64(bit)
    for h in range(hashes.shape[0]):
        i = find(keys, heads, hashes[h])
        if i < 0:
            continue
        before = EMPTY
        at = int(heads[i])
        while at != EMPTY and record_slot(records[at]) != slot:
            before = at
            at = record_next(records[at])
        if at == EMPTY:
            continue
        records[at] &= ~mask
        if records[at] & _LOW16 == 0:
            drop_record(keys, heads, records, state, slot_records, i, before, at)


@kernel
def sweep(
    keys: U64,
    heads: I32,
    records: U64,
    state: I64,
    slot_records: I64,
    dead: NDArray[np.bool_],
    start: int,
    end: int,
) -> None:
    """Drop the records of dead slots in table entries [start, end). An entry shifted out of the range is met in a later
    pass."""
    i = start
    while i < end:
        before = EMPTY
        at = int(heads[i])
        emptied = False
        while at != EMPTY:
            following = record_next(records[at])
            if dead[record_slot(records[at])]:
                emptied = drop_record(keys, heads, records, state, slot_records, i, before, at)
                if emptied:
                    break
            else:
                before = at
            at = following
        if not emptied:
            i += 1


@kernel
def rehash(keys: U64, heads: I32, new_keys: U64, new_heads: I32) -> None:
    """Move all entries into an empty table of another capacity; records stay where they are."""
    capacity = new_keys.shape[0]
    for j in range(keys.shape[0]):
        if heads[j] == EMPTY:
            continue
        i = home(keys[j], capacity)
        while new_heads[i] != EMPTY:
            i += 1
            if i == capacity:
                i = 0
        new_keys[i] = keys[j]
        new_heads[i] = heads[j]


@kernel
def gather(keys: U64, heads: I32, records: U64, hashes: U64, row_of_slot: I32, rows: U16) -> None:
    """Write the place bits of every hash into rows[row_of_slot[slot], i]; rows must be zero."""
    # The hottest loop of all: unsigned indices, because signed ones are checked for being negative.
    for h in range(hashes.shape[0]):
        i = find(keys, heads, hashes[h])
        if i < 0:
            continue
        at = np.uint64(heads[i])
        while at != _END:
            record = records[at]
            row = row_of_slot[(record >> _U16) & _LOW16]
            if row >= 0:
                rows[np.uint64(row), np.uint64(h)] = np.uint16(record & _LOW16)
            at = record >> _U32


@kernel
def any_resident(keys: U64, heads: I32, records: U64, hashes: U64, row_of_slot: I32) -> bool:
    """Whether any worker that has a row holds any of these blocks anywhere."""
    for h in range(hashes.shape[0]):
        i = find(keys, heads, hashes[h])
        if i < 0:
            continue
        at = int(heads[i])
        while at != EMPTY:
            if row_of_slot[record_slot(records[at])] >= 0:
                return True
            at = record_next(records[at])
    return False


@kernel
def members(keys: U64, heads: I32, records: U64, slot: int, bit: int, out: U64) -> int:
    """Write the hashes that worker `slot` holds at place `bit` into `out`, as many as fit; returns how many there
    are."""
    mask = np.uint64(1) << np.uint64(bit)
    count = 0
    for i in range(keys.shape[0]):
        at = int(heads[i])
        while at != EMPTY:
            record = records[at]
            if record_slot(record) == slot and record & mask != 0:
                if count < out.shape[0]:
                    out[count] = keys[i]
                count += 1
            at = record_next(record)
    return count
