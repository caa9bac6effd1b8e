# SPDX-License-Identifier: Apache-2.0
"""Hashes of a prompt, segment by segment, and a bounded memory of hashed segments.

Invariant: what the memory returns equals what hashing would give, for any input: entries hold the tokens themselves,
and a key's fingerprint of them only finds the entry. Memory and hashers are for one thread; neither does I/O nor reads
a clock.
"""

from __future__ import annotations

import sys
from collections import OrderedDict

import msgspec
import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from kvrouter.router.model.kvcache.block_hash import HashSpace, extra_keys_for, hash_chain, measure_token_ids
from kvrouter.router.model.kvcache.multimodal import Items, within

# Blocks hashed before the caller may stop: 10 us of work at 16 tokens (uncompiled 0.1 ms), and 8 look-ups for a prompt
# of 8,192 tokens.
SEGMENT_BLOCKS = 64

# Key and entry, headers of arrays and bytes, dict and list slots of one entry; a test compares with tracemalloc.
ENTRY_OVERHEAD_BYTES = 740

# One multimodal item of an entry: its tuple, two numbers and the header of its name.
ITEM_OVERHEAD_BYTES = 220

# (space, parent's full digest or None at the root, blocks, fingerprint of the raw token bytes, items with offsets from
# the segment's start); the block count gives the ids' width.
_Key = tuple[HashSpace, bytes | None, int, int, Items]


class Segment(msgspec.Struct, frozen=True, gc=False):
    """Hashes of consecutive blocks, the last one's full digest, the raw ids of all, and the bytes that it keeps
    alive."""

    hashes: NDArray[np.uint64]
    last_digest: bytes
    tokens: bytes
    size_bytes: int


class SegmentMemory:
    """Least recently used segments, bounded in bytes.

    budget_bytes: upper bound of `bytes`, which counts what the entries keep alive; 0 remembers nothing. A segment
    larger than the budget is not kept. hits and misses count calls of `get`.
    """

    def __init__(self, budget_bytes: int) -> None:
        if budget_bytes < 0:
            raise ValueError(f"budget_bytes must not be negative, got {budget_bytes}")
        self.budget_bytes = budget_bytes
        self.bytes = 0
        self.hits = 0
        self.misses = 0
        self._entries: OrderedDict[_Key, Segment] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(
        self, space: HashSpace, parent: bytes | None, blocks: int, tokens: bytes, items: Items = ()
    ) -> Segment | None:
        """A remembered segment, or None. tokens: the raw ids of its `blocks` blocks, at one width. items: with offsets
        from its start."""
        key = (space, parent, blocks, xxh3_64_intdigest(tokens), items)
        found = self._entries.get(key)
        if found is None or found.tokens != tokens:
            self.misses += 1
            return None
        self.hits += 1
        self._entries.move_to_end(key)
        return found

    def put(
        self,
        space: HashSpace,
        parent: bytes | None,
        blocks: int,
        tokens: bytes,
        hashes: NDArray[np.uint64],
        last_digest: bytes,
        items: Items = (),
    ) -> None:
        """Remember a segment; its hashes become read-only, because every later asker shares them."""
        # Each entry is charged for its space, although the segments of one prompt share it: users choose salts, so a
        # cheaper count could be exceeded at will.
        size = ENTRY_OVERHEAD_BYTES + hashes.nbytes + len(tokens) + len(last_digest) + len(parent or b"")
        if space.lora or space.cache_salt:
            size += sum(map(sys.getsizeof, (*(space.lora or ()), space.cache_salt or "")))
        if items:
            size += sum([ITEM_OVERHEAD_BYTES + len(item.identifier) for item in items])
        if size > self.budget_bytes:
            return
        hashes.setflags(write=False)
        key = (space, parent, blocks, xxh3_64_intdigest(tokens), items)
        replaced = self._entries.pop(key, None)
        if replaced is not None:
            self.bytes -= replaced.size_bytes
        self._entries[key] = Segment(hashes, last_digest, tokens, size)
        self.bytes += size
        while self.bytes > self.budget_bytes:
            self.bytes -= self._entries.popitem(last=False)[1].size_bytes


class PromptHasher:
    """The block hashes of one prompt in one space, as far as `extend` has computed them.

    token_ids: shape (num_tokens,); do not change them meanwhile. items: the prompt's. Raises ValueError on ids outside
    0..2**63-1. total_blocks: num_tokens // block_size; tokens after the last full block have no hash.
    """

    def __init__(
        self,
        space: HashSpace,
        token_ids: NDArray[np.int64],
        memory: SegmentMemory,
        segment_blocks: int = SEGMENT_BLOCKS,
        items: Items = (),
    ) -> None:
        if segment_blocks < 1:
            raise ValueError(f"segment_blocks must be at least 1, got {segment_blocks}")
        self._space = space
        self._tokens, bits = measure_token_ids(token_ids)
        # Ids below 2**32, that is all real ones, are remembered at half the width: less memory, less to compare.
        self._kept_as = np.dtype(np.uint32 if bits < 2**32 else np.int64)
        self._memory = memory
        self._segment_blocks = segment_blocks
        self._items = items
        self._lookahead = space.scheme.lookahead_tokens
        self.total_blocks = max(0, len(self._tokens) - self._lookahead) // space.block_size
        self._hashes = np.empty(self.total_blocks, np.uint64)
        self._done = 0
        self._parent: bytes | None = None

    @property
    def hashes(self) -> NDArray[np.uint64]:
        """All hashes so far, from block 0; read-only."""
        view = self._hashes[: self._done]
        view.setflags(write=False)
        return view

    def extend(self) -> NDArray[np.uint64]:
        """The hashes of the next segment; empty when the prompt has no further full block. Read-only."""
        first = self._done
        last = min(first + self._segment_blocks, self.total_blocks)
        if first == last:
            return np.empty(0, np.uint64)
        start, end = first * self._space.block_size, last * self._space.block_size + self._lookahead
        raw = self._tokens[start:end].astype(self._kept_as).tobytes()
        items = within(self._items, start, end) if self._items else ()
        found = self._memory.get(self._space, self._parent, last - first, raw, items)
        if found is None:
            hashes, digest = self._hash(first, last, items)
            self._memory.put(self._space, self._parent, last - first, raw, hashes, digest, items)
        else:
            hashes, digest = found.hashes, found.last_digest
        self._parent = digest
        self._hashes[first:last] = hashes
        self._done = last
        return hashes

    def _hash(self, first: int, last: int, items: Items) -> tuple[NDArray[np.uint64], bytes]:
        """Hashes and last digest of some blocks. items: with offsets from block `first`."""
        space = self._space
        size = space.block_size
        if items:
            starts = range(0, (last - first) * size, size)
            reach = size + self._lookahead
            keys = [extra_keys_for(space, first + i, within(items, at, at + reach)) for i, at in enumerate(starts)]
        else:
            keys = [extra_keys_for(space, first), extra_keys_for(space, first + 1)]
        ids = self._tokens[first * size : last * size + self._lookahead]
        hashes, digest = hash_chain(space.scheme, self._parent, ids, size, keys)
        hashes.setflags(write=False)
        return hashes, digest
