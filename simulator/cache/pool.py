# SPDX-License-Identifier: Apache-2.0
"""The physical blocks of a replica: one pool shared by all KV cache groups, as vLLM's BlockPool manages it.

Invariants: a block is in the free queue exactly when its `refs` is 0; a key is findable exactly while some block
carries it; every change of what is findable leaves an event, in order. Source of each rule: vLLM 0.32.0 block_pool.py.
No I/O, clock or lock.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Key(NamedTuple):
    """What a block is found by: the group it belongs to and the hash of the prefix that ends with it."""

    group_idx: int
    block_hash: bytes


@dataclass(frozen=True, slots=True)
class Stored:
    """One group cached the blocks of a token range. `hashes` leaves out masked and null ones, `tokens` does not."""

    group_idx: int
    hashes: tuple[bytes, ...]
    parent: bytes | None
    tokens: tuple[int, ...]
    block_size: int
    extra_keys: tuple[tuple[str, ...] | None, ...]


@dataclass(frozen=True, slots=True)
class Removed:
    """One physical copy of a block is no longer findable."""

    key: Key


@dataclass(frozen=True, slots=True)
class Cleared:
    """Every block was forgotten at once."""


Event = Stored | Removed | Cleared


class PoolExhausted(RuntimeError):
    """More blocks were requested than are free."""


class Block:
    """One physical block. `keys` holds what it can be found by, the key of its full block first; mostly one or none."""

    __slots__ = ("block_id", "keys", "refs")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.refs = 0
        self.keys: tuple[Key, ...] = ()

    def __repr__(self) -> str:
        return f"Block({self.block_id}, refs={self.refs}, keys={len(self.keys)})"


class BlockPool:
    """`num_blocks` physical blocks, of which block 0 is the null block that stands for positions nobody keeps."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"a pool needs the null block and at least one more, not {num_blocks} blocks")
        self.num_blocks = num_blocks
        self.null = Block(0)
        self._free: OrderedDict[int, Block] = OrderedDict((i, Block(i)) for i in range(1, num_blocks))
        # By group and hash: the copies in the order in which they were cached; a look-up gets the oldest.
        # Most keys have one copy, and a dict for each would be most of the memory.
        self._found: defaultdict[int, dict[bytes, Block | dict[int, Block]]] = defaultdict(dict)
        self._events: list[Event] = []

    @property
    def num_free(self) -> int:
        """Blocks that no request holds, with or without a key."""
        return len(self._free)

    def free_order(self) -> list[int]:
        """Ids of the free blocks, the next to be taken first."""
        return list(self._free)

    def copies(self, key: Key) -> int:
        """How many physical blocks carry `key`."""
        found = self._found[key.group_idx].get(key.block_hash)
        return 0 if found is None else 1 if isinstance(found, Block) else len(found)

    def resident(self) -> dict[Key, int]:
        """Every findable key with its number of copies."""
        return {
            (key := Key(group_idx, block_hash)): self.copies(key)
            for group_idx, found in self._found.items()
            for block_hash in found
        }

    def find(self, group_ids: Sequence[int], block_hash: bytes) -> list[Block] | None:
        """The oldest copy in each of the groups, or None where any of them has none."""
        found = []
        for group_idx in group_ids:
            held = self._found[group_idx].get(block_hash)
            if held is None:
                return None
            found.append(held if isinstance(held, Block) else next(iter(held.values())))
        return found

    def take(self, count: int) -> list[Block]:
        """`count` blocks from the head of the free queue, each losing what it was found by. Raises PoolExhausted."""
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
        """Let go of these blocks, given in the order in which they shall be evicted.

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
        """Make `block` findable by `key`; False when it already is. No event: the caller publishes a range at a
        time."""
        if key in block.keys:
            return False
        block.keys = (*block.keys, key)
        found = self._found[key.group_idx]
        held = found.setdefault(key.block_hash, block)
        if held is not block:
            if isinstance(held, Block):
                held = found[key.block_hash] = {held.block_id: held}
            held[block.block_id] = block
        return True

    def forget(self, block: Block) -> None:
        """Take all its keys from a block, with one Removed a key."""
        for key in block.keys:
            found = self._found[key.group_idx]
            held = found[key.block_hash]
            if isinstance(held, dict):
                del held[block.block_id]
            if held is block or not held:
                del found[key.block_hash]
            self._events.append(Removed(key))
        block.keys = ()

    def tell(self, event: Stored) -> None:
        """Queue an event of the caller behind those of the pool."""
        self._events.append(event)

    def reset(self) -> bool:
        """Forget every key, with one Cleared. Refused (False) while a request holds a block."""
        if self.num_free != self.num_blocks - 1:
            return False
        for block in self._free.values():
            block.keys = ()
        self._found.clear()
        self._events.append(Cleared())
        return True

    def take_events(self) -> list[Event]:
        """What happened since the last call, oldest first."""
        events, self._events = self._events, []
        return events
