# SPDX-License-Identifier: Apache-2.0
"""vLLM's hit rule as pure kernels: how many tokens of a prompt a worker reuses, given which blocks are resident.

Each spec group is a floor function; the hit is their greatest common fixpoint below num_tokens - 1. The rule for what the
CPU and disk tiers add on top is `external_hit`. No I/O, no names: residency comes as rows of place bits (`index/mirror.py`),
the catalog as the integer tables of `geometry.py`. Lengths are in tokens; a block is looked up by the hash at its last hash
boundary.

Source: vLLM 0.32.0 v1/core/kv_cache_coordinator.py:796, v1/core/single_type_kv_cache_manager.py:733 :956 :1269 :1454,
distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py:752 :966.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvrouter.router.geometry import (
    EXT_CHUNK,
    EXT_CPU_BANK,
    EXT_CPU_MASK,
    EXT_EAGLE,
    EXT_SPARSE,
    EXT_STORAGE_BANK,
    EXT_STORAGE_MASK,
    EXT_WINDOW,
    EXT_WINDOW_CHUNKS,
    GEO_ALIGN,
    GEO_EXT_END,
    GEO_EXT_MAMBA_ALIGN,
    GEO_EXT_SPARSE,
    GEO_EXT_START,
    GEO_EXT_TAIL_BLOCK,
    GEO_EXT_UNPROVEN,
    GEO_HASH_BLOCK,
    GEO_PARTIAL,
    GEO_SCHEDULER_BLOCK,
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
from kvrouter.router.jit import kernel

Rows = NDArray[np.uint16]
Table = NDArray[np.int64]

# Blocks judged at once: enough for wide instructions, little work lost at the end of a run.
STRETCH = 32

# More spec groups than any model has; the fixpoint keeps one flag and one length for each.
MAX_SPEC_GROUPS = 64


@kernel
def resident(rows: Rows, row: int, index: int, members: Table, start: int, end: int) -> bool:
    """Whether the block that ends at hash `index` is on the GPU in every member group."""
    if index >= rows.shape[1]:
        return False
    for m in range(start, end):
        if np.int64(rows[row + members[m, MEMBER_BANK], index]) & members[m, MEMBER_MASK] == 0:
            return False
    return True


@kernel
def run_from_zero(rows: Rows, row: int, members: Table, start: int, end: int, scale: int, limit: int) -> int:
    """Blocks of the unbroken run from block 0, at most `limit`. The one loop that walks whole prompts, so it is kept bare."""
    run = min(limit, rows.shape[1] // scale)
    for m in range(start, end):
        line = rows[row + members[m, MEMBER_BANK]]
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
    members: Table,
    spec: Table,
    hash_block: int,
    num_hashes: int,
    max_length: int,
    drop: bool,
    align: int,
) -> int:
    """Full attention, MLA, sink: the unbroken run from 0, extended into the next block where hits may end inside one."""
    block = spec[SPEC_BLOCK]
    scale = block // hash_block
    start, end = spec[SPEC_MEMBER_START], spec[SPEC_MEMBER_END]
    run = run_from_zero(rows, row, members, start, end, scale, max_length // block)
    hit = run * block
    if align < block and block % align == 0:
        inner = block // align
        first = run * inner
        last = min(first + inner - 1, max_length // align, num_hashes)
        for index in range(last - 1, first - 1, -1):
            if resident(rows, row, index, members, start, end):
                hit = (index + 1) * align
                break
    if drop and hit > 0:
        hit -= min(align, block)
    return int(hit - hit % align)


@kernel
def floor_sliding_window(
    rows: Rows,
    row: int,
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
    # Nothing is resident past the hashes that were asked for; a claimed length costs no time.
    for i in range(min(max_length // block, rows.shape[1] // scale) - 1, -1, -1):
        if not resident(rows, row, (i + 1) * scale - 1, members, start, end):
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
    while run < max_length // block and resident(rows, row, (run + 1) * scale - 1, members, start, end):
        run += 1
    return int(run * block)


@kernel
def floor_mamba(
    rows: Rows,
    row: int,
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
        for index in range(min(max_length // align, num_hashes, rows.shape[1]) - 1, -1, -1):
            if resident(rows, row, index, members, start, end):
                return (index + 1) * align
        return 0
    scale = block // hash_block
    for i in range(min(max_length // block, rows.shape[1] // scale) - 1, -1, -1):
        if (i + 1) * block % align == 0 and resident(rows, row, (i + 1) * scale - 1, members, start, end):
            return int((i + 1) * block)
    return 0


@kernel
def floor_of(
    rows: Rows,
    row: int,
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
        return floor_full(rows, row, members, spec, hash_block, num_hashes, max_length, drop, align)
    if spec[SPEC_RULE] == RULE_SLIDING_WINDOW:
        return floor_sliding_window(rows, row, members, spec, hash_block, num_hashes, max_length, drop, align)
    if spec[SPEC_RULE] == RULE_CHUNKED_LOCAL:
        return floor_chunked_local(rows, row, members, spec, hash_block, num_hashes, max_length, drop, align)
    return floor_mamba(rows, row, members, spec, hash_block, num_hashes, max_length, drop, align)


@kernel
def eagle_margin(spec: Table, geo: Table) -> int:
    """Tokens that an EAGLE group matches past the candidate before it drops them. Source: kv_cache_utils.py:792."""
    fine = geo[GEO_PARTIAL] != 0 and (spec[SPEC_RULE] == RULE_FULL or spec[SPEC_RULE] == RULE_MAMBA)
    if fine and spec[SPEC_BLOCK] > geo[GEO_HASH_BLOCK]:
        return int(geo[GEO_HASH_BLOCK])
    return int(spec[SPEC_BLOCK])


@kernel
def gpu_hit(rows: Rows, row: int, geo: Table, specs: Table, members: Table, num_tokens: int) -> tuple[int, int]:
    """(hit, limiter): tokens the GPU cache gives, and the spec group whose floor was the last to shrink it (-1: none).

    Source: kv_cache_coordinator.py:796 (hybrid), :497 (one group).
    """
    hash_block = geo[GEO_HASH_BLOCK]
    align = geo[GEO_ALIGN]
    num_hashes = num_tokens // hash_block
    first, last = geo[GEO_SPEC_START], geo[GEO_SPEC_END]
    hit = num_tokens - 1
    best = hit - hit % align
    limiter = -1
    if geo[GEO_UNITARY] != 0:
        spec = specs[first]
        hit = floor_of(rows, row, members, spec, hash_block, num_hashes, hit, spec[SPEC_EAGLE] != 0, spec[SPEC_BLOCK])
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
                length = min(current + eagle_margin(spec, geo), num_hashes * hash_block)
            new = floor_of(rows, row, members, spec, hash_block, num_hashes, length, drop, align)
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
def alone(rows: Rows, row: int, geo: Table, specs: Table, members: Table, num_tokens: int, s: int) -> int:
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
        length = min(length + eagle_margin(spec, geo), num_hashes * hash_block)
    return floor_of(rows, row, members, spec, hash_block, num_hashes, length, drop, align)


@kernel
def offloaded(rows: Rows, row: int, index: int, ext: Table, storage: bool) -> bool:
    """Whether the chunk that ends at hash `index` can be loaded from the CPU tier, or with `storage` from the disk tier too."""
    if index < 0 or index >= rows.shape[1]:
        return False
    if np.int64(rows[row + ext[EXT_CPU_BANK], index]) & ext[EXT_CPU_MASK] != 0:
        return True
    return storage and np.int64(rows[row + ext[EXT_STORAGE_BANK], index]) & ext[EXT_STORAGE_MASK] != 0


@kernel
def offload_prefix(rows: Rows, row: int, ext: Table, storage: bool, scale: int, first: int, last: int) -> int:
    """Consecutive loadable chunks from chunk `first` on, below chunk `last`."""
    chunk = first
    while chunk < last and offloaded(rows, row, (chunk + 1) * scale - 1, ext, storage):
        chunk += 1
    return chunk - first


@kernel
def offload_window(
    rows: Rows, row: int, ext: Table, storage: bool, scale: int, first: int, last: int, window: int, initial: int
) -> int:
    """End, from chunk `first`, of the last run of `window` loadable chunks; the rightmost run must have `initial` of them."""
    run = 0
    need = initial
    if last > rows.shape[1] // scale:
        # The chunks past the hashes that were asked for are missing, and a miss ends the claim of the rightmost run.
        need = window
        last = rows.shape[1] // scale
    for chunk in range(last - 1, first - 1, -1):
        if offloaded(rows, row, (chunk + 1) * scale - 1, ext, storage):
            run += 1
        else:
            run = 0
            need = window
        if run == need:
            return chunk - first + need
    return run


@kernel
def complete_chunks(rows: Rows, row: int, geo: Table, exts: Table, num_tokens: int, local: int, storage: bool) -> int:
    """Tokens beyond `local` that whole chunks of an offload tier give. Source: offloading/scheduler.py:752."""
    first, last = geo[GEO_EXT_START], geo[GEO_EXT_END]
    num_hashes = num_tokens // geo[GEO_HASH_BLOCK]
    limit = num_tokens
    if geo[GEO_EXT_SPARSE] != 0:
        limit -= 1
        if geo[GEO_EXT_MAMBA_ALIGN] != 0:
            limit -= limit % geo[GEO_EXT_MAMBA_ALIGN]
    sparse_first = first
    while sparse_first < last and exts[sparse_first, EXT_SPARSE] == 0:
        sparse_first += 1
    hit = 0
    verified = np.zeros(MAX_SPEC_GROUPS, np.bool_)
    begin = first
    again = first < last
    while again:
        again = False
        seen_sparse = False
        next_begin = last
        for g in range(begin, last):
            ext = exts[g]
            chunk = ext[EXT_CHUNK]
            scale = chunk // geo[GEO_HASH_BLOCK]
            chunks = num_hashes // scale
            unverified = ext[EXT_EAGLE] != 0 and not verified[g - first]
            limit = min(limit, chunks * chunk)
            if limit - local < chunk:
                return 0
            query = min(limit + chunk, chunks * chunk) if unverified else limit
            end = min((query + chunk - 1) // chunk, chunks)
            start = local // chunk
            if ext[EXT_SPARSE] == 0:
                found = offload_prefix(rows, row, ext, storage, scale, start, end)
            else:
                window = ext[EXT_WINDOW_CHUNKS]
                extra = 1 if unverified else 0
                initial = window
                if ext[EXT_WINDOW] > 0:
                    candidate = min(limit, (end - extra) * chunk)
                    padding = (-candidate) % chunk
                    initial = max(window, (ext[EXT_WINDOW] - 1 + padding + chunk - 1) // chunk)
                found = offload_window(rows, row, ext, storage, scale, start, end, window + extra, initial + extra)
            if found == 0:
                return 0
            if unverified:
                found -= 1
                verified[g - first] = True
            limit = min(limit, chunk * (start + found))
            new = limit - local
            if new < chunk:
                return 0
            if new < hit:
                if ext[EXT_EAGLE] == 0:
                    verified[:] = False
                if seen_sparse and not again:
                    again = True
                    next_begin = sparse_first
            seen_sparse = seen_sparse or ext[EXT_SPARSE] != 0
            hit = new
        begin = next_begin
    return hit


@kernel
def single_block_chunks(rows: Rows, row: int, geo: Table, exts: Table, num_tokens: int) -> bool:
    """Whether this prompt's own chunks show that a chunk is one block.

    A chunk of k blocks ends at a multiple of k blocks, so k divides every such end; ends without a common divisor leave k = 1.
    """
    divisor = 0
    for g in range(geo[GEO_EXT_START], geo[GEO_EXT_END]):
        scale = exts[g, EXT_CHUNK] // geo[GEO_HASH_BLOCK]
        for chunk in range(min(num_tokens // exts[g, EXT_CHUNK], rows.shape[1] // scale)):
            if not offloaded(rows, row, (chunk + 1) * scale - 1, exts[g], True):
                continue
            a = chunk + 1
            b = divisor
            while b != 0:
                a, b = b, a % b
            divisor = a
            if divisor == 1:
                return True
    return False


@kernel
def external_hit(rows: Rows, row: int, geo: Table, exts: Table, num_tokens: int, gpu: int, storage: bool) -> int:
    """Tokens the engine reuses with its offload tiers, at least `gpu`.

    A sub-block tail of the GPU hit is given up only for a longer external hit.
    Source: v1/core/sched/scheduler.py:975, offloading/scheduler.py:966.
    """
    if geo[GEO_EXT_UNPROVEN] != 0 and not single_block_chunks(rows, row, geo, exts, num_tokens):
        return gpu
    tail = gpu % geo[GEO_SCHEDULER_BLOCK]
    local = gpu - tail
    found = complete_chunks(rows, row, geo, exts, num_tokens, local, storage)
    block = geo[GEO_EXT_TAIL_BLOCK]
    if block != 0:
        hash_block = geo[GEO_HASH_BLOCK]
        complete = local + found
        boundary = min(num_tokens - 1, complete + block - 1)
        boundary -= boundary % hash_block
        while boundary > complete:
            everywhere = True
            for g in range(geo[GEO_EXT_START], geo[GEO_EXT_END]):
                if not offloaded(rows, row, boundary // hash_block - 1, exts[g], storage):
                    everywhere = False
                    break
            if everywhere:
                found = boundary - local
                break
            boundary -= hash_block
    return local + found if found > tail else gpu
