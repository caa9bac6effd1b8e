# SPDX-License-Identifier: Apache-2.0
"""The hit rule as pure functions: how many tokens of a prompt a worker reuses, given which blocks are resident.

Each spec group has a floor function; the hit is the greatest common fixpoint of these functions that is at most
num_tokens - 1. `offload_hit.py` computes what the CPU and disk tiers add to it. The functions do no I/O and use no
names: residency comes as rows of place bits (`router/index/matching/mirror_table.py`), and the catalog as the integer
tables of `hit_tables.py`. A block is looked up by the hash at its last hash boundary. All lengths are in tokens.

The parameters that most functions share:

- row: the first row of the worker in `tables.rows`.
- w: the worker's index in `tables.geos`.
- s: the index of a spec group in `tables.specs`.
- start, end: the range of a spec group's members in `tables.members`.
- shift: the number of hashes before the part of the prompt that is judged. It is 0 except for a tier that has its own
  block pool, in which vLLM looks up the rest of the prompt.
- max_length: the upper bound of the result.
- drop: whether the last matched block is dropped, because EAGLE needs it computed again.
- align: the number of tokens that the result is a multiple of.

SGLang's rule is the same fixpoint with other tables: windows are whole, and with EAGLE one token less is matched instead
of dropping a block.

Source: vLLM 0.32.0 v1/core/kv_cache_coordinator.py:796, v1/core/single_type_kv_cache_manager.py:733 :956 :1269 :1454;
SGLang 0.5.23 srt/mem_cache/unified_cache/unified_tree_core.py:905, components/swa.py:357, components/mamba.py:151.
"""

from __future__ import annotations

