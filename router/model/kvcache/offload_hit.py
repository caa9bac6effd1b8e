# SPDX-License-Identifier: Apache-2.0
"""The hits of the tiers beside the GPU, as pure functions: one rule per connector of vLLM, and one for SGLang's HiCache.

An OffloadingConnector looks up whole chunks, group by group: first those of full attention, then those that need only a
window, the longest window first. A SimpleCPUOffloadConnector keeps a block pool like that of the GPU, and vLLM's
coordinator judges the part of the prompt after the local hit by it. The tables of `hit_tables.py` show which rule holds
for a worker: the range of that rule is not empty. If no rule is known for a worker's connector, all ranges are empty.

A chunk that a worker lacks may also come from the tiers that another worker, its lender, lends (`RuleTables.lender_row`).
vLLM's look-up goes from chunk to chunk through the worker's own CPU tier, its disk and then the lender, so all count alike.

The functions share most parameters with those of `gpu_hit.py`. Besides, `x` is the index of a group in `tables.exts`,
`storage` is whether the disk tier counts too, and `scale` is the number of hashes per chunk. All lengths are in tokens
unless a function says that it counts chunks.

Source: vLLM 0.32.0 distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py:752 :966,
v1/simple_kv_offload/manager.py:338, v1/core/sched/scheduler.py:975.
"""

from __future__ import annotations

from kvrouter.router.model.kvcache.gpu_hit import coordinator_hit, resident
from kvrouter.router.model.kvcache.hit_tables import (
    EXT_CHUNK,
    EXT_CPU_BANK,
    EXT_CPU_MASK,
    EXT_EAGLE,
    EXT_LENT_STORAGE_MASK,
    EXT_SPARSE,
    EXT_STORAGE_BANK,
    EXT_STORAGE_MASK,
    EXT_WINDOW,
    EXT_WINDOW_CHUNKS,
    GEO_ALIGN,
    GEO_CPU_END,
    GEO_CPU_START,
    GEO_EXT_END,
    GEO_EXT_MAMBA_ALIGN,
    GEO_EXT_SPARSE,
    GEO_EXT_START,
    GEO_EXT_TAIL_BLOCK,
    GEO_EXT_UNPROVEN,
    GEO_HASH_BLOCK,
    GEO_JOINT_END,
    GEO_JOINT_START,
    GEO_SCHEDULER_BLOCK,
    GEO_SPEC_START,
    GEO_STORAGE_END,
    GEO_STORAGE_START,
    GEO_SUFFIX_ALIGN,
    RULE_CHUNKED_LOCAL,
    RULE_FULL,
    RULE_SLIDING_WINDOW,
    SPEC_BLOCK,
    SPEC_CHUNK,
    SPEC_MEMBER_END,
    SPEC_MEMBER_START,
    SPEC_RULE,
    SPEC_WINDOW,
)
from kvrouter.router.model.kvcache.rule_tables import RuleTables

# SGLang loads nothing back for fewer missing tokens of full attention, unless a window or a state is loaded too.
# Source: SGLang 0.5.23 srt/mem_cache/unified_radix_cache.py:576 :1879.
LOAD_BACK_TOKENS = 10

# Chunks looked up at once: enough for wide instructions, with little wasted work at the end of a run.
_STRETCH = 32

# A named constant, because compiled code would shift a literal in 32 bits.
_FLAG = 1


def offloaded(tables: RuleTables, row: int, index: int, x: int, storage: bool) -> bool:
    """Return whether the chunk that ends at hash `index` can be loaded from the CPU tier, or from disk with `storage`.

    A chunk that the worker at `tables.lender_row` holds and lends counts too, if there is such a worker.
    """
    if index < 0 or index >= tables.rows.shape[1]:
        return False
    if tables.rows[row + tables.exts[x, EXT_CPU_BANK], index] & tables.exts[x, EXT_CPU_MASK] != 0:
        return True
    if storage and tables.rows[row + tables.exts[x, EXT_STORAGE_BANK], index] & tables.exts[x, EXT_STORAGE_MASK] != 0:
        return True
    lender, y = tables.lender_row, x + tables.lender_shift
    return lender >= 0 and (
        tables.rows[lender + tables.exts[y, EXT_CPU_BANK], index] & tables.exts[y, EXT_CPU_MASK] != 0
        or tables.rows[lender + tables.exts[y, EXT_STORAGE_BANK], index] & tables.exts[y, EXT_LENT_STORAGE_MASK] != 0
    )


