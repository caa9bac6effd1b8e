# SPDX-License-Identifier: Apache-2.0
"""The block before each block in a prompt, by short hash, as requests store them; a hand-over keeps prompts together by it.

It is kept for the cache group in which a request stores the most chunks. Another group whose blocks are longer names
the same places by the same hashes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvrouter.engine_patch.offload.key import OffloadKey, group_of, short_hash


@dataclass(slots=True)
class Trail:
    """The end of what one request has stored so far."""

    # The cache group that is followed; None before the first chunk.
    group_idx: int | None = None
    # The short hash of the last block in that group, or None.
    last: int | None = None


class Lineage:
    """The known blocks before the blocks of one tier."""

    def __init__(self, max_blocks: int) -> None:
        """Start empty; beyond `max_blocks`, the blocks that were learned first are forgotten."""
        self._before: dict[int, int] = {}
        self._max_blocks = max_blocks

    def learn(self, keys: Sequence[OffloadKey], trail: Trail) -> None:
        """Learn from chunks of one request, which are in the order of its prompt in each group."""
        if trail.group_idx is None and keys:
            trail.group_idx = Counter(map(group_of, keys)).most_common(1)[0][0]
        for key in keys:
            if group_of(key) != trail.group_idx:
                continue
            block = short_hash(key)
            if trail.last is not None and trail.last != block:
                self._note(block, trail.last)
            trail.last = block

    def adopt(self, block: int, before: int) -> None:
        """Take over what another engine knows of a block."""
        if block not in self._before:
            self._note(block, before)

    def drop(self, keys: Iterable[OffloadKey]) -> None:
        """Forget evicted chunks."""
        for key in keys:
            self._before.pop(short_hash(key), None)

    def clear(self) -> None:
        """Forget everything."""
        self._before.clear()

    def copy(self) -> dict[int, int]:
        """Return the block before each block."""
        return dict(self._before)

    def _note(self, block: int, before: int) -> None:
        self._before[block] = before
        if len(self._before) > self._max_blocks:
            del self._before[next(iter(self._before))]

    def __len__(self) -> int:
        return len(self._before)
