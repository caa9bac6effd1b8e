# SPDX-License-Identifier: Apache-2.0
"""Hashes of a prompt, segment by segment, and a bounded memory of hashed segments.

Invariant: what the memory returns equals what hashing would give, for any input: keys hold the tokens themselves, not a
fingerprint of them. Memory and hashers are for one thread; neither does I/O nor reads a clock.
"""

from __future__ import annotations

import sys
from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from kvrouter.router.kvcache.block_hash import (
    HashSpace,
    check_token_ids,
    extra_keys_for,
    hash_chain,
)
from kvrouter.router.kvcache.multimodal import Items, within

# Blocks hashed before the caller may stop: 10 us of work at 16 tokens (uncompiled 0.1 ms), and 8 look-ups for a prompt
# of 8,192 tokens.
SEGMENT_BLOCKS = 64

# Key and value tuples, array header, dict and list slots of one entry; a test compares with tracemalloc.
ENTRY_OVERHEAD_BYTES = 640

# One multimodal item of an entry: its tuple, two numbers and the header of its name.
ITEM_OVERHEAD_BYTES = 220

# (space, parent's full digest or None at the root, blocks, raw token bytes, items with offsets from the segment's
# start); the block count gives the ids' width.
_Key = tuple[HashSpace, bytes | None, int, bytes, Items]
_Value = tuple[NDArray[np.uint64], bytes]


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
        self._entries: OrderedDict[_Key, _Value] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(
        self, space: HashSpace, parent: bytes | None, blocks: int, tokens: bytes, items: Items = ()
    ) -> _Value | None:
        """(hashes, last digest) of a segment, or None. tokens: the raw ids of its `blocks` blocks, at one width. items:
        with offsets from its start."""
        key = (space, parent, blocks, tokens, items)
        found = self._entries.get(key)
        if found is None:
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
        key, value = (space, parent, blocks, tokens, items), (hashes, last_digest)
        size = _entry_bytes(key, value)
        if size > self.budget_bytes:
            return
        hashes.setflags(write=False)
        replaced = self._entries.pop(key, None)
        if replaced is not None:
            self.bytes -= _entry_bytes(key, replaced)
        self._entries[key] = value
        self.bytes += size
        while self.bytes > self.budget_bytes:
            self.bytes -= _entry_bytes(*self._entries.popitem(last=False))


def _entry_bytes(key: _Key, value: _Value) -> int:
    space, parent, _, tokens, items = key
    hashes, last_digest = value
    # Each entry is charged for its space, although the segments of one prompt share it: users choose salts, so a
    # cheaper count could be exceeded at will.
    names = (*(space.lora or ()), space.cache_salt or "")
    return (
        ENTRY_OVERHEAD_BYTES
        + sys.getsizeof(tokens)
        + hashes.nbytes
        + sys.getsizeof(last_digest)
        + (0 if parent is None else sys.getsizeof(parent))
        + sum(map(sys.getsizeof, names))
        + sum(ITEM_OVERHEAD_BYTES + len(item.identifier) for item in items)
    )


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
        self._tokens = check_token_ids(token_ids)
        # Ids below 2**32, that is all real ones, are kept at half the width: less memory, less to hash at a look-up.
        narrow = self._tokens.size == 0 or int(self._tokens.max()) < 2**32
        self._raw = self._tokens.astype(np.uint32) if narrow else self._tokens
        self._memory = memory
        self._segment_blocks = segment_blocks
        self._items = items
        self.total_blocks = len(self._tokens) // space.block_size
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
        size = self._space.block_size
        raw = self._raw[first * size : last * size].tobytes()
        items = within(self._items, first * size, last * size)
        found = self._memory.get(self._space, self._parent, last - first, raw, items)
        if found is None:
            found = self._hash(first, last, items)
            self._memory.put(self._space, self._parent, last - first, raw, *found, items)
        hashes, self._parent = found
        self._hashes[first:last] = hashes
        self._done = last
        return hashes

    def _hash(self, first: int, last: int, items: Items) -> _Value:
        """Hashes and last digest of some blocks. items: with offsets from block `first`."""
        space = self._space
        size = space.block_size
        if items:
            starts = range(0, (last - first) * size, size)
            keys = [extra_keys_for(space, first + i, within(items, at, at + size)) for i, at in enumerate(starts)]
        else:
            keys = [extra_keys_for(space, first), extra_keys_for(space, first + 1)]
        hashes, digest = hash_chain(space.scheme, self._parent, self._tokens[first * size : last * size], size, keys)
        hashes.setflags(write=False)
        return hashes, digest
