# SPDX-License-Identifier: Apache-2.0
"""Which prompts were sent to which worker, as a tree of pieces. A piece's id stands for all before it, so the tree is a
table from ids to the workers that had them, the last one first.

Invariant: a worker that is in an id's entry was sent every id before it, unless that was evicted."""

from __future__ import annotations

from collections.abc import Sequence


class PrefixTree:
    """pieces_max: what is kept of each worker's after `evict`."""

    def __init__(self, workers: int, pieces_max: int) -> None:
        # For each worker its ids, the least recently used first; dicts keep the order.
        self._sent: list[dict[int, None]] = [{} for _ in range(workers)]
        # The worker that each id was sent to last.
        self._last: dict[int, int] = {}
        self._pieces_max = pieces_max

    def match(self, pieces: Sequence[int]) -> tuple[int, int | None]:
        """How many pieces in a row, from the first on, were sent to some worker, and to which one last."""
        worker = None
        for count, piece in enumerate(pieces):
            found = self._last.get(piece)
            if found is None:
                return count, worker
            worker = found
        return len(pieces), worker

    def insert(self, pieces: Sequence[int], worker: int) -> None:
        """The deepest first, so that what is evicted first are leaves."""
        sent, last = self._sent[worker], self._last
        for piece in reversed(pieces):
            sent.pop(piece, None)
            sent[piece] = None
            last[piece] = worker

    def evict(self) -> None:
        """Forget what each worker was sent longest ago, beyond `pieces_max`."""
        for worker, sent in enumerate(self._sent):
            for piece in list(sent)[: max(0, len(sent) - self._pieces_max)]:
                del sent[piece]
                if self._last[piece] == worker:
                    others = [other for other, ids in enumerate(self._sent) if piece in ids]
                    if others:
                        self._last[piece] = others[0]
                    else:
                        del self._last[piece]