def all_offloaded(tables: RuleTables, row: int, x: int, storage: bool, first: int, last: int) -> bool:
    """Return whether `offloaded` holds for each hash from `first` to `last - 1`; the rows must have all of them.

    The loops have no branches, so that the compiler vectorizes them.
    """
    cpu, cpu_mask = row + tables.exts[x, EXT_CPU_BANK], tables.exts[x, EXT_CPU_MASK]
    disk, disk_mask = row + tables.exts[x, EXT_STORAGE_BANK], tables.exts[x, EXT_STORAGE_MASK] if storage else 0
    missing = 0
    if tables.lender_row < 0:
        for i in range(first, last):
            held = (tables.rows[cpu, i] & cpu_mask) | (tables.rows[disk, i] & disk_mask)
            missing |= held == 0
        return missing == 0
    y = x + tables.lender_shift
    lent, lent_mask = tables.lender_row + tables.exts[y, EXT_CPU_BANK], tables.exts[y, EXT_CPU_MASK]
    lent_disk = tables.lender_row + tables.exts[y, EXT_STORAGE_BANK]
    lent_disk_mask = tables.exts[y, EXT_LENT_STORAGE_MASK]
    for i in range(first, last):
        held = (
            (tables.rows[cpu, i] & cpu_mask)
            | (tables.rows[disk, i] & disk_mask)
            | (tables.rows[lent, i] & lent_mask)
            | (tables.rows[lent_disk, i] & lent_disk_mask)
        )
        missing |= held == 0
    return missing == 0


