# SPDX-License-Identifier: Apache-2.0
"""One engine replica: what vLLM's scheduler does to the cache for one request after another.

Synchronous scheduling, one request at a time, text only; no speculative decoding, LoRA or preemption (a request that
could not finish is refused instead). Each step's events go out in one batch after it, as in vLLM's update_from_output.
Source: vLLM 0.32.0 sched/scheduler.py, kv_cache_manager.py allocate_slots.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvrouter.simulator.groups import Group, Job, Table, make_group
from kvrouter.simulator.hashing import DEFAULT_SEED, extend_hashes, root_hash
from kvrouter.simulator.hit import PrefixHit, find_prefix
from kvrouter.simulator.pool import BlockPool, Event
from kvrouter.simulator.shapes import Geometry

# vLLM's default of max_num_batched_tokens for an online server; a longer prompt is computed in chunks.
DEFAULT_CHUNK_TOKENS = 8192

# Sampled tokens are below this: small enough for any vocabulary.
VOCABULARY = 32_000


class RequestRefused(ValueError):
    """This replica can never finish the request; the text says what is too large."""


@dataclass(frozen=True, slots=True)
class Completion:
    """What came of a request. Lengths in tokens; `reused_tokens` were found in the cache and not computed again."""

    prompt_tokens: int
    reused_tokens: int
    output: tuple[int, ...]


def next_token(tokens: Sequence[int]) -> int:
    """A stand-in for greedy sampling: the same text always goes on in the same way."""
    return zlib.crc32(repr((len(tokens), tokens[-8:])).encode()) % VOCABULARY


class Replica:
    """A block pool, its groups, and the steps of a request.

    on_step receives each step's events, never an empty list. Not thread-safe: the caller runs one request at a time.
    """

    def __init__(
        self,
        geometry: Geometry,
        num_blocks: int,
        *,
        on_step: Callable[[list[Event]], None],
        chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
        hash_seed: str = DEFAULT_SEED,
        sample: Callable[[Sequence[int]], int] = next_token,
    ) -> None:
        if chunk_tokens < 1:
            raise ValueError(f"a step computes at least 1 token, not {chunk_tokens}")
        self.geometry = geometry
        self.pool = BlockPool(num_blocks)
        self.groups: list[Group] = [make_group(i, geometry, self.pool) for i in range(len(geometry.groups))]
        self.chunk_tokens = chunk_tokens
        self._on_step = on_step
        self._root = root_hash(hash_seed)
        self._sample = sample

    def hashes(self, tokens: Sequence[int], cache_salt: str | None = None) -> list[bytes]:
        """The block hashes of a text, 32 bytes each, at the hash block size."""
        hashes: list[bytes] = []
        extend_hashes(hashes, tokens, self.geometry.hash_block_size, self._root, cache_salt)
        return hashes

    def find(self, prompt: Sequence[int], *, cache_salt: str | None = None) -> PrefixHit:
        """What a request with this prompt would reuse now. Changes nothing."""
        return find_prefix(self.pool, self.geometry, self.hashes(prompt, cache_salt), max(len(prompt) - 1, 0))

    def run(self, prompt: Sequence[int], *, max_tokens: int = 1, cache_salt: str | None = None) -> Completion:
        """Serve one request to its end. Raises RequestRefused when it is empty or cannot fit into the pool."""
        self._check(len(prompt), max_tokens)
        hashes = self.hashes(prompt, cache_salt)
        job = Job(len(prompt), list(prompt), hashes, [Table() for _ in self.groups], cache_salt)
        hit = find_prefix(self.pool, self.geometry, job.hashes, len(prompt) - 1)
        job.junction = hit.junction
        job.computed = hit.tokens
        adopted: PrefixHit | None = hit
        while len(job.tokens) - len(prompt) < max_tokens:
            tokens = self._chunk(job)
            self._allocate(job, tokens, adopted)
            adopted = None
            job.computed += tokens
            if job.computed == len(job.tokens):
                job.tokens.append(self._sample(job.tokens))
                extend_hashes(job.hashes, job.tokens, self.geometry.hash_block_size, self._root, cache_salt)
            if len(job.tokens) - len(prompt) == max_tokens:
                # Before the last step's events go out, as in vLLM: freeing says nothing, but evicts nothing either.
                self._free(job)
            self._publish()
        return Completion(len(prompt), hit.tokens, tuple(job.tokens[len(prompt) :]))

    def reset_prefix_cache(self) -> bool:
        """Forget everything cached. As in vLLM the event waits for the next step: an idle engine publishes nothing."""
        return self.pool.reset()

    def _check(self, prompt_tokens: int, max_tokens: int) -> None:
        if prompt_tokens < 1:
            raise RequestRefused("the prompt is empty; send at least one token id")
        if max_tokens < 1:
            raise RequestRefused(f"max_tokens is {max_tokens}; ask for at least 1")
        # The last sampled token is never computed.
        total = prompt_tokens + max_tokens - 1
        needed = sum(group.peak_blocks(total, self.chunk_tokens) for group in self.groups)
        if needed > self.pool.num_blocks - 1:
            raise RequestRefused(
                f"{prompt_tokens} prompt tokens and {max_tokens} more need up to {needed} blocks, "
                f"the pool has {self.pool.num_blocks - 1}; send a shorter prompt or start with more blocks"
            )

    def _chunk(self, job: Job) -> int:
        """Tokens of the next step: as much of the prompt as a step may compute, then one token at a time."""
        tokens = min(len(job.tokens) - job.computed, self.chunk_tokens)
        if any(shape.kind == "mamba" for shape in self.geometry.groups):
            return self._mamba_chunk(job, tokens)
        return tokens

    def _mamba_chunk(self, job: Job, tokens: int) -> int:
        """Shorten a prefill chunk so that it ends where a Mamba state can be kept.

        Source: scheduler.py:443 _mamba_block_aligned_split; no EAGLE, no hits inside a block, no internal checkpoints.
        """
        start, size = job.computed, self.geometry.scheduler_block_size
        if start >= job.prompt_tokens:
            return tokens
        end = start + tokens
        if end < job.prompt_tokens:
            aligned = end // size * size
            # A block wider than a chunk is filled by several of them.
            if aligned > start or size <= self.chunk_tokens:
                end = aligned
        stops = [(len(job.tokens) - 1) // size * size]
        if start % size:
            stops.append((start // size + 1) * size)
        if start < job.junction < end:
            stops.append(start + (job.junction - start) // size * size)
        return min((stop for stop in stops if start < stop < end), default=end) - start

    def _allocate(self, job: Job, tokens: int, hit: PrefixHit | None) -> None:
        """Slots for the next `tokens` tokens: drop, adopt, grow, commit. This order is also that of the events."""
        for group, table in zip(self.groups, job.tables, strict=True):
            group.drop_skipped(table, job.computed)
        if hit is not None and hit.tokens:
            for group, table, found in zip(self.groups, job.tables, hit.blocks, strict=True):
                group.adopt(table, found, hit.tokens)
        end = job.computed + tokens
        for group, table in zip(self.groups, job.tables, strict=True):
            group.grow(table, end)
        cacheable = min(end, len(job.tokens))
        if len(self.groups) > 1:
            # No hit of several groups ends elsewhere, so nothing beyond is worth a key yet.
            cacheable -= cacheable % self.geometry.scheduler_block_size
        for group in self.groups:
            group.commit(job, cacheable)

    def _free(self, job: Job) -> None:
        """Give the blocks back, each group's tail first, so that a prefix outlives what followed it."""
        for table in job.tables:
            self.pool.release(reversed(table.blocks))
            table.blocks = []

    def _publish(self) -> None:
        events = self.pool.take_events()
        if events:
            self._on_step(events)
