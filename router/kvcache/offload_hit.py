# SPDX-License-Identifier: Apache-2.0
"""What the tiers beside the GPU add to its hit, as pure kernels: one rule for each connector of vLLM.

OffloadingConnector looks whole chunks up, group by group, in an order of its own. SimpleCPUOffloadConnector keeps a
block pool like the GPU's, and has vLLM's coordinator judge the part of the prompt behind the local hit. Which rule
holds is in the tables of `hit_tables.py`; a worker whose connector has no rule has neither range. Lengths are in
tokens.

Source: vLLM 0.32.0 distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py:752 :966,
v1/simple_kv_offload/manager.py:338, v1/core/sched/scheduler.py:975.
"""

from __future__ import annotations

import numpy as np

from kvrouter.router.common.jit import kernel
from kvrouter.router.kvcache.gpu_hit import MAX_SPEC_GROUPS, Rows, Table, coordinator_hit
from kvrouter.router.kvcache.hit_tables import (
    EXT_CHUNK,
    EXT_CPU_BANK,
    EXT_CPU_MASK,
    EXT_EAGLE,
    EXT_SPARSE,
    EXT_STORAGE_BANK,
    EXT_STORAGE_MASK,
    EXT_WINDOW,
    EXT_WINDOW_CHUNKS,
    GEO_CPU_END,
    GEO_CPU_START,
    GEO_EXT_END,
    GEO_EXT_MAMBA_ALIGN,
    GEO_EXT_SPARSE,
    GEO_EXT_START,
    GEO_EXT_TAIL_BLOCK,
    GEO_EXT_UNPROVEN,
    GEO_HASH_BLOCK,
    GEO_SCHEDULER_BLOCK,
    GEO_STORAGE_END,
    GEO_STORAGE_START,
    GEO_SUFFIX_ALIGN,
    RULE_CHUNKED_LOCAL,
    SPEC_CHUNK,
    SPEC_RULE,
)


@kernel
def offloaded(rows: Rows, row: int, index: int, ext: Table, storage: bool) -> bool:
    """Whether the chunk that ends at hash `index` can be loaded from the CPU tier, or with `storage` from the disk tier
    too."""
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
    """End, from chunk `first`, of the last run of `window` loadable chunks; the rightmost run must have `initial` of
    them."""
    run = 0
    need = initial
    if last > rows.shape[1] // scale:
        # The chunks past the given hashes are missing, and a miss ends the claim of the rightmost run.
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

    A chunk of k blocks ends at a multiple of k blocks, so k divides every such end; ends without a common divisor leave
    k = 1.
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
def chunks_hit(rows: Rows, row: int, geo: Table, exts: Table, num_tokens: int, local: int, storage: bool) -> int:
    """Tokens beyond `local` that an OffloadingConnector gives, a partial tail included."""
    if geo[GEO_EXT_UNPROVEN] != 0 and not single_block_chunks(rows, row, geo, exts, num_tokens):
        return 0
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
    return int(found)


@kernel
def suffix_hit(
    rows: Rows, row: int, geo: Table, specs: Table, members: Table, first: int, last: int, num_tokens: int, local: int
) -> int:
    """Tokens beyond `local` that a SimpleCPUOffloadConnector gives: what its spec groups allow of the rest of the
    prompt."""
    for s in range(first, last):
        # vLLM 0.33 offers nothing where a chunk would not begin at its own boundary; 0.32 offers other chunks than it
        # needs.
        if specs[s, SPEC_RULE] == RULE_CHUNKED_LOCAL and local % specs[s, SPEC_CHUNK] != 0:
            return 0
    shift = local // geo[GEO_HASH_BLOCK]
    align = geo[GEO_SUFFIX_ALIGN]
    found, _ = coordinator_hit(rows, row, shift, geo, specs, members, first, last, align, num_tokens - local)
    return int(found)


@kernel
def tier_hit(
    rows: Rows,
    row: int,
    geo: Table,
    specs: Table,
    members: Table,
    exts: Table,
    num_tokens: int,
    gpu: int,
    storage: bool,
) -> int:
    """Tokens the engine reuses with its CPU tier, or with `storage` with its disk tier too; at least `gpu`.

    The tiers are looked up behind the last whole scheduler block. A sub-block tail of the GPU hit is given up only for
    a longer hit.
    """
    tail = gpu % geo[GEO_SCHEDULER_BLOCK]
    local = gpu - tail
    found = 0
    if geo[GEO_EXT_START] < geo[GEO_EXT_END]:
        found = chunks_hit(rows, row, geo, exts, num_tokens, local, storage)
    first, last = geo[GEO_CPU_START], geo[GEO_CPU_END]
    if storage:
        first, last = geo[GEO_STORAGE_START], geo[GEO_STORAGE_END]
    if first < last:
        found = suffix_hit(rows, row, geo, specs, members, first, last, num_tokens, local)
    return int(local + found if found > tail else gpu)