def offload_prefix(tables: RuleTables, row: int, x: int, storage: bool, scale: int, first: int, last: int) -> int:
    """Return how many consecutive chunks can be loaded from chunk `first` on, below chunk `last`."""
    last = min(last, tables.rows.shape[1] // scale)
    chunk = first
    while scale == 1 and chunk + _STRETCH <= last and all_offloaded(tables, row, x, storage, chunk, chunk + _STRETCH):
        chunk += _STRETCH
    while chunk < last and offloaded(tables, row, (chunk + 1) * scale - 1, x, storage):
        chunk += 1
    return chunk - first


def offload_window(
    tables: RuleTables, row: int, x: int, storage: bool, scale: int, first: int, last: int, window: int, initial: int
) -> int:
    """Return the end of the last run of `window` loadable chunks, counted in chunks from chunk `first`.

    A run that ends right before chunk `last` needs `initial` chunks instead. If no run is long enough, return the length
    of the run that starts at `first`.
    """
    run = 0
    need = initial
    if last > tables.rows.shape[1] // scale:
        # The chunks past the given hashes are missing, so no run ends right before chunk `last`.
        need = window
        last = tables.rows.shape[1] // scale
    if scale == 1 and last > first and all_offloaded(tables, row, x, storage, max(first, last - need), last):
        # The usual case: either a run of `need` chunks or one of all chunks.
        return last - first
    for chunk in range(last - 1, first - 1, -1):
        if offloaded(tables, row, (chunk + 1) * scale - 1, x, storage):
            run += 1
        else:
            run = 0
            need = window
        if run == need:
            return chunk - first + need
    return run


def complete_chunks(tables: RuleTables, row: int, w: int, num_tokens: int, local: int, storage: bool) -> int:
    """Return how many tokens after the first `local` ones whole chunks of an offload tier provide.

    Source: offloading/scheduler.py:752.
    """
    first, last = tables.geos[w, GEO_EXT_START], tables.geos[w, GEO_EXT_END]
    num_hashes = num_tokens // tables.geos[w, GEO_HASH_BLOCK]
    limit = num_tokens
    if tables.geos[w, GEO_EXT_SPARSE] != 0:
        limit -= 1
        if tables.geos[w, GEO_EXT_MAMBA_ALIGN] != 0:
            limit -= limit % tables.geos[w, GEO_EXT_MAMBA_ALIGN]
    sparse_first = first
    while sparse_first < last and tables.exts[sparse_first, EXT_SPARSE] == 0:
        sparse_first += 1
    hit = 0
    verified = 0
    begin = first
    again = first < last
    while again:
        again = False
        seen_sparse = False
        next_begin = last
        for x in range(begin, last):
            chunk = tables.exts[x, EXT_CHUNK]
            scale = chunk // tables.geos[w, GEO_HASH_BLOCK]
            chunks = num_hashes // scale
            unverified = tables.exts[x, EXT_EAGLE] != 0 and verified >> (x - first) & 1 == 0
            limit = min(limit, chunks * chunk)
            if limit - local < chunk:
                return 0
            query = min(limit + chunk, chunks * chunk) if unverified else limit
            end = min((query + chunk - 1) // chunk, chunks)
            start = local // chunk
            if tables.exts[x, EXT_SPARSE] == 0:
                found = offload_prefix(tables, row, x, storage, scale, start, end)
            else:
                window = tables.exts[x, EXT_WINDOW_CHUNKS]
                extra = 1 if unverified else 0
                initial = window
                if tables.exts[x, EXT_WINDOW] > 0:
                    candidate = min(limit, (end - extra) * chunk)
                    padding = (-candidate) % chunk
                    initial = max(window, (tables.exts[x, EXT_WINDOW] - 1 + padding + chunk - 1) // chunk)
                found = offload_window(tables, row, x, storage, scale, start, end, window + extra, initial + extra)
            if found == 0:
                return 0
            if unverified:
                found -= 1
                verified |= _FLAG << (x - first)
            limit = min(limit, chunk * (start + found))
            new = limit - local
            if new < chunk:
                return 0
            if new < hit:
                if tables.exts[x, EXT_EAGLE] == 0:
                    verified = 0
                if seen_sparse and not again:
                    again = True
                    next_begin = sparse_first
            seen_sparse = seen_sparse or tables.exts[x, EXT_SPARSE] != 0
            hit = new
        begin = next_begin
    return hit


def single_block_chunks(tables: RuleTables, row: int, w: int, num_tokens: int) -> bool:
    """Return whether this prompt's own chunks show that a chunk is one block.

    A chunk of k blocks ends at a multiple of k blocks, so k divides the end of every chunk. If the ends have no common
    divisor, k is 1.
    """
    divisor = 0
    for g in range(tables.geos[w, GEO_EXT_START], tables.geos[w, GEO_EXT_END]):
        scale = tables.exts[g, EXT_CHUNK] // tables.geos[w, GEO_HASH_BLOCK]
        for chunk in range(min(num_tokens // tables.exts[g, EXT_CHUNK], tables.rows.shape[1] // scale)):
            if not offloaded(tables, row, (chunk + 1) * scale - 1, g, True):
                continue
            a = chunk + 1
            b = divisor
            while b != 0:
                a, b = b, a % b
            divisor = a
            if divisor == 1:
                return True
    return False


def chunks_hit(tables: RuleTables, row: int, w: int, num_tokens: int, local: int, storage: bool) -> int:
    """Return how many tokens after the first `local` ones an OffloadingConnector provides, a partial tail included."""
    if tables.geos[w, GEO_EXT_UNPROVEN] != 0 and not single_block_chunks(tables, row, w, num_tokens):
        return 0
    found = complete_chunks(tables, row, w, num_tokens, local, storage)
    block = tables.geos[w, GEO_EXT_TAIL_BLOCK]
    if block != 0:
        hash_block = tables.geos[w, GEO_HASH_BLOCK]
        complete = local + found
        boundary = min(num_tokens - 1, complete + block - 1)
        boundary -= boundary % hash_block
        while boundary > complete:
            everywhere = True
            for g in range(tables.geos[w, GEO_EXT_START], tables.geos[w, GEO_EXT_END]):
                if not offloaded(tables, row, boundary // hash_block - 1, g, storage):
                    everywhere = False
                    break
            if everywhere:
                found = boundary - local
                break
            boundary -= hash_block
    return found


def suffix_hit(tables: RuleTables, row: int, w: int, first: int, last: int, num_tokens: int, local: int) -> int:
    """Return how many tokens after the first `local` ones a SimpleCPUOffloadConnector provides.

    The rules of the tier's spec groups are applied to the rest of the prompt; the groups have the indices `first` to
    `last - 1` in `tables.specs`.
    """
    for s in range(first, last):
        # If a chunk of local attention would not begin at its own boundary, vLLM 0.33 offers nothing, and 0.32 offers
        # other chunks than it needs.
        if tables.specs[s, SPEC_RULE] == RULE_CHUNKED_LOCAL and local % tables.specs[s, SPEC_CHUNK] != 0:
            return 0
    shift = local // tables.geos[w, GEO_HASH_BLOCK]
    align = tables.geos[w, GEO_SUFFIX_ALIGN]
    found, _ = coordinator_hit(tables, row, shift, w, first, last, align, num_tokens - local)
    return found


def loads_back(tables: RuleTables, row: int, w: int, hit: int) -> bool:
    """Return whether SGLang's HiCache loads the blocks of the first `hit` tokens that are not on the GPU.

    The caller has checked that every needed block is on the GPU or in the host tier.
    """
    first = tables.geos[w, GEO_SPEC_START]
    count = tables.geos[w, GEO_JOINT_END] - tables.geos[w, GEO_JOINT_START]
    missing = 0
    for s in range(first, first + count):
        block = tables.specs[s, SPEC_BLOCK]
        scale = block // tables.geos[w, GEO_HASH_BLOCK]
        start, end = tables.specs[s, SPEC_MEMBER_START], tables.specs[s, SPEC_MEMBER_END]
        last = hit // block
        begin = last - 1
        if tables.specs[s, SPEC_RULE] == RULE_FULL:
            begin = 0
        elif tables.specs[s, SPEC_RULE] == RULE_SLIDING_WINDOW:
            begin = last - (tables.specs[s, SPEC_WINDOW] - 1 + block - 1) // block
        for i in range(max(begin, 0), last):
            if resident(tables, row, (i + 1) * scale - 1, start, end):
                continue
            if tables.specs[s, SPEC_RULE] != RULE_FULL:
                return True
            missing += block
            if missing >= LOAD_BACK_TOKENS:
                return True
    return False


def joint_hit(tables: RuleTables, row: int, w: int, num_tokens: int, gpu: int) -> int:
    """Return how many tokens SGLang reuses with its host tier, at least `gpu`.

    Blocks on the GPU and in the host tier count alike, provided that HiCache loads the missing ones.
    """
    first, last = tables.geos[w, GEO_JOINT_START], tables.geos[w, GEO_JOINT_END]
    hit, _ = coordinator_hit(tables, row, 0, w, first, last, tables.geos[w, GEO_ALIGN], num_tokens)
    return hit if hit > gpu and loads_back(tables, row, w, hit) else gpu


def tier_hit(
    tables: RuleTables,
    row: int,
    w: int,
    num_tokens: int,
    gpu: int,
    storage: bool,
) -> int:
    """Return how many tokens the engine reuses with its CPU tier, or with `storage` with its disk tier too.

    The result is at least `gpu`, the hit of the GPU alone. The engine looks the tiers up from the last whole scheduler
    block on. It gives up the part of the GPU's hit after that block only for a longer hit.
    """
    if tables.geos[w, GEO_JOINT_START] < tables.geos[w, GEO_JOINT_END]:
        return joint_hit(tables, row, w, num_tokens, gpu)
    tail = gpu % tables.geos[w, GEO_SCHEDULER_BLOCK]
    local = gpu - tail
    found = 0
    if tables.geos[w, GEO_EXT_START] < tables.geos[w, GEO_EXT_END]:
        found = chunks_hit(tables, row, w, num_tokens, local, storage)
    first, last = tables.geos[w, GEO_CPU_START], tables.geos[w, GEO_CPU_END]
    if storage:
        first, last = tables.geos[w, GEO_STORAGE_START], tables.geos[w, GEO_STORAGE_END]
    if first < last:
        found = suffix_hit(tables, row, w, first, last, num_tokens, local)
    return local + found if found > tail else gpu
