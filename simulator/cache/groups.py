# SPDX-License-Identifier: Apache-2.0
"""How one KV cache group keeps a request's blocks: which it drops, which it adds, and which it makes findable.

A group holds no state of a request: that is in the request's `Table`, so any number of requests can run.
Source: vLLM 0.32.0 single_type_kv_cache_manager.py, the manager of each kind.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvrouter.simulator.cache.job import Job, Table
from kvrouter.simulator.cache.pool import Block, BlockPool, Key, Stored
from kvrouter.simulator.cache.shapes import Geometry, GroupShape, Kind


class Group:
    """The behaviour that all kinds share: blocks are kept until the request ends, and each can serve a hit.

    A subclass for each kind overrides what differs.
    """

    def __init__(self, group_idx: int, shape: GroupShape, geometry: Geometry, pool: BlockPool) -> None:
        self.group_idx = group_idx
        self.shape = shape
        self.geometry = geometry
        self.pool = pool
        self.block_size = shape.block_size

    def step_starts(self) -> None:
        """Note that the next step is about to be planned."""

    def skipped_tokens(self, computed: int) -> int:
        """Return how many leading tokens the next token no longer needs once `computed` tokens are computed."""
        return 0

    def drop_skipped(self, table: Table, computed: int) -> None:
        """Release the blocks that lie wholly before the tokens that the next token needs, the last of them first."""
        count = min(self.skipped_tokens(computed) // self.block_size, len(table.blocks))
        dropped: list[Block] = []
        for i in range(count - 1, -1, -1):
            if table.blocks[i] is self.pool.null:
                break
            dropped.append(table.blocks[i])
            table.blocks[i] = self.pool.null
        self.pool.release(dropped)

    def adopt(self, table: Table, found: Sequence[Block], reached_tokens: int) -> None:
        """Start a request on the blocks of its hit, and hold the blocks that it still needs.

        Args:
            table: The request's empty table.
            found: The blocks of the hit in this group.
            reached_tokens: The length at which computation continues, behind the hit and the tokens to load.
        """
        skipped = self.skipped_tokens(reached_tokens) // self.block_size
        kept_blocks = found[skipped:]
        self.pool.touch(kept_blocks)
        table.blocks = [self.pool.null] * skipped + list(kept_blocks)
        table.cached_blocks = len(table.blocks)

    def receive(self, table: Table, reached_tokens: int, loaded_tokens: int) -> None:
        """Take the blocks that a load of the last `loaded_tokens` of `reached_tokens` writes, if any are needed."""
        if min(reached_tokens - self.skipped_tokens(reached_tokens), loaded_tokens) > 0:
            table.blocks += self.pool.take(max(0, -(-reached_tokens // self.block_size) - len(table.blocks)))

    def needed_blocks(
        self, table: Table, tokens: int, found: Sequence[Block], reached_tokens: int, cap: int | None = None
    ) -> int:
        """Return how many free blocks a text of `tokens` tokens takes from the pool.

        Blocks of the hit that no request holds count, as they leave the free queue too. Source:
        get_num_blocks_to_allocate.

        Args:
            table: The request's blocks so far.
            tokens: The length of the text that needs slots.
            found: The blocks of the hit in this group.
            reached_tokens: The length at which computation continues, behind the hit and the tokens to load.
            cap: The most blocks that are held at once, if `tokens` is the whole text.
        """
        required = -(-tokens // self.block_size)
        if cap is not None:
            required = min(required, cap)
        held = len(table.blocks)
        if held:
            return max(required - held, 0)
        skipped = self.skipped_tokens(reached_tokens) // self.block_size
        return max(required - max(skipped, len(found)), 0) + self._unheld(found[skipped:])

    def _unheld(self, blocks: Sequence[Block]) -> int:
        null = self.pool.null
        return sum(block.refs == 0 and block is not null for block in blocks)

    def admission_cap(self, chunk_tokens: int, max_text_tokens: int) -> int | None:
        """Return the most blocks that admission counts for one request; None if it counts the whole text."""
        return None

    def drops_at(self, computed: int) -> int | None:
        """Return the least length above `computed` at which `drop_skipped` releases another block; None for never."""
        return None

    def quiet_until(self, table: Table, computed: int) -> int:
        """Return the length that steps of one token may reach without dropping, adding or committing a block.

        `computed` is the length that `drop_skipped` was last called with.
        """
        quiet = min(len(table.blocks) * self.block_size, (table.cached_blocks + 1) * self.block_size - 1)
        drops = self.drops_at(computed)
        return quiet if drops is None else min(quiet, drops)

    def grow(self, table: Table, tokens: int) -> None:
        """Add blocks until `tokens` tokens have a slot."""
        missing = -(-tokens // self.block_size) - len(table.blocks)
        if missing > 0:
            table.blocks += self.pool.take(missing)

    def peak_blocks(self, tokens: int, chunk_tokens: int) -> int:
        """Return the most blocks that a text of `tokens` tokens holds at once, computed `chunk_tokens` at a time."""
        return -(-tokens // self.block_size)

    def mask(self, start: int, end: int, boundaries: Sequence[int]) -> list[bool] | None:
        """Return which of the blocks start..end-1 are worth caching, or None for all of them.

        `boundaries` are the positions, in tokens, at which a prompt can resume.
        """
        return None

    def store_mask(
        self, start: int, end: int, boundaries: Sequence[int], align: int | None, last: int | None
    ) -> list[bool] | None:
        """Return which of the blocks start..end-1 the CPU tier could return to some prompt, or None for all of them.

        Args:
            start: The first block.
            end: The block after the last one.
            boundaries: Positions in tokens at which a prompt can resume.
            align: Loads end at multiples of this many tokens.
            last: The last block of the text, if the text's tail is kept as well.
        """
        return None

    def take_states(self) -> list[tuple[Job, int]]:
        """Return the Mamba states cached since the last call, each with the job that computed it and the token at which it ends."""
        return []

    def forget_states(self, job: Job) -> None:
        """Forget the Mamba states that this job cached since the last `take_states`, as its blocks are released."""

    def commit(self, request: Job, tokens: int) -> None:
        """Make the full blocks of the first `tokens` tokens findable, as far as they are new, and queue one event.

        The event spans the whole range: it omits the hashes of masked and null blocks, but not their tokens.
        """
        table, size = request.tables[self.group_idx], self.block_size
        start, end = table.cached_blocks, tokens // size
        if start >= end:
            return
        hashes, units = request.text.hashes, size // self.geometry.hash_block_size
        boundaries = [request.prompt_tokens - 1]
        if request.junction:
            boundaries.append(request.junction)
        mask = self.mask(start, end, boundaries)
        cached: list[bytes] = []
        first_cached = False
        for i in range(start, end):
            block = table.blocks[i]
            if block is self.pool.null or (mask is not None and not mask[i - start]):
                continue
            block_hash = hashes[(i + 1) * units - 1]
            self.pool.cache(block, Key(self.group_idx, block_hash))
            cached.append(block_hash)
            first_cached |= i == 0
        extra_keys: list[tuple[str, ...] | None] = [None] * len(cached)
        if first_cached and request.text.cache_salt:
            extra_keys[0] = (request.text.cache_salt,)
        self.pool.tell(
            Stored(
                group_idx=self.group_idx,
                hashes=tuple(cached),
                parent=hashes[start * units - 1] if start else None,
                tokens=request.text.tokens(start * size, end * size),
                block_size=size,
                extra_keys=tuple(extra_keys),
            )
        )
        table.cached_blocks = end


class FullGroup(Group):
    """A full-attention group. If hashes are finer than its blocks, the prompt's last hash boundary is findable too."""

    def commit(self, request: Job, tokens: int) -> None:
        """Make new full blocks findable, and the prompt's last hash boundary if it lies inside a block."""
        super().commit(request, tokens)
        unit, size = self.geometry.hash_block_size, self.block_size
        boundary = (request.prompt_tokens - 1) // unit * unit
        if size == unit or boundary == 0 or boundary > tokens or boundary % size == 0:
            return
        block = request.tables[self.group_idx].blocks[boundary // size]
        n = boundary // unit - 1
        text = request.text
        if not self.pool.cache(block, Key(self.group_idx, text.hashes[n])):
            return
        salt = text.cache_salt
        self.pool.tell(
            Stored(
                group_idx=self.group_idx,
                hashes=(text.hashes[n],),
                parent=text.hashes[n - 1] if n else None,
                tokens=text.tokens(boundary - unit, boundary),
                block_size=unit,
                extra_keys=((salt,) if salt and n == 0 else None,),
            )
        )


class WindowGroup(Group):
    """A sliding-window group: a token sees the `window` tokens that end with it, so older blocks are released."""

    @property
    def window(self) -> int:
        """Tokens that one token sees, itself included."""
        assert self.shape.sliding_window is not None
        return self.shape.sliding_window

    def skipped_tokens(self, computed: int) -> int:
        """Return how many tokens lie before the window of the next token."""
        return max(0, computed - self.window + 1)

    def drops_at(self, computed: int) -> int | None:
        """Return the length at which the window has left one more block."""
        return self.window - 1 + (self.skipped_tokens(computed) // self.block_size + 1) * self.block_size

    def admission_cap(self, chunk_tokens: int, max_text_tokens: int) -> int | None:
        """Return the blocks of a window and a chunk."""
        # One more, as the window may begin inside a block. Source: SlidingWindowSpec.max_admission_blocks_per_request.
        return -(-min(self.window - 1 + chunk_tokens, max_text_tokens) // self.block_size) + 1

    def peak_blocks(self, tokens: int, chunk_tokens: int) -> int:
        """Return the blocks of a window and a chunk, or of the whole text if that is shorter."""
        held = -(-(self.window - 1 + chunk_tokens) // self.block_size) + 1
        return min(held, super().peak_blocks(tokens, chunk_tokens))

    def mask(self, start: int, end: int, boundaries: Sequence[int]) -> list[bool] | None:
        """Return which of the blocks start..end-1 a hit at a multiple of the scheduler block size needs.

        None means all of them.
        """
        return self.store_mask(start, end, boundaries, self.geometry.scheduler_block_size, None)

    def store_mask(
        self, start: int, end: int, boundaries: Sequence[int], align: int | None, last: int | None
    ) -> list[bool] | None:
        """Return which of the blocks start..end-1 to keep: as many as a window needs before each of several positions.

        The positions are the end of each segment of `retention_interval` tokens (`align` tokens without an interval),
        the end of block `last - 1` if `last` is given, and each boundary if there is an interval. Returns None to keep
        all blocks.
        """
        size, interval = self.block_size, self.geometry.retention_interval
        if align is None or align % size:
            return None
        need = -(-(self.window - 1) // size)
        mask = [False] * (end - start)
        segment = align if interval is None else interval
        if segment:
            per_segment = segment // size
            if need >= per_segment:
                return None
            for i in range(start, end):
                mask[i - start] = i % per_segment >= per_segment - need
            if last is not None:
                tail = max(last - last % per_segment, last - need)
                for i in range(max(start, tail), min(end, last)):
                    mask[i - start] = True
        if interval is not None:
            for boundary in boundaries:
                stop = boundary // align * align // size
                for i in range(max(start, stop - need), min(end, stop)):
                    mask[i - start] = True
        return mask


class ChunkedGroup(Group):
    """A group of chunked local attention: a token sees its own chunk of the text and nothing before the chunk."""

    @property
    def chunk(self) -> int:
        """Tokens of one chunk of the text."""
        assert self.shape.attention_chunk is not None
        return self.shape.attention_chunk

    def skipped_tokens(self, computed: int) -> int:
        """Return where the next token's chunk begins."""
        return computed // self.chunk * self.chunk

    def drops_at(self, computed: int) -> int | None:
        """Return the token at which the group next drops blocks: the end of the next token's chunk."""
        return (computed // self.chunk + 1) * self.chunk

    def admission_cap(self, chunk_tokens: int, max_text_tokens: int) -> int | None:
        """Return the blocks of a chunk of the text and of a step."""
        # Source: ChunkedLocalAttentionSpec.max_admission_blocks_per_request.
        return -(-min(self.chunk + chunk_tokens, max_text_tokens) // self.block_size)

    def peak_blocks(self, tokens: int, chunk_tokens: int) -> int:
        """Return the blocks of a chunk of the text and of a step, or of the whole text if that is shorter."""
        # One more than admission counts, as a chunk that is no multiple of the block size begins inside a block.
        held = -(-(self.chunk + chunk_tokens) // self.block_size) + 1
        return min(held, super().peak_blocks(tokens, chunk_tokens))


class MambaGroup(Group):
    """A Mamba group in "align" mode: a block holds the state at its end; only the last two states are kept."""

    def __init__(self, group_idx: int, shape: GroupShape, geometry: Geometry, pool: BlockPool) -> None:
        super().__init__(group_idx, shape, geometry, pool)
        # Keys of the states that the step under way writes: no other request may start on one before the next step.
        self._unwritten: set[Key] = set()
        self._states: list[tuple[Job, int]] = []

    def step_starts(self) -> None:
        """Forget the states of the step before, which are written by now."""
        self._unwritten.clear()
        self._states.clear()

    def take_states(self) -> list[tuple[Job, int]]:
        """Return the states cached since the last call, each with the job that computed it and the token at which it ends."""
        states, self._states = self._states, []
        return states

    def forget_states(self, job: Job) -> None:
        """Drop this job's states from those that the next `take_states` returns, because its blocks are released."""
        if self._states:
            self._states = [state for state in self._states if state[0] is not job]

    def commit(self, request: Job, tokens: int) -> None:
        """Make new states findable, and note that the step under way still writes them."""
        table = request.tables[self.group_idx]
        start = table.cached_blocks
        super().commit(request, tokens)
        for i in range(start, table.cached_blocks):
            if table.blocks[i].keys:
                self._unwritten.update(table.blocks[i].keys)
                self._states.append((request, (i + 1) * self.block_size))
        unit = self.geometry.hash_block_size
        boundary = (request.prompt_tokens - 1) // unit * unit
        if tokens == boundary > 0:
            # vLLM registers the prompt's last state again as long as no further boundary is reached
            # (single_type_kv_cache_manager.py _cache_partial_tail_block), so another request must wait one more step.
            self._unwritten.update(table.blocks[-(-boundary // self.block_size) - 1].keys)

    def needed_blocks(
        self, table: Table, tokens: int, found: Sequence[Block], reached_tokens: int, cap: int | None = None
    ) -> int:
        """Return the blocks for a new state and the hit; more than the pool has while that hit is being written."""
        if found and not self._unwritten.isdisjoint(found[-1].keys):
            # More blocks than the pool has make the request wait a step.
            return self.pool.num_blocks + 1
        new = -(-tokens // self.block_size) - len(found) - len(table.blocks)
        return min(new, 1) + self._unheld(found)

    def drops_at(self, computed: int) -> int | None:
        """Return the first length after the next block boundary."""
        return -(-computed // self.block_size) * self.block_size + 1

    def skipped_tokens(self, computed: int) -> int:
        """Return how many leading tokens are no longer needed: all but the last; a state stands for all before it."""
        return computed - 1

    def drop_skipped(self, table: Table, computed: int) -> None:
        """Release the states before the running one, and the previous running state once a later one exists."""
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
        """Add one block for the state at the end of a chunk."""
        required, held = -(-tokens // self.block_size), len(table.blocks)
        if required <= held:
            return
        if held:
            table.last_state = held - 1
        # A chunk writes one state, at its end, so the positions before that get no block.
        table.blocks += [self.pool.null] * (required - 1 - held)
        table.blocks += self.pool.take(1)

    def peak_blocks(self, tokens: int, chunk_tokens: int) -> int:
        """Return 2, or fewer for a text that is shorter."""
        # The state before a step and the one that the step writes.
        return min(2, super().peak_blocks(tokens, chunk_tokens))

    def mask(self, start: int, end: int, boundaries: Sequence[int]) -> list[bool] | None:
        """Return the states at the end of each retention interval and at each boundary."""
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
    """Return a new group of the class that handles the kind of group `group_idx`."""
    kinds: dict[Kind, type[Group]] = {
        "full_attention": FullGroup,
        "mla_attention": FullGroup,
        "sliding_window": WindowGroup,
        "sliding_window_mla": WindowGroup,
        "chunked_local_attention": ChunkedGroup,
        "mamba": MambaGroup,
    }
    return kinds[geometry.groups[group_idx].kind](group_idx, geometry.groups[group_idx], geometry, pool)
