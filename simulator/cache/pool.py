# SPDX-License-Identifier: Apache-2.0
"""The physical blocks of a replica: one pool shared by all KV cache groups, as vLLM's BlockPool manages it.

A block is in the free queue exactly when its `refs` is 0. A key is findable exactly while some block carries it. Every
change of the findable keys leaves an event, in order. Source of each rule: vLLM 0.32.0 block_pool.py. No I/O, clock or
lock.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Key(NamedTuple):
    """The key that a block is found by: its group, and the hash of the prefix that ends with it."""

    group_idx: int
    block_hash: bytes


@dataclass(frozen=True, slots=True)
class Stored:
    """The event that one group cached the blocks of a token range.

    `hashes` omits masked and null blocks; `tokens` has the whole range.
    """

    group_idx: int
    hashes: tuple[bytes, ...]
    parent: bytes | None
    tokens: tuple[int, ...]
    block_size: int
    extra_keys: tuple[tuple[str, ...] | None, ...]


@dataclass(frozen=True, slots=True)
class Removed:
    """The event that one physical copy of a block is no longer findable."""

    key: Key


@dataclass(frozen=True, slots=True)
class Cleared:
    """The event that every block was forgotten at once."""


Event = Stored | Removed | Cleared


class PoolExhausted(RuntimeError):
    """A request for more blocks than are free."""


class Block:
    """One physical block. `keys` are the keys it can be found by, that of the full block first; mostly one or none."""

    __slots__ = ("block_id", "keys", "refs")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.refs = 0
        self.keys: tuple[Key, ...] = ()

    def __repr__(self) -> str:
        return f"Block({self.block_id}, refs={self.refs}, keys={len(self.keys)})"


class BlockPool:
    """A pool of `num_blocks` physical blocks. Block 0 is the null block, which stands for positions without a block."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"a pool needs the null block and at least one more, not {num_blocks} blocks")
        self.num_blocks = num_blocks
        self.null = Block(0)
        self._free: OrderedDict[int, Block] = OrderedDict((i, Block(i)) for i in range(1, num_blocks))
        # By group and hash: the copies in the order in which they were cached; a look-up returns the oldest. Most keys
        # have one copy, which stands here without a dict, as a dict for each key would take most of the memory.
        self._found: defaultdict[int, dict[bytes, Block | dict[int, Block]]] = defaultdict(dict)
        self._events: list[Event] = []

    @property
    def num_free(self) -> int:
        """Blocks that no request holds, with or without a key."""
        return len(self._free)

    def free_order(self) -> list[int]:
        """Return the ids of the free blocks, the next to be taken first."""
        return list(self._free)

    def copies(self, key: Key) -> int:
        """Return how many physical blocks carry `key`."""
        copies = self._found[key.group_idx].get(key.block_hash)
        return 0 if copies is None else 1 if isinstance(copies, Block) else len(copies)

    def resident(self) -> dict[Key, int]:
        """Return every findable key with its number of copies."""
        return {
            (key := Key(group_idx, block_hash)): self.copies(key)
            for group_idx, by_hash in self._found.items()
            for block_hash in by_hash
        }

    def find(self, group_ids: Sequence[int], block_hash: bytes) -> list[Block] | None:
        """Return the oldest copy in each of the groups, or None if any group has none."""
        blocks = []
        for group_idx in group_ids:
            copies = self._found[group_idx].get(block_hash)
            if copies is None:
                return None
            blocks.append(copies if isinstance(copies, Block) else next(iter(copies.values())))
        return blocks

    def take(self, count: int) -> list[Block]:
        """Take `count` blocks from the head of the free queue, and their keys from them. Raises PoolExhausted."""
        if count > len(self._free):
            raise PoolExhausted(f"{count} blocks are needed, {len(self._free)} of {self.num_blocks - 1} are free")
        taken = [self._free.popitem(last=False)[1] for _ in range(count)]
        for block in taken:
            if block.keys:
                self.forget(block)
            block.refs = 1
        return taken

    def touch(self, blocks: Iterable[Block]) -> None:
        """Hold these blocks once more; a free one leaves the free queue."""
        for block in blocks:
            if block is self.null:
                continue
            if block.refs == 0:
                del self._free[block.block_id]
            block.refs += 1

    def release(self, blocks: Iterable[Block]) -> None:
        """Release these blocks, given in the order in which they are to be evicted.

        A block without a key can serve no hit: it goes to the head of the queue. One with a key goes to the tail (LRU).
        Source: block_pool.py:733 free_blocks.
        """
        first: list[Block] = []
        for block in blocks:
            if block is self.null:
                continue
            block.refs -= 1
            if block.refs:
                continue
            if block.keys:
                self._free[block.block_id] = block
            else:
                first.append(block)
        for block in reversed(first):
            self._free[block.block_id] = block
            self._free.move_to_end(block.block_id, last=False)

    def cache(self, block: Block, key: Key) -> bool:
        """Make `block` findable by `key`. Returns False if it already is.

        No event is queued, as the caller publishes one for a whole range.
        """
        if key in block.keys:
            return False
        block.keys = (*block.keys, key)
        by_hash = self._found[key.group_idx]
        copies = by_hash.setdefault(key.block_hash, block)
        if copies is not block:
            if isinstance(copies, Block):
                copies = by_hash[key.block_hash] = {copies.block_id: copies}
            copies[block.block_id] = block
        return True

    def forget(self, block: Block) -> None:
        """Remove all keys from a block, with one Removed event for each."""
        for key in block.keys:
            by_hash = self._found[key.group_idx]
            copies = by_hash[key.block_hash]
            if isinstance(copies, dict):
                del copies[block.block_id]
            if copies is block or not copies:
                del by_hash[key.block_hash]
            self._events.append(Removed(key))
        block.keys = ()

    def tell(self, event: Stored) -> None:
        """Queue an event of the caller behind the pool's own events."""
        self._events.append(event)

    def reset(self) -> bool:
        """Forget every key, with one Cleared event. Does nothing and returns False while a request holds a block."""
        if self.num_free != self.num_blocks - 1:
            return False
        for block in self._free.values():
            block.keys = ()
        self._found.clear()
        self._events.append(Cleared())
        return True

    def take_events(self) -> list[Event]:
        """Return the events since the last call, oldest first."""
        events, self._events = self._events, []
        return events
