# SPDX-License-Identifier: Apache-2.0
"""How one KV cache group keeps a request's blocks: what it drops, what it adds, what it makes findable.

A group holds no state of its own; all of it is in the request's `Table`, so that any number of requests can run.
Source: vLLM 0.32.0 single_type_kv_cache_manager.py, the manager of each kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvrouter.simulator.hit import group_hashes
from kvrouter.simulator.pool import Block, BlockPool, Key, Stored
from kvrouter.simulator.shapes import Geometry, GroupShape


@dataclass(slots=True)
class Table:
    """One request's blocks in one group, by position; the null block where none is kept.

    cached_blocks: positions that were offered to the cache already. retired_blocks and last_state: Mamba only.
    """

    blocks: list[Block] = field(default_factory=list)
    cached_blocks: int = 0
    retired_blocks: int = 0
    last_state: int | None = None


@dataclass(slots=True)
class Job:
    """A request on its way: prompt and sampled tokens, their hashes, and its tables, one a group."""

    prompt_tokens: int
    tokens: list[int]
    hashes: list[bytes]
    tables: list[Table]
    cache_salt: str | None = None
    computed: int = 0
    junction: int = 0


class Group:
    """What all kinds share: blocks are kept until the request ends, and each can serve a hit. Kinds override."""

    def __init__(self, group_idx: int, shape: GroupShape, geometry: Geometry, pool: BlockPool) -> None:
        self.group_idx = group_idx
        self.shape = shape
        self.geometry = geometry
        self.pool = pool

    @property
    def block_size(self) -> int:
        return self.shape.block_size

    def skipped_tokens(self, computed: int) -> int:
        """How many leading tokens the next token no longer needs, `computed` tokens being done."""
        return 0

    def drop_skipped(self, table: Table, computed: int) -> None:
        """Let go of the blocks that lie wholly before what the next token needs, the last of them first."""
        count = min(self.skipped_tokens(computed) // self.block_size, len(table.blocks))
        dropped: list[Block] = []
        for i in range(count - 1, -1, -1):
            if table.blocks[i] is self.pool.null:
                break
            dropped.append(table.blocks[i])
            table.blocks[i] = self.pool.null
        self.pool.release(dropped)

    def adopt(self, table: Table, found: Sequence[Block], hit_tokens: int) -> None:
        """Start a request on the blocks of its hit, holding those that it still needs."""
        skipped = self.skipped_tokens(hit_tokens) // self.block_size
        kept = found[skipped:]
        self.pool.touch(kept)
        table.blocks = [self.pool.null] * skipped + list(kept)
        table.cached_blocks = len(table.blocks)

    def grow(self, table: Table, tokens: int) -> None:
        """Add blocks until `tokens` tokens have a slot."""
        missing = -(-tokens // self.block_size) - len(table.blocks)
        if missing > 0:
            table.blocks += self.pool.take(missing)

    def peak_blocks(self, tokens: int, chunk_tokens: int) -> int:
        """The most blocks that a request of `tokens` tokens holds at once, computed `chunk_tokens` at a time."""
        return -(-tokens // self.block_size)

    def mask(self, start: int, end: int, boundaries: Sequence[int]) -> list[bool] | None:
        """Which of the blocks start..end-1 are worth caching; None: all. boundaries: where a prompt can resume."""
        return None

    def commit(self, request: Job, tokens: int) -> None:
        """Make the full blocks of the first `tokens` tokens findable that were not offered before, with one event.

        The event spans the range even where blocks are masked or null: their hashes are left out, their tokens are not.
        """
        table, size = request.tables[self.group_idx], self.block_size
        start, end = table.cached_blocks, tokens // size
        if start >= end:
            return
        hashes = group_hashes(request.hashes, self.geometry.hash_block_size, size)
        boundaries = [request.prompt_tokens - 1]
        if request.junction:
            boundaries.append(request.junction)
        mask = self.mask(start, end, boundaries)
        cached: list[int] = []
        for i in range(start, end):
            block = table.blocks[i]
            if block is self.pool.null or (mask is not None and not mask[i - start]):
                continue
            self.pool.cache(block, Key(self.group_idx, hashes[i]))
            cached.append(i)
        salt = request.cache_salt
        self.pool.tell(
            Stored(
                group_idx=self.group_idx,
                hashes=tuple(hashes[i] for i in cached),
                parent=hashes[start - 1] if start else None,
                tokens=tuple(request.tokens[start * size : end * size]),
                block_size=size,
                extra_keys=tuple((salt,) if salt and i == 0 else None for i in cached),
            )
        )
        table.cached_blocks = end


class FullGroup(Group):
    """Full attention. Where hashes are finer than its blocks, the prompt's last hash boundary is findable as well."""

    def commit(self, request: Job, tokens: int) -> None:
        super().commit(request, tokens)
        unit, size = self.geometry.hash_block_size, self.block_size
        boundary = (request.prompt_tokens - 1) // unit * unit
        if size == unit or boundary == 0 or boundary > tokens or boundary % size == 0:
            return
        block = request.tables[self.group_idx].blocks[boundary // size]
        n = boundary // unit - 1
        if not self.pool.cache(block, Key(self.group_idx, request.hashes[n])):
            return
        salt = request.cache_salt
        self.pool.tell(
            Stored(
                group_idx=self.group_idx,
                hashes=(request.hashes[n],),
                parent=request.hashes[n - 1] if n else None,
                tokens=tuple(request.tokens[boundary - unit : boundary]),
                block_size=unit,
                extra_keys=((salt,) if salt and n == 0 else None,),
            )
        )


class WindowGroup(Group):
    """Sliding window: a token sees the `window` tokens that end with it, so older blocks are let go as it moves."""

    @property
    def window(self) -> int:
        assert self.shape.sliding_window is not None
        return self.shape.sliding_window

    def skipped_tokens(self, computed: int) -> int:
        return max(0, computed - self.window + 1)

    def peak_blocks(self, tokens: int, chunk_tokens: int) -> int:
        held = -(-(self.window - 1 + chunk_tokens) // self.block_size) + 1
        return min(held, super().peak_blocks(tokens, chunk_tokens))

    def mask(self, start: int, end: int, boundaries: Sequence[int]) -> list[bool] | None:
        size, align, interval = self.block_size, self.geometry.scheduler_block_size, self.geometry.retention_interval
        need = -(-(self.window - 1) // size)
        mask = [False] * (end - start)
        segment = align if interval is None else interval
        if segment:
            per_segment = segment // size
            if need >= per_segment:
                return None
            for i in range(start, end):
                mask[i - start] = i % per_segment >= per_segment - need
        if interval is not None:
            for boundary in boundaries:
                last = boundary // align * align // size
                for i in range(max(start, last - need), min(end, last)):
                    mask[i - start] = True
        return mask


class MambaGroup(Group):
    """Mamba in "align" mode: a block holds the state at its end; only the running one and its predecessor are kept."""

    def skipped_tokens(self, computed: int) -> int:
        return computed - 1

    def drop_skipped(self, table: Table, computed: int) -> None:
        if computed <= 1:
            return
        count = min(self.skipped_tokens(computed) // self.block_size, len(table.blocks))
        dropped: list[Block] = []
        for i in range(count - 1, table.retired_blocks - 1, -1):
            if table.blocks[i] is not self.pool.null:
                dropped.append(table.blocks[i])
                table.blocks[i] = self.pool.null
        self.pool.release(dropped)
        table.retired_blocks = max(table.retired_blocks, count)
        last = table.last_state
        if last is not None and last < -(-computed // self.block_size) - 1:
            self.pool.release([table.blocks[last]])
            table.blocks[last] = self.pool.null

    def grow(self, table: Table, tokens: int) -> None:
        required, held = -(-tokens // self.block_size), len(table.blocks)
        if required <= held:
            return
        if held:
            table.last_state = held - 1
        # A chunk writes one state, at its end: the positions it runs over get none.
        table.blocks += [self.pool.null] * (required - 1 - held)
        table.blocks += self.pool.take(1)

    def peak_blocks(self, tokens: int, chunk_tokens: int) -> int:
        # The state before a step and the one that the step writes.
        return min(2, super().peak_blocks(tokens, chunk_tokens))

    def mask(self, start: int, end: int, boundaries: Sequence[int]) -> list[bool] | None:
        interval = self.geometry.retention_interval
        if interval is None:
            return None
        size, align = self.block_size, self.geometry.scheduler_block_size
        mask = [False] * (end - start)
        if interval:
            per_segment = interval // size
            if per_segment <= 1:
                return None
            mask = [(i + 1) % per_segment == 0 for i in range(start, end)]
        for boundary in boundaries:
            i = boundary // align * align // size - 1
            if start <= i < end:
                mask[i - start] = True
        return mask


def make_group(group_idx: int, geometry: Geometry, pool: BlockPool) -> Group:
    """The group of that index, of the class that its kind asks for."""
    kinds = {"full_attention": FullGroup, "sliding_window": WindowGroup, "mamba": MambaGroup}
    return kinds[geometry.groups[group_idx].kind](group_idx, geometry.groups[group_idx], geometry, pool)
