# SPDX-License-Identifier: Apache-2.0
"""The hashes of a prompt, segment by segment, and a bounded memory of hashed segments.

Invariant: for any input, the memory returns exactly what hashing would return, because entries hold the tokens
themselves, and the fingerprint in a key serves only to find the entry. The memory and the hashers belong to one thread;
they do no I/O and read no clock.
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

# Blocks hashed before the caller may stop. With 16 tokens per block, a segment takes 10 us (uncompiled 0.1 ms), and a
# prompt of 8,192 tokens takes 8 look-ups.
SEGMENT_BLOCKS = 64

# The memory for key and entry, headers of arrays and bytes, and dict and list slots of one entry. A test compares it
# with tracemalloc.
ENTRY_OVERHEAD_BYTES = 740

# The memory for one multimodal item of an entry: its tuple, two numbers and the header of its name.
ITEM_OVERHEAD_BYTES = 220

# (space, the parent's full digest or None at the root, number of blocks, fingerprint of the raw token bytes, items with
# offsets relative to the segment's start). The number of blocks determines the width of the raw ids.
_Key = tuple[HashSpace, bytes | None, int, int, Items]


class Segment(msgspec.Struct, frozen=True, gc=False):
    """Consecutive blocks of a prompt, hashed."""

    # One hash for each block.
    hashes: NDArray[np.uint64]
    # The full digest of the last block.
    last_digest: bytes
    # The raw token ids of all blocks.
    tokens: bytes
    # The memory that is held as long as this segment is remembered.
    size_bytes: int


class SegmentMemory:
    """A cache of hashed segments, bounded in bytes, which drops the least recently used ones.

    Invariant: `bytes` never exceeds `budget_bytes` after a call. A segment larger than the budget is not kept.
    """

    def __init__(self, budget_bytes: int) -> None:
        if budget_bytes < 0:
            raise ValueError(f"budget_bytes must not be negative, got {budget_bytes}")
        # The upper bound of `bytes`; 0 remembers nothing.
        self.budget_bytes = budget_bytes
        # The memory that the entries keep alive.
        self.bytes = 0
        # How many calls of `get` returned a segment, and how many returned None.
        self.hits = 0
        self.misses = 0
        self._entries: OrderedDict[_Key, Segment] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(
        self, space: HashSpace, parent: bytes | None, blocks: int, tokens: bytes, items: Items = ()
    ) -> Segment | None:
        """Return a remembered segment, or None.

        Args:
            space: The hash space of the prompt.
            parent: The full digest of the block before the segment, None at the root.
            blocks: The number of blocks in the segment.
            tokens: The raw ids of these blocks, all of the same width.
            items: The items in the segment, with offsets relative to its start.
        """
        key = (space, parent, blocks, xxh3_64_intdigest(tokens), items)
        segment = self._entries.get(key)
        if segment is None or segment.tokens != tokens:
            self.misses += 1
            return None
        self.hits += 1
        self._entries.move_to_end(key)
        return segment

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
        """Remember a segment, and make its hashes read-only, because all later callers share them."""
        # Each entry is charged for its space, although the segments of one prompt share it: users choose the salts, so
        # they could exceed a lower estimate at will.
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
    """The block hashes of one prompt in one space, as far as `extend` has computed them."""

    def __init__(
        self,
        space: HashSpace,
        token_ids: NDArray[np.int64],
        memory: SegmentMemory,
        segment_blocks: int = SEGMENT_BLOCKS,
        items: Items = (),
    ) -> None:
        """Prepare to hash a prompt. Raises ValueError on token ids outside 0..2**63-1.

        Args:
            space: The hash space of the prompt.
            token_ids: The ids, shape (num_tokens,), which must not change while the hasher is in use.
            memory: The memory that is looked up and filled.
            segment_blocks: The number of blocks that one call of `extend` hashes.
            items: The multimodal items of the prompt.
        """
        if segment_blocks < 1:
            raise ValueError(f"segment_blocks must be at least 1, got {segment_blocks}")
        self._space = space
        self._tokens, bits = measure_token_ids(token_ids)
        # Ids below 2**32, which all real ids are, are remembered at half the width to save memory and comparisons.
        self._kept_as = np.dtype(np.uint32 if bits < 2**32 else np.int64)
        self._memory = memory
        self._segment_blocks = segment_blocks
        self._items = items
        self._lookahead = space.scheme.lookahead_tokens
        # Number of full blocks whose lookahead is in the prompt too; later tokens have no hash.
        self.total_blocks = max(0, len(self._tokens) - self._lookahead) // space.block_size
        self._hashes = np.empty(self.total_blocks, np.uint64)
        self._done = 0
        self._parent: bytes | None = None

    @property
    def hashes(self) -> NDArray[np.uint64]:
        """All hashes computed so far, from block 0 on; read-only."""
        view = self._hashes[: self._done]
        view.setflags(write=False)
        return view

    def extend(self) -> NDArray[np.uint64]:
        """Return the hashes of the next segment, which are read-only; empty if the prompt has no further full block."""
        first = self._done
        last = min(first + self._segment_blocks, self.total_blocks)
        if first == last:
            return np.empty(0, np.uint64)
        start, end = first * self._space.block_size, last * self._space.block_size + self._lookahead
        raw = self._tokens[start:end].astype(self._kept_as).tobytes()
        items = within(self._items, start, end) if self._items else ()
        segment = self._memory.get(self._space, self._parent, last - first, raw, items)
        if segment is None:
            hashes, digest = self._hash(first, last, items)
            self._memory.put(self._space, self._parent, last - first, raw, hashes, digest, items)
        else:
            hashes, digest = segment.hashes, segment.last_digest
        self._parent = digest
        self._hashes[first:last] = hashes
        self._done = last
        return hashes

    def _hash(self, first: int, last: int, items: Items) -> tuple[NDArray[np.uint64], bytes]:
        """Return the hashes of the blocks from `first` to before `last`, and the digest of the last one.

        The offsets of `items` are relative to block `first`.
        """
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