from kvrouter.router.model.kvcache.hit_tables import (
    GEO_ALIGN,
    GEO_HASH_BLOCK,
    GEO_SIMPLE,
    GEO_SPEC_END,
    GEO_SPEC_START,
    GEO_UNCACHED,
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
from kvrouter.router.model.kvcache.rule_tables import RuleTables

# Blocks judged at once: enough for wide instructions, with little wasted work at the end of a run.
_STRETCH = 32

# No model has more spec groups; the fixpoint keeps one flag for each of them in one 64-bit word.
MAX_SPEC_GROUPS = 64
# A named constant, because compiled code would shift a literal in 32 bits.
_FLAG = 1


def resident(tables: RuleTables, row: int, index: int, start: int, end: int) -> bool:
    """Return whether every member group holds the block that ends at hash `index` of the rows."""
    if index >= tables.rows.shape[1]:
        return False
    for m in range(start, end):
        if tables.rows[row + tables.members[m, MEMBER_BANK], index] & tables.members[m, MEMBER_MASK] == 0:
            return False
    return True


def run_from_zero(tables: RuleTables, row: int, shift: int, start: int, end: int, scale: int, limit: int) -> int:
    """Return the length in blocks of the unbroken resident run from block 0, at most `limit`.

    This is the only loop that walks whole prompts, so it does nothing else. `scale` is the number of hashes per block.
    """
    run = max(0, min(limit, (tables.rows.shape[1] - shift) // scale))
    for m in range(start, end):
        line = row + tables.members[m, MEMBER_BANK]
        mask = tables.members[m, MEMBER_MASK]
        block = 0
        if scale == 1 and mask & (mask - 1) == 0:
            # With a single bit to look for and no strides, whole stretches are anded at once, which the compiler
            # vectorizes.
            while block + _STRETCH <= run:
                common = mask
                for i in range(shift + block, shift + block + _STRETCH):
                    common &= tables.rows[line, i]
                if common == 0:
                    break
                block += _STRETCH
        while block < run and tables.rows[line, shift + (block + 1) * scale - 1] & mask != 0:
            block += 1
        run = block
    return run


def floor_full(
    tables: RuleTables,
    row: int,
    shift: int,
    s: int,
    hash_block: int,
    num_hashes: int,
    max_length: int,
    drop: bool,
    align: int,
) -> int:
    """Return the floor of full attention, MLA or sink attention: the unbroken resident run from block 0.

    The run is extended into the next block if hits may end inside a block.
    """
    block: int = tables.specs[s, SPEC_BLOCK]
    scale = block // hash_block
    start, end = tables.specs[s, SPEC_MEMBER_START], tables.specs[s, SPEC_MEMBER_END]
    run = run_from_zero(tables, row, shift, start, end, scale, max_length // block)
    hit = run * block
    if align < block and block % align == 0:
        inner = block // align
        first = run * inner
        last = min(first + inner - 1, max_length // align, num_hashes)
        for index in range(last - 1, first - 1, -1):
            if resident(tables, row, shift + index, start, end):
                hit = (index + 1) * align
                break
    if drop and hit > 0:
        hit -= min(align, block)
    return hit - hit % align


def floor_sliding_window(
    tables: RuleTables,
    row: int,
    shift: int,
    s: int,
    hash_block: int,
    num_hashes: int,
    max_length: int,
    drop: bool,
    align: int,
) -> int:
    """Return the floor of a sliding window: the end of the rightmost run that fills the window.

    If no run fills the window, the floor is the end of the run that starts at block 0.
    """
    block: int = tables.specs[s, SPEC_BLOCK]
    scale = block // hash_block
    start, end = tables.specs[s, SPEC_MEMBER_START], tables.specs[s, SPEC_MEMBER_END]
    need = (tables.specs[s, SPEC_WINDOW] - 1 + block - 1) // block
    if drop:
        need += 1
    run = 0
    blocks = -1
    # No block is resident past the given hashes, so a prompt that claims to be longer costs no time.
    for i in range(min(max_length // block, (tables.rows.shape[1] - shift) // scale) - 1, -1, -1):
        if not resident(tables, row, shift + (i + 1) * scale - 1, start, end):
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
    return blocks * block


def floor_chunked_local(
    tables: RuleTables,
    row: int,
    shift: int,
    s: int,
    hash_block: int,
    num_hashes: int,
    max_length: int,
    drop: bool,
    align: int,
) -> int:
    """Return the floor of chunked local attention: where the resident run ends that begins with max_length's chunk.

    The floor is the longest prefix of at most max_length that the group allows. Blocks before the chunk that max_length
    lies in need not be resident.
    """
    block: int = tables.specs[s, SPEC_BLOCK]
    scale = block // hash_block
    start, end = tables.specs[s, SPEC_MEMBER_START], tables.specs[s, SPEC_MEMBER_END]
    run: int = max_length // tables.specs[s, SPEC_CHUNK] * tables.specs[s, SPEC_CHUNK] // block
    while run < max_length // block and resident(tables, row, shift + (run + 1) * scale - 1, start, end):
        run += 1
    return run * block


def floor_mamba(
    tables: RuleTables,
    row: int,
    shift: int,
    s: int,
    hash_block: int,
    num_hashes: int,
    max_length: int,
    drop: bool,
    align: int,
) -> int:
    """Return the floor of Mamba in align mode: the rightmost boundary whose state is resident. `drop` has no effect."""
    block: int = tables.specs[s, SPEC_BLOCK]
    start, end = tables.specs[s, SPEC_MEMBER_START], tables.specs[s, SPEC_MEMBER_END]
    if align < block and block % align == 0:
        for index in range(min(max_length // align, num_hashes, tables.rows.shape[1] - shift) - 1, -1, -1):
            if resident(tables, row, shift + index, start, end):
                return (index + 1) * align
        return 0
    scale = block // hash_block
    for i in range(min(max_length // block, (tables.rows.shape[1] - shift) // scale) - 1, -1, -1):
        if (i + 1) * block % align == 0 and resident(tables, row, shift + (i + 1) * scale - 1, start, end):
            return (i + 1) * block
    return 0


def floor_of(
    tables: RuleTables,
    row: int,
    shift: int,
    s: int,
    hash_block: int,
    num_hashes: int,
    max_length: int,
    drop: bool,
    align: int,
) -> int:
    """Return the longest prefix of at most max_length that one spec group allows, by the floor function of its rule."""
    if tables.specs[s, SPEC_RULE] == RULE_FULL:
        return floor_full(tables, row, shift, s, hash_block, num_hashes, max_length, drop, align)
    if tables.specs[s, SPEC_RULE] == RULE_SLIDING_WINDOW:
        return floor_sliding_window(tables, row, shift, s, hash_block, num_hashes, max_length, drop, align)
    if tables.specs[s, SPEC_RULE] == RULE_CHUNKED_LOCAL:
        return floor_chunked_local(tables, row, shift, s, hash_block, num_hashes, max_length, drop, align)
    return floor_mamba(tables, row, shift, s, hash_block, num_hashes, max_length, drop, align)


def eagle_margin(tables: RuleTables, s: int, align: int) -> int:
    """Return the tokens that an EAGLE group matches past the candidate and then drops.

    Source: kv_cache_utils.py:792.
    """
    block: int = tables.specs[s, SPEC_BLOCK]
    if tables.specs[s, SPEC_RULE] == RULE_FULL or tables.specs[s, SPEC_RULE] == RULE_MAMBA:
        block = min(align, block)
    return block


def coordinator_hit(
    tables: RuleTables,
    row: int,
    shift: int,
    w: int,
    first: int,
    last: int,
    align: int,
    num_tokens: int,
) -> tuple[int, int]:
    """Compute how much of a prompt of `num_tokens` the spec groups from `first` to before `last` allow.

    Returns:
        The hit, and the index of the spec group that was the last to shrink it (-1 if none did).

    Source: kv_cache_coordinator.py:796 (hybrid), :497 (one group).
    """
    hash_block = tables.geos[w, GEO_HASH_BLOCK]
    num_hashes = num_tokens // hash_block
    hit = max(0, num_tokens - tables.geos[w, GEO_UNCACHED])
    best = hit - hit % align
    limiter = -1
    if tables.geos[w, GEO_UNITARY] != 0:
        block = tables.specs[first, SPEC_BLOCK]
        drop = tables.specs[first, SPEC_EAGLE] != 0
        hit = floor_of(tables, row, shift, first, hash_block, num_hashes, hit, drop, block)
        return hit, (first if hit < best else -1)
    verified = 0
    for s in range(first, last):
        tables.full_lengths[s - first] = -1
    while True:
        current = hit
        for s in range(first, last):
            full = tables.specs[s, SPEC_RULE] == RULE_FULL
            if full and tables.full_lengths[s - first] >= 0:
                if tables.full_lengths[s - first] < current:
                    limiter = s
                    current = tables.full_lengths[s - first]
                continue
            drop = tables.specs[s, SPEC_EAGLE] != 0 and verified >> (s - first) & 1 == 0
            length = current
            if drop and tables.specs[s, SPEC_RULE] != RULE_MAMBA:
                length = min(current + eagle_margin(tables, s, align), num_hashes * hash_block)
            new = floor_of(tables, row, shift, s, hash_block, num_hashes, length, drop, align)
            if drop:
                verified |= _FLAG << (s - first)
            elif new < current:
                verified = 0
            if new < current and new < best:
                limiter = s
            current = new
            if full:
                tables.full_lengths[s - first] = new
        if current >= hit:
            break
        hit = current
        if tables.geos[w, GEO_SIMPLE] != 0:
            break
    return hit, (limiter if hit < best else -1)


def gpu_hit(tables: RuleTables, row: int, w: int, num_tokens: int) -> tuple[int, int]:
    """Compute how many tokens the worker's GPU cache provides.

    Returns:
        The hit, and the index of the spec group that was the last to shrink it (-1 if none did).
    """
    first, last = tables.geos[w, GEO_SPEC_START], tables.geos[w, GEO_SPEC_END]
    return coordinator_hit(tables, row, 0, w, first, last, tables.geos[w, GEO_ALIGN], num_tokens)


def single_group_hit(tables: RuleTables, row: int, w: int, num_tokens: int, s: int) -> int:
    """Return the hit that spec group `s` alone would allow. Source: kv_cache_coordinator.py:917."""
    hash_block = tables.geos[w, GEO_HASH_BLOCK]
    num_hashes = num_tokens // hash_block
    length = max(0, num_tokens - tables.geos[w, GEO_UNCACHED])
    drop = tables.specs[s, SPEC_EAGLE] != 0
    align = tables.geos[w, GEO_ALIGN]
    if tables.geos[w, GEO_UNITARY] != 0:
        align = tables.specs[s, SPEC_BLOCK]
    elif drop and tables.specs[s, SPEC_RULE] != RULE_MAMBA:
        length = min(length + eagle_margin(tables, s, align), num_hashes * hash_block)
    return floor_of(tables, row, 0, s, hash_block, num_hashes, length, drop, align)
