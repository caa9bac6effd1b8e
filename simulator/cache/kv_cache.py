# SPDX-License-Identifier: Apache-2.0
"""One replica's KV cache: it finds what a request can reuse, and gives a request slots for the tokens to compute.

Source: vLLM 0.32.0 kv_cache_manager.py allocate_slots. No I/O, clock or lock.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvrouter.simulator.cache.groups import Group, make_group
from kvrouter.simulator.cache.hit import PrefixHit, find_prefix
from kvrouter.simulator.cache.job import Job, Table
from kvrouter.simulator.cache.pool import BlockPool
from kvrouter.simulator.cache.shapes import Geometry


class KVCache:
    """A block pool and the groups that share it."""

    def __init__(
        self,
        geometry: Geometry,
        num_blocks: int,
        *,
        chunk_tokens: int,
        max_text_tokens: int,
        keeps_blocks: bool = True,
    ) -> None:
        """Create an empty cache.

        Args:
            geometry: The model's groups.
            num_blocks: Blocks of the pool, the null block included.
            chunk_tokens: The most tokens that a step computes.
            max_text_tokens: The length of the longest text that is served.
            keeps_blocks: Whether later requests can reuse blocks. If not, no block is ever registered under its hash.
        """
        self.geometry = geometry
        self.pool = BlockPool(num_blocks)
        self.groups: list[Group] = [make_group(i, geometry, self.pool) for i in range(len(geometry.groups))]
        self._chunk_tokens = chunk_tokens
        self._keeps_blocks = keeps_blocks
        self._caps = [group.admission_cap(chunk_tokens, max_text_tokens) for group in self.groups]
        self._nothing = PrefixHit(tuple([] for _ in self.groups), 0, 0)

    @property
    def usage(self) -> float:
        """The share of the pool that requests hold, 0 to 1."""
        return 1 - self.pool.num_free / (self.pool.num_blocks - 1)

    def tables(self) -> list[Table]:
        """Return empty tables for a request that holds nothing."""
        return [Table() for _ in self.groups]

    def peak_blocks(self, tokens: int) -> int:
        """Return the most blocks that a text of `tokens` tokens holds at once."""
        return sum(group.peak_blocks(tokens, self._chunk_tokens) for group in self.groups)

    def step_starts(self) -> None:
        """Note in every group that the next step is about to be planned."""
        for group in self.groups:
            group.step_starts()

    def find(self, hashes: Sequence[bytes], num_tokens: int) -> PrefixHit:
        """Find the prefix that a prompt would reuse now, at most all but its last token. Changes nothing."""
        return find_prefix(self.pool, self.geometry, hashes, max(num_tokens - 1, 0))

    def admit(self, job: Job, hit: PrefixHit, tokens: int, *, loaded: int = 0, reserved: int = 0) -> bool:
        """Give slots to a request that holds none. Returns False, and changes nothing, if it does not fit.

        A request is admitted only if its whole text would fit, so that prompts admitted together do not starve each
        other. If `tokens` is 0, a load is to come and nothing is committed.

        Args:
            job: The request.
            hit: The prefix that it reuses.
            tokens: Tokens that the next step computes.
            loaded: Tokens that a load writes.
            reserved: Free blocks that are kept for other requests.
        """
        reached = hit.tokens + loaded
        if self._needed(job, job.text.num_tokens, hit, reached, whole=True) > self.pool.num_free:
            return False
        if self._needed(job, reached + tokens, hit, reached) > self.pool.num_free - reserved:
            return False
        if reached:
            for group, table, blocks in zip(self.groups, job.tables, hit.blocks, strict=True):
                group.adopt(table, blocks, reached)
            if loaded:
                for group, table in zip(self.groups, job.tables, strict=True):
                    group.receive(table, reached, loaded)
        for group, table in zip(self.groups, job.tables, strict=True):
            group.grow(table, reached + tokens)
        if tokens:
            self.commit(job, reached + tokens)
        self._note_quiet(job, reached)
        return True

    def resume(self, job: Job, tokens: int) -> bool:
        """Extend a request whose load has ended, but only if its whole text would fit."""
        return self.remaining_blocks(job) <= self.pool.num_free and self.extend(job, tokens)

    def drop_skipped(self, job: Job) -> None:
        """Release the blocks that the job's next token would not need."""
        for group, table in zip(self.groups, job.tables, strict=True):
            group.drop_skipped(table, job.computed)

    def extend(self, job: Job, tokens: int) -> bool:
        """Give slots to a running request's next `tokens` tokens.

        Returns False if the pool has too few blocks; the request may have released some blocks by then.
        """
        self.drop_skipped(job)
        computed = job.computed
        end = computed + tokens
        if self._needed(job, end, self._nothing, computed) > self.pool.num_free:
            return False
        for group, table in zip(self.groups, job.tables, strict=True):
            group.grow(table, end)
        self.commit(job, end)
        self._note_quiet(job, computed)
        return True

    def commit(self, job: Job, tokens: int) -> None:
        """Make the full blocks of the first `tokens` tokens findable."""
        if not self._keeps_blocks:
            return
        cacheable = min(tokens, job.text.num_tokens)
        if len(self.groups) > 1:
            # A hit of several groups ends only at multiples of this, so no key is useful beyond the last one yet.
            cacheable -= cacheable % self.geometry.scheduler_block_size
        for group in self.groups:
            group.commit(job, cacheable)

    def remaining_blocks(self, job: Job) -> int:
        """Return how many free blocks a request still takes until its whole text has slots."""
        return self._needed(job, job.text.num_tokens, self._nothing, job.computed, whole=True)

    def free(self, job: Job) -> None:
        """Release a job's blocks, each group's tail first, so that a prefix outlives the blocks behind it."""
        for group, table in zip(self.groups, job.tables, strict=True):
            group.forget_states(job)
            self.pool.release(reversed(table.blocks))
        job.tables = self.tables()
        job.quiet_until = 0

    def _needed(self, job: Job, tokens: int, hit: PrefixHit, reached: int, *, whole: bool = False) -> int:
        return sum(
            group.needed_blocks(table, tokens, blocks, reached, cap if whole else None)
            for group, table, blocks, cap in zip(self.groups, job.tables, hit.blocks, self._caps, strict=True)
        )

    def _note_quiet(self, job: Job, computed: int) -> None:
        job.quiet_until = min(
            group.quiet_until(table, computed) for group, table in zip(self.groups, job.tables, strict=True)
        )
