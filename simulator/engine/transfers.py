# SPDX-License-Identifier: Apache-2.0
"""When a replica's transfers end: loads and pulls after their time, a store with the step after the one that began it. Pure.

A store copies beside the computation and does not slow it down; vLLM learns of its end with a later step's output.
Pulls from one source follow one another on its link, whichever replica they belong to.
"""

from __future__ import annotations

import heapq

from kvrouter.simulator.cache.peer import Pull
from kvrouter.simulator.engine.scheduler import Step
from kvrouter.simulator.engine.timing import Timing


class TransferTimes:
    """The transfers under way, by the time at which they end."""

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._loads: list[tuple[float, int]] = []
        self._stores: list[int] = []
        self._new_stores: list[int] = []

    @property
    def next_load_s(self) -> float | None:
        """Time at which the next load or pull ends; None while there is none."""
        return self._loads[0][0] if self._loads else None

    @property
    def has_stores(self) -> bool:
        """Whether a further step, even one without tokens, ends stores."""
        return bool(self._stores or self._new_stores)

    def begin(self, step: Step, now_s: float) -> None:
        """Begin the transfers of a step."""
        for load in step.loads:
            heapq.heappush(self._loads, (now_s + self._timing.load_s(load.tokens), load.number))
        self._new_stores = [store.number for store in step.stores]
        for pull in step.pulls:
            self._begin_pull(pull, now_s)

    def _begin_pull(self, pull: Pull, now_s: float) -> None:
        wish, source = pull.wish, pull.wish.source
        if wish.deadline_s is None:
            wish.deadline_s = now_s + wish.timeout_s
        begins_s = max(source.free_s, now_s + self._timing.peer_latency_s)
        source.free_s = end_s = begins_s + len(pull.keys) * self._timing.peer_chunk_s
        pull.arrives_late = end_s > wish.deadline_s
        if pull.arrives_late:
            heapq.heappush(self._loads, (max(now_s, wish.deadline_s), pull.number))
        heapq.heappush(self._loads, (end_s, pull.number))

    def ended(self, now_s: float) -> list[int]:
        """Return the numbers of the transfers that ended with the step that ends now."""
        numbers, self._stores, self._new_stores = self._stores, self._new_stores, []
        while self._loads and self._loads[0][0] <= now_s:
            numbers.append(heapq.heappop(self._loads)[1])
        return numbers
