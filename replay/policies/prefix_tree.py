# SPDX-License-Identifier: Apache-2.0
"""The prompts that were sent to each worker, as a tree of pieces.

A piece's id stands for all pieces before it, so the tree is kept in tables: the ids of each worker, and the last worker
of each id. A worker that has an id was sent every id before it, unless that was evicted.
"""

from __future__ import annotations

from collections.abc import Sequence


class PrefixTree:
    """A tree that keeps at most `pieces_max` pieces of each worker after `evict`."""

    def __init__(self, workers: int, pieces_max: int) -> None:
        # Each worker's ids, the least recently used first; dicts keep the order.
        self._sent: list[dict[int, None]] = [{} for _ in range(workers)]
        # The worker that each id was sent to last.
        self._last: dict[int, int] = {}
        self._pieces_max = pieces_max

    def match(self, pieces: Sequence[int]) -> tuple[int, int | None]:
        """Return how many pieces from the first on were sent to a worker, and the worker that got the last of them."""
        worker = None
        for count, piece in enumerate(pieces):
            last_worker = self._last.get(piece)
            if last_worker is None:
                return count, worker
            worker = last_worker
        return len(pieces), worker

    def insert(self, pieces: Sequence[int], worker: int) -> None:
        """Note that the prompt was sent to `worker`, the deepest pieces first, so that leaves are evicted first."""
        sent, last = self._sent[worker], self._last
        for piece in reversed(pieces):
            sent.pop(piece, None)
            sent[piece] = None
            last[piece] = worker

    def evict(self) -> None:
        """Forget each worker's least recently used pieces beyond `pieces_max`."""
        for worker, sent in enumerate(self._sent):
            for piece in list(sent)[: max(0, len(sent) - self._pieces_max)]:
                del sent[piece]
                if self._last[piece] == worker:
                    others = [other for other, ids in enumerate(self._sent) if piece in ids]
                    if others:
                        self._last[piece] = others[0]
                    else:
                        del self._last[piece]
