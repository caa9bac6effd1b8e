# SPDX-License-Identifier: Apache-2.0
"""The prefix that a replica reuses of a prompt: vLLM's finders run on the pool, group by group, until all agree.

Predictions are judged against this result, so it shares no code with the router's rule and favours plain loops over
speed. It returns blocks, not only a length, because the allocation holds exactly the blocks that were found.
Source: vLLM 0.32.0 single_type_kv_cache_manager.py (finders), kv_cache_coordinator.py:796 (agreement). No EAGLE drops.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvrouter.simulator.cache.pool import Block, BlockPool
from kvrouter.simulator.cache.shapes import FULL_KINDS, Geometry, GroupShape


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The longest prefix that every group can resume at. Lengths in tokens."""

    # Per group, one entry for each block of the hit; the null block where the group needs none.
    blocks: tuple[list[Block], ...]
    tokens: int
    # The longest prefix that some group could resume at alone, if it is longer than the hit of all groups, or 0. Groups
    # that keep only some of their blocks keep those needed there, so that the next prompt with the same beginning can
    # resume at this length.
    junction: int


def group_hashes(hashes: Sequence[bytes], hash_block_size: int, block_size: int) -> Sequence[bytes]:
    """Return the hashes at the ends of a group's own blocks, each of which covers the whole prefix."""
    step = block_size // hash_block_size
    return hashes if step == 1 else hashes[step - 1 :: step]


def _full(
    pool: BlockPool, ids: Sequence[int], hashes: Sequence[bytes], limit: int, size: int, align: int
) -> list[list[Block]]:
    """Return the unbroken run from block 0, cut down to the alignment."""
    columns: list[list[Block]] = []
    for block_hash in hashes[: limit // size]:
        column = pool.find(ids, block_hash)
        if column is None:
            break
        columns.append(column)
    while len(columns) * size % align:
        columns.pop()
    return columns


def _sliding(
    pool: BlockPool, ids: Sequence[int], hashes: Sequence[bytes], limit: int, size: int, align: int, window: int
) -> list[list[Block]]:
    """Return the rightmost aligned run that covers the window, else the aligned part of a run from block 0."""
    need = -(-(window - 1) // size)
    nothing = [pool.null] * len(ids)
    columns = [nothing] * (limit // size)
    run = 0
    for i in range(len(columns) - 1, -1, -1):
        column = pool.find(ids, hashes[i])
        if column is None:
            run = 0
            continue
        if run == 0 and (i + 1) * size % align:
            continue
        columns[i] = column
        run += 1
        if run >= need:
            return columns[: i + run]
    del columns[run:]
    while len(columns) * size % align:
        columns.pop()
    return columns


def _chunked(
    pool: BlockPool, ids: Sequence[int], hashes: Sequence[bytes], limit: int, size: int, chunk: int
) -> list[list[Block]]:
    """Return null blocks up to the chunk of `limit`, which needs none before it, then the unbroken run inside it."""
    columns = [[pool.null] * len(ids)] * (limit // chunk * chunk // size)
    for block_hash in hashes[len(columns) : limit // size]:
        column = pool.find(ids, block_hash)
        if column is None:
            break
        columns.append(column)
    return columns


def _mamba(
    pool: BlockPool, ids: Sequence[int], hashes: Sequence[bytes], limit: int, size: int, align: int
) -> list[list[Block]]:
    """Return the rightmost aligned block whose state is cached, behind null blocks, as none before it is needed."""
    for i in range(limit // size - 1, -1, -1):
        column = pool.find(ids, hashes[i])
        if column is not None and (i + 1) * size % align == 0:
            return [[pool.null] * len(ids)] * i + [column]
    return []


def _columns(
    pool: BlockPool, shape: GroupShape, ids: Sequence[int], hashes: Sequence[bytes], limit: int, align: int
) -> list[list[Block]]:
    if shape.kind in FULL_KINDS:
        return _full(pool, ids, hashes, limit, shape.block_size, align)
    if shape.kind == "mamba":
        return _mamba(pool, ids, hashes, limit, shape.block_size, align)
    if shape.kind == "chunked_local_attention":
        assert shape.attention_chunk is not None
        return _chunked(pool, ids, hashes, limit, shape.block_size, shape.attention_chunk)
    assert shape.sliding_window is not None
    return _sliding(pool, ids, hashes, limit, shape.block_size, align, shape.sliding_window)


def find_prefix(pool: BlockPool, geometry: Geometry, hashes: Sequence[bytes], limit: int) -> PrefixHit:
    """Find the longest prefix of at most `limit` tokens that every group can resume at. Changes nothing.

    `hashes` are the prompt's block hashes at the hash block size, in prompt order.
    """
    align = geometry.scheduler_block_size
    classes = geometry.classes
    views = [group_hashes(hashes, geometry.hash_block_size, geometry.groups[ids[0]].block_size) for ids in classes]
    one_pass = len(geometry.groups) == 1 or (len(classes) == 2 and geometry.groups[classes[0][0]].kind in FULL_KINDS)
    columns: list[list[list[Block]]] = [[] for _ in classes]
    longest, candidate = 0, limit
    first_pass = True
    while True:
        length = candidate
        for n, ids in enumerate(classes):
            shape = geometry.groups[ids[0]]
            if shape.kind in FULL_KINDS and not first_pass:
                # Any prefix of an unbroken run is a run too, so the first result only needs trimming.
                length = min(length, len(columns[n]) * shape.block_size)
                continue
            columns[n] = _columns(pool, shape, ids, views[n], length, align)
            length = len(columns[n]) * shape.block_size
            longest = max(longest, length)
        first_pass = False
        if length >= candidate:
            break
        candidate = length
        if one_pass:
            break
    blocks: list[list[Block]] = [[] for _ in geometry.groups]
    for n, ids in enumerate(classes):
        kept_columns = columns[n][: candidate // geometry.groups[ids[0]].block_size]
        for member, group_idx in enumerate(ids):
            blocks[group_idx] = [column[member] for column in kept_columns]
    return PrefixHit(tuple(blocks), candidate, longest if longest > candidate else 0)
