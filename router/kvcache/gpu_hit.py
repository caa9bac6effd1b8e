# SPDX-License-Identifier: Apache-2.0
"""vLLM's hit rule as pure kernels: how many tokens of a prompt a worker reuses, given which blocks are resident.

Each spec group is a floor function; the hit is their greatest common fixpoint below num_tokens - 1. What the CPU and
disk tiers add on top is in `offload_hit.py`. No I/O, no names: residency comes as rows of place bits
(`index/mirror.py`), the catalog as the integer tables of `hit_tables.py`. Lengths are in tokens; a block is looked up
by the hash at its last hash boundary. shift: hashes before the prompt's part that is judged, as vLLM looks a suffix up
in a tier's own block pool.

Source: vLLM 0.32.0 v1/core/kv_cache_coordinator.py:796, v1/core/single_type_kv_cache_manager.py:733 :956 :1269 :1454.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvrouter.router.common.jit import kernel
from kvrouter.router.kvcache.hit_tables import (
    GEO_ALIGN,
    GEO_HASH_BLOCK,
    GEO_SIMPLE,
    GEO_SPEC_END,
    GEO_SPEC_START,
    GEO_UNITARY,
    MEMBER_BANK,
    MEMBER_MASK,
    RULE_CHUNKED_LOCAL,
    RULE_FULL,
    RULE_MAMBA,
    RULE_SLIDING_WINDOW,
    SPEC_BLOCK,
    SPEC_CHUNK,
    SPEC_EAGLE,
    SPEC_MEMBER_END,
    SPEC_MEMBER_START,
    SPEC_RULE,
    SPEC_WINDOW,
)

Rows = NDArray[np.uint16]
Table = NDArray[np.int64]

# Blocks judged at once: enough for wide instructions, little work lost at the end of a run.
STRETCH = 32

# More spec groups than any model has; the fixpoint keeps one flag and one length for each.
MAX_SPEC_GROUPS = 64


@kernel
def resident(rows: Rows, row: int, index: int, members: Table, start: int, end: int) -> bool:
    """Whether every member group holds the block that ends at hash `index` of the rows."""
    if index >= rows.shape[1]:
        return False
    for m in range(start, end):
        if np.int64(rows[row + members[m, MEMBER_BANK], index]) & members[m, MEMBER_MASK] == 0:
            return False
    return True


@kernel
def run_from_zero(
    rows: Rows, row: int, shift: int, members: Table, start: int, end: int, scale: int, limit: int
) -> int:
    """Blocks of the unbroken run from block 0, at most `limit`. The one loop that walks whole prompts, so it is kept
    bare."""
    run = max(0, min(limit, (rows.shape[1] - shift) // scale))
    for m in range(start, end):
        line = rows[row + members[m, MEMBER_BANK], shift:]
        mask = np.uint16(members[m, MEMBER_MASK])
        block = 0
        if scale == 1 and members[m, MEMBER_MASK] & (members[m, MEMBER_MASK] - 1) == 0:
            # One bit to look for and no strides: whole stretches are anded at once, which the compiler vectorizes.
            while block + STRETCH <= run:
                common = mask
                for i in range(block, block + STRETCH):
                    common &= line[i]
                if common == 0:
                    break
                block += STRETCH
        while block < run and line[(block + 1) * scale - 1] & mask != 0:
            block += 1
        run = block
    return int(run)


@kernel
def floor_full(
    rows: Rows,
    row: int,
    shift: int,
    members: Table,
    spec: Table,
    hash_block: int,
    num_hashes: int,
    max_length: int,
    drop: bool,
    align: int,
) -> int:
    """Full attention, MLA, sink: the unbroken run from 0, extended into the next block where hits may end inside
    one."""
    block = spec[SPEC_BLOCK]
    scale = block // hash_block
    start, end = spec[SPEC_MEMBER_START], spec[SPEC_MEMBER_END]
    run = run_from_zero(rows, row, shift, members, start, end, scale, max_length // block)
    hit = run * block
    if align < block and block % align == 0:
        inner = block // align
        first = run * inner
        last = min(first + inner - 1, max_length // align, num_hashes)
        for index in range(last - 1, first - 1, -1):
            if resident(rows, row, shift + index, members, start, end):
                hit = (index + 1) * align
                break
    if drop and hit > 0:
        hit -= min(align, block)
    return int(hit - hit % align)


@kernel
def floor_sliding_window(
    rows: Rows,
    row: int,
    shift: int,
    members: Table,
    spec: Table,
    hash_block: int,
    num_hashes: int,
    max_length: int,
    drop: bool,
    align: int,
) -> int:
    """Sliding window: the rightmost run of enough blocks, else the run that starts at block 0."""
    block = spec[SPEC_BLOCK]
    scale = block // hash_block
    start, end = spec[SPEC_MEMBER_START], spec[SPEC_MEMBER_END]
    need = (spec[SPEC_WINDOW] - 1 + block - 1) // block
    if drop:
        need += 1
    run = 0
    blocks = -1
    # Nothing is resident past the given hashes; a claimed length costs no time.
    for i in range(min(max_length // block, (rows.shape[1] - shift) // scale) - 1, -1, -1):
        if not resident(rows, row, shift + (i + 1) * scale - 1, members, start, end):
            run = 0
            continue
        if run == 0 and block != align:
            boundary = i if drop else i + 1
            if boundary * block % align != 0:
                continue
        run += 1
        if run >= need:
            blocks = i + run
            break
    if blocks < 0:
        blocks = run
        while block != align and blocks * block % align != 0:
            blocks -= 1
    if drop and blocks > 0:
        blocks -= 1
        while block != align and blocks * block % align != 0:
            blocks -= 1
    return int(blocks * block)


@kernel
def floor_chunked_local(
    rows: Rows,
    row: int,
    shift: int,
    members: Table,
    spec: Table,
    hash_block: int,
    num_hashes: int,
    max_length: int,
    drop: bool,
    align: int,
) -> int:
    """Chunked local attention: blocks before the chunk of max_length need not be there, those of the chunk must."""
    block = spec[SPEC_BLOCK]
    scale = block // hash_block
    start, end = spec[SPEC_MEMBER_START], spec[SPEC_MEMBER_END]
    run = max_length // spec[SPEC_CHUNK] * spec[SPEC_CHUNK] // block
    while run < max_length // block and resident(rows, row, shift + (run + 1) * scale - 1, members, start, end):
        run += 1
    return int(run * block)


@kernel
def floor_mamba(
    rows: Rows,
    row: int,
    shift: int,
    members: Table,
    spec: Table,
    hash_block: int,
    num_hashes: int,
    max_length: int,
    drop: bool,
    align: int,
) -> int:
    """Mamba in align mode: the rightmost boundary whose state is resident. Never drops."""
    block = spec[SPEC_BLOCK]
    start, end = spec[SPEC_MEMBER_START], spec[SPEC_MEMBER_END]
    if align < block and block % align == 0:
        for index in range(min(max_length // align, num_hashes, rows.shape[1] - shift) - 1, -1, -1):
            if resident(rows, row, shift + index, members, start, end):
                return (index + 1) * align
        return 0
    scale = block // hash_block
    for i in range(min(max_length // block, (rows.shape[1] - shift) // scale) - 1, -1, -1):
        if (i + 1) * block % align == 0 and resident(rows, row, shift + (i + 1) * scale - 1, members, start, end):
            return int((i + 1) * block)
    return 0


@kernel
def floor_of(
    rows: Rows,
    row: int,
    shift: int,
    members: Table,
    spec: Table,
    hash_block: int,
    num_hashes: int,
    max_length: int,
    drop: bool,
    align: int,
) -> int:
    """The floor function of one spec group: the longest prefix of at most max_length that it allows."""
    if spec[SPEC_RULE] == RULE_FULL:
        return floor_full(rows, row, shift, members, spec, hash_block, num_hashes, max_length, drop, align)
    if spec[SPEC_RULE] == RULE_SLIDING_WINDOW:
        return floor_sliding_window(rows, row, shift, members, spec, hash_block, num_hashes, max_length, drop, align)
    if spec[SPEC_RULE] == RULE_CHUNKED_LOCAL:
        return floor_chunked_local(rows, row, shift, members, spec, hash_block, num_hashes, max_length, drop, align)
    return floor_mamba(rows, row, shift, members, spec, hash_block, num_hashes, max_length, drop, align)


@kernel
def eagle_margin(spec: Table, align: int) -> int:
    """Tokens that an EAGLE group matches past the candidate before it drops them. Source: kv_cache_utils.py:792."""
    fine = spec[SPEC_RULE] == RULE_FULL or spec[SPEC_RULE] == RULE_MAMBA
    return int(min(align, spec[SPEC_BLOCK]) if fine else spec[SPEC_BLOCK])


@kernel
def coordinator_hit(
    rows: Rows,
    row: int,
    shift: int,
    geo: Table,
    specs: Table,
    members: Table,
    first: int,
    last: int,
    align: int,
    num_tokens: int,
) -> tuple[int, int]:
    """(hit, limiter): what the spec groups `first` to `last` allow of `num_tokens` tokens, and which of them was the
    last to shrink it (-1: none). Source: kv_cache_coordinator.py:796 (hybrid), :497 (one group)."""
    hash_block = geo[GEO_HASH_BLOCK]
    num_hashes = num_tokens // hash_block
    hit = num_tokens - 1
    best = hit - hit % align
    limiter = -1
    if geo[GEO_UNITARY] != 0:
        spec = specs[first]
        block = spec[SPEC_BLOCK]
        hit = floor_of(rows, row, shift, members, spec, hash_block, num_hashes, hit, spec[SPEC_EAGLE] != 0, block)
        return hit, (first if hit < best else -1)
    verified = np.zeros(MAX_SPEC_GROUPS, np.bool_)
    full_length = np.full(MAX_SPEC_GROUPS, -1, np.int64)
    while True:
        current = hit
        for s in range(first, last):
            spec = specs[s]
            full = spec[SPEC_RULE] == RULE_FULL
            if full and full_length[s - first] >= 0:
                if full_length[s - first] < current:
                    limiter = s
                    current = full_length[s - first]
                continue
            drop = spec[SPEC_EAGLE] != 0 and not verified[s - first]
            length = current
            if drop and spec[SPEC_RULE] != RULE_MAMBA:
                length = min(current + eagle_margin(spec, align), num_hashes * hash_block)
            new = floor_of(rows, row, shift, members, spec, hash_block, num_hashes, length, drop, align)
            if drop:
                verified[s - first] = True
            elif new < current:
                verified[:] = False
            if new < current and new < best:
                limiter = s
            current = new
            if full:
                full_length[s - first] = new
        if current >= hit:
            break
        hit = current
        if geo[GEO_SIMPLE] != 0:
            break
    return hit, (limiter if hit < best else -1)


@kernel
def gpu_hit(rows: Rows, row: int, geo: Table, specs: Table, members: Table, num_tokens: int) -> tuple[int, int]:
    """(hit, limiter): tokens the GPU cache gives, and the spec group whose floor was the last to shrink it (-1:
    none)."""
    first, last = geo[GEO_SPEC_START], geo[GEO_SPEC_END]
    return coordinator_hit(rows, row, 0, geo, specs, members, first, last, geo[GEO_ALIGN], num_tokens)


@kernel
def single_group_hit(rows: Rows, row: int, geo: Table, specs: Table, members: Table, num_tokens: int, s: int) -> int:
    """How far spec group `s` alone would let the hit reach. Source: kv_cache_coordinator.py:917."""
    spec = specs[s]
    hash_block = geo[GEO_HASH_BLOCK]
    num_hashes = num_tokens // hash_block
    length = num_tokens - 1
    drop = spec[SPEC_EAGLE] != 0
    align = geo[GEO_ALIGN]
    if geo[GEO_UNITARY] != 0:
        align = spec[SPEC_BLOCK]
    elif drop and spec[SPEC_RULE] != RULE_MAMBA:
        length = min(length + eagle_margin(spec, align), num_hashes * hash_block)
    return floor_of(rows, row, 0, members, spec, hash_block, num_hashes, length, drop, align)
