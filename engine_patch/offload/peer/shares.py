# SPDX-License-Identifier: Apache-2.0
"""Divides the chunks of an engine among those that take its cache over, so that the chunks of one prompt stay together.

Chunks are grouped by block, whatever their cache group: the hash of a block covers all tokens before it, so groups with
different block sizes name one place in a prompt by one hash. Blocks form trees. A part of a tree that is small enough
goes to one share as a whole. The beginning of a larger one, up to where prompts divide, goes to every share, because no
continuation can be used without it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from kvrouter.engine_patch.offload.key import OffloadKey, short_hash

# A part of a tree that has at most this part of a fair share is not divided, so that shares differ little in size.
PARTS = 2
# The number in place of a share, for blocks that go to every share.
EVERY = -1


def shares(keys: Sequence[OffloadKey], before: Mapping[int, int], num_shares: int) -> list[list[OffloadKey]]:
    """Return the keys of each share, in the order in which they were given.

    Args:
        keys: The keys, the most valuable first.
        before: The block before each block, by short hash, as far as it is known.
        num_shares: The number of shares.
    """
    if num_shares == 1:
        return [list(keys)]
    blocks = [short_hash(key) for key in keys]
    share_of = _Trees(blocks, before).divided(num_shares)
    divided: list[list[OffloadKey]] = [[] for _ in range(num_shares)]
    for key, block in zip(keys, blocks, strict=True):
        share = share_of[block]
        for number in range(num_shares) if share == EVERY else (share,):
            divided[number].append(key)
    return divided


class _Trees:
    """The trees of some blocks."""

    def __init__(self, blocks: Sequence[int], before: Mapping[int, int]) -> None:
        # Chunks of each block, in the order of worth.
        self._chunks = Counter(blocks)
        self._after: dict[int, list[int]] = {}
        self._roots: list[int] = []
        for block in self._chunks:
            parent = before.get(block)
            if parent is None or parent == block or parent not in self._chunks:
                self._roots.append(block)
            else:
                self._after.setdefault(parent, []).append(block)

    def divided(self, num_shares: int) -> dict[int, int]:
        """Return the share of each block, or EVERY."""
        sizes = self._sizes()
        # The values of a mapping that is wrong may run in a circle, which no root leads to.
        self._roots += [block for block in self._chunks if block not in sizes]
        limit = len(self._chunks) and max(1, self._chunks.total() // (PARTS * num_shares))
        share_of: dict[int, int] = {}
        wholes: list[int] = []
        pending = self._roots[::-1]
        while pending:
            top = pending.pop()
            fork = self._fork(top)
            if sizes.get(top, 0) <= limit or fork is None:
                wholes.append(top)
                continue
            for block in self._chain(top):
                share_of[block] = EVERY
            pending += self._after[fork][::-1]
        # The most valuable are placed first, so that each share has its part of them.
        rank = {block: number for number, block in enumerate(self._chunks)}
        filled = [0] * num_shares
        best = {top: min(rank[block] for block in self._below(top)) for top in wholes}
        for top in sorted(wholes, key=best.__getitem__):
            share = filled.index(min(filled))
            filled[share] += sizes.get(top, 1)
            share_of.update(dict.fromkeys(self._below(top), share))
        return share_of

    def _sizes(self) -> dict[int, int]:
        """Return the chunks of each block and all blocks after it."""
        order = [block for root in self._roots for block in self._below(root)]
        sizes: dict[int, int] = {}
        for block in reversed(order):
            sizes[block] = self._chunks[block] + sum(sizes[after] for after in self._after.get(block, ()))
        return sizes

    def _below(self, top: int) -> Iterator[int]:
        """Yield a block and all blocks after it, each after the one before it."""
        seen = {top}
        pending = [top]
        while pending:
            block = pending.pop()
            yield block
            for after in self._after.get(block, ()):
                if after not in seen:
                    seen.add(after)
                    pending.append(after)

    def _chain(self, top: int) -> Iterator[int]:
        """Yield the blocks from `top` to the next fork, or to the end."""
        block = top
        while True:
            yield block
            after = self._after.get(block, ())
            if len(after) != 1 or after[0] == top:
                return
            block = after[0]

    def _fork(self, top: int) -> int | None:
        """Return the next block after which prompts divide, or None if there is none."""
        *_, last = self._chain(top)
        return last if len(self._after.get(last, ())) > 1 else None
