# SPDX-License-Identifier: Apache-2.0
"""Two laws of two routers: how far their answers may differ, and that they do not differ at the same position.

`live` is a claim about the engine, but its documented bound is about the routers: no answer that says `live` is older
than 2 s, counted from when the worker's follower showed more. The law of age in `laws.py` has a longer bound, because
nobody knows of a batch that was dropped on its way until the next one arrives.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

from kvrouter.router.base.common.ids import WorkerKey

# docs/explanation/reliability.md, "Staleness".
LAG_S = 2.0


class Followed:
    """The positions that the followers of each worker have shown, and when."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        # For each worker and epoch: the seqs, each higher than all before, and when a follower first showed them.
        self._shown: dict[tuple[WorkerKey, str], tuple[list[int], list[float]]] = {}

    def show(self, worker: WorkerKey, epoch: str | None, seq: int | None) -> None:
        """Note what a follower shows now."""
        if epoch is None or seq is None:
            return
        seqs, times_s = self._shown.setdefault((worker, epoch), ([], []))
        if not seqs or seq > seqs[-1]:
            seqs.append(seq)
            times_s.append(self._now_s())

    def lag_s(self, worker: WorkerKey, epoch: str | None, seq: int | None, excuse_s: float) -> float:
        """Return for how long a follower has shown more than this.

        Args:
            worker: The worker.
            epoch: The epoch that a router shows.
            seq: The seq that it shows.
            excuse_s: Until when the router could not know better.
        """
        seqs, times_s = self._shown.get((worker, epoch or ""), ([], []))
        index = bisect_right(seqs, -1 if seq is None else seq)
        return 0.0 if index == len(seqs) else max(0.0, self._now_s() - max(times_s[index], excuse_s))
