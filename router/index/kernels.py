# SPDX-License-Identifier: Apache-2.0
"""The loops of the mirror: open addressing on 64-bit block hashes, linear probing, no tombstones.

Table: keys (uint64) and heads (int32, EMPTY or the first record); records are columns: slot (uint16), mask (uint32), next (int32).
Callers make room first: no kernel allocates.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvrouter.router.jit import kernel
from kvrouter.router.probing import home

U64 = NDArray[np.uint64]
U32 = NDArray[np.uint32]
U16 = NDArray[np.uint16]
I32 = NDArray[np.int32]
I64 = NDArray[np.int64]

EMPTY = -1

# Columns of the mirror's int64 state array.
KEYS_USED, RECORDS_USED, FREE_HEAD, RECORDS_LIVE, STATE_COLUMNS = range(5)


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
def close_gap(keys: U64, heads: I32, hole: int) -> None:
    """Empty index `hole` and shift back the entries behind it that the hole would cut off."""
    capacity = keys.shape[0]
    i = hole
    while True:
        i += 1
        if i == capacity:
            i = 0
        if heads[i] == EMPTY:
            break
        distance = i - home(keys[i], capacity)
        if distance < 0:
            distance += capacity
        gap = i - hole
        if gap < 0:
            gap += capacity
        if distance >= gap:
            keys[hole] = keys[i]
            heads[hole] = heads[i]
            hole = i
    heads[hole] = EMPTY


@kernel
def add(
    keys: U64,
    heads: I32,
    slots: U16,
    masks: U32,
    nexts: I32,
    state: I64,
    slot_records: I64,
    slot: int,
    bit: int,
    hashes: U64,
) -> None:
    """Set place `bit` of worker `slot` for every hash. Room for len(hashes) keys and records must be there."""
    capacity = keys.shape[0]
    mask = np.uint32(1) << np.uint32(bit)
    for h in range(hashes.shape[0]):
        key = hashes[h]
        i = home(key, capacity)
        while heads[i] != EMPTY and keys[i] != key:
            i += 1
            if i == capacity:
                i = 0
        record = heads[i]
        if record == EMPTY:
            keys[i] = key
            state[KEYS_USED] += 1
        while record != EMPTY and slots[record] != slot:
            record = nexts[record]
        if record != EMPTY:
            masks[record] |= mask
            continue
        record = np.int32(state[FREE_HEAD])
        if record != EMPTY:
            state[FREE_HEAD] = nexts[record]
        else:
            record = np.int32(state[RECORDS_USED])
            state[RECORDS_USED] += 1
        slots[record] = slot
        masks[record] = mask
        nexts[record] = heads[i]
        heads[i] = record
        state[RECORDS_LIVE] += 1
        slot_records[slot] += 1


@kernel
def drop_record(
    keys: U64, heads: I32, slots: U16, nexts: I32, state: I64, slot_records: I64, index: int, before: int, record: int
) -> bool:
    """Unlink a record of table entry `index`; True when that emptied the entry (another may now stand there)."""
    follower = nexts[record]
    nexts[record] = np.int32(state[FREE_HEAD])
    state[FREE_HEAD] = record
    state[RECORDS_LIVE] -= 1
    slot_records[slots[record]] -= 1
    if before != EMPTY:
        nexts[before] = follower
        return False
    heads[index] = follower
    if follower != EMPTY:
        return False
    # The entry must not look empty while entries behind it are shifted back over it.
    close_gap(keys, heads, index)
    state[KEYS_USED] -= 1
    return True


@kernel
def discard(
    keys: U64,
    heads: I32,
    slots: U16,
    masks: U32,
    nexts: I32,
    state: I64,
    slot_records: I64,
    slot: int,
    bit: int,
    hashes: U64,
) -> None:
    """Clear place `bit` of worker `slot` for every hash; absent ones are left alone."""
    mask = np.uint32(1) << np.uint32(bit)
    for h in range(hashes.shape[0]):
        i = find(keys, heads, hashes[h])
        if i < 0:
            continue
        before = EMPTY
        record = heads[i]
        while record != EMPTY and slots[record] != slot:
            before = record
            record = nexts[record]
        if record == EMPTY:
            continue
        masks[record] &= ~mask
        if masks[record] == 0:
            drop_record(keys, heads, slots, nexts, state, slot_records, i, before, record)


@kernel
def sweep(
    keys: U64,
    heads: I32,
    slots: U16,
    nexts: I32,
    state: I64,
    slot_records: I64,
    dead: NDArray[np.bool_],
    start: int,
    end: int,
) -> None:
    """Drop the records of dead slots in table entries [start, end). An entry shifted out of the range is met in a later pass."""
    i = start
    while i < end:
        before = EMPTY
        record = heads[i]
        emptied = False
        while record != EMPTY:
            follower = nexts[record]
            if dead[slots[record]]:
                emptied = drop_record(keys, heads, slots, nexts, state, slot_records, i, before, record)
                if emptied:
                    break
            else:
                before = record
            record = follower
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
def gather(keys: U64, heads: I32, slots: U16, masks: U32, nexts: I32, hashes: U64, row_of_slot: I32, rows: U32) -> int:
    """Write the place bits of every hash into rows[row_of_slot[slot], i]; rows must be zero. Returns the hashes that hit a row."""
    hits = 0
    for h in range(hashes.shape[0]):
        i = find(keys, heads, hashes[h])
        if i < 0:
            continue
        hit = 0
        record = heads[i]
        while record != EMPTY:
            row = row_of_slot[slots[record]]
            if row >= 0:
                rows[row, h] = masks[record]
                hit = 1
            record = nexts[record]
        hits += hit
    return hits


@kernel
def members(keys: U64, heads: I32, slots: U16, masks: U32, nexts: I32, slot: int, bit: int, out: U64) -> int:
    """Write the hashes that worker `slot` holds at place `bit` into `out`, as many as fit; returns how many there are."""
    mask = np.uint32(1) << np.uint32(bit)
    count = 0
    for i in range(keys.shape[0]):
        record = heads[i]
        while record != EMPTY:
            if slots[record] == slot and masks[record] & mask != 0:
                if count < out.shape[0]:
                    out[count] = keys[i]
                count += 1
            record = nexts[record]
    return count
