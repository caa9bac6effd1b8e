# SPDX-License-Identifier: Apache-2.0
"""The law of load between routers: what one counts for another is what that one has, and nothing for one that left.

The sums themselves, which are never negative and zero in the end, are judged in `laws.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.route.load.load_sync import LoadSync
from kvrouter.router.route.load.load_table import NOTHING, Totals
from tests.simulation.router import Router
from tests.simulation.written import Written

# At how many looks in a row two numbers differ, without a change of either, until that is a fault: a complete message
# comes twice between two looks.
MOST_LOOKS = 3
# How long ago the other router was heard then.
HEARD_S = 1.0

# A router's process, another one, and a worker.
Pair = tuple[str, str, WorkerKey]


class SharedLoad:
    """The comparison of routers' loads in one world, once a second."""

    def __init__(self, routers: Sequence[Router], written: Written, now_s: Callable[[], float]) -> None:
        self._routers, self._written, self._now_s = routers, written, now_s
        # How often in a row the two numbers were these, by pair.
        self._differing: dict[Pair, tuple[Totals, Totals, int]] = {}

    def problem(self) -> str:
        """Return which router counts what for another, or ""."""
        able = [router for router in self._routers if router.answers]
        before, self._differing = self._differing, {}
        for router in able:
            assert router.placer is not None
            share = router.placer._share
            if share is None or share.problem is not None:
                continue
            if problem := self._left(router, share):
                return problem
            for other in able:
                if other is not router and (problem := self._differs(router, share, other, before)):
                    return problem
        return ""

    def _left(self, router: Router, share: LoadSync) -> str:
        """Return which process still counts although its last message was read, or "".

        The id of the entry that was read last says whether the message was read, and no time does: a slow network brings a
        reply to the router after the store has written the message, but from before it (seeds 520090 and 520092).
        """
        since_s = share._reading_since_s - share._clock() + self._now_s()
        for token in sorted(share._table.processes & self._written.left(since_s, share._read_id)):
            return f"load: {router.name} still counts {token}, which has left"
        return ""

    def _differs(
        self, router: Router, share: LoadSync, other: Router, before: dict[Pair, tuple[Totals, Totals, int]]
    ) -> str:
        """Return which load of the other router this one has wrong although it is heard, or ""."""
        assert other.placer is not None and other.placer._share is not None
        heard_s, counted = share._table._others.get(other.token, (0.0, {}))
        own = other.placer._share._table._own
        if heard_s < share._clock() - HEARD_S:
            return ""
        for worker in sorted(own.keys() | counted.keys()):
            key = (router.token, other.token, worker)
            numbers = counted.get(worker, NOTHING), own.get(worker, NOTHING)
            if numbers[0] == numbers[1]:
                continue
            looks = before[key][2] + 1 if key in before and before[key][:2] == numbers else 1
            self._differing[key] = (*numbers, looks)
            if looks >= MOST_LOOKS:
                return f"load: {router.name} counts {numbers[0]} of {other.name} at {worker.worker_id}, and it has {numbers[1]}"
        return ""
