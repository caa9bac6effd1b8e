# SPDX-License-Identifier: Apache-2.0
"""Which router process follows which worker: the same answer in every process that sees the same routers and workers. Pure.

Rendezvous hashing with room: each worker goes to the router that ranks highest for it and has room left, so that no two routers
differ by more than one worker. It depends on nothing that changes when workers change hands, so it cannot swing. The leases in
Redis make it safe; this only says who should try.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from hashlib import blake2b

from kvrouter.router.names import WorkerKey

# Looks in a row that must miss a router before its workers go to others. After Redis stood still, all routers have run out, and
# the first to come back would see itself alone.
GONE_AFTER_LOOKS = 2


def _rank(router: str, worker: WorkerKey) -> bytes:
    text = "\0".join((router, worker.model, worker.worker_id, str(worker.dp_rank)))
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()


def shares(workers: Iterable[WorkerKey], routers: Collection[str]) -> dict[WorkerKey, str]:
    """The router of each worker; `routers` must not be empty."""
    pending = sorted(set(workers))
    least, more = divmod(len(pending), len(routers))
    loads = dict.fromkeys(sorted(routers), 0)
    found = {}
    for worker in pending:
        ranked = sorted(loads, key=lambda router: _rank(router, worker), reverse=True)
        chosen = next(router for router in ranked if loads[router] < least or (more and loads[router] == least))
        more -= loads[chosen] == least
        loads[chosen] += 1
        found[worker] = chosen
    return found


class Attendance:
    """The routers that count as alive, from looks at who attends."""

    def __init__(self, token: str) -> None:
        self.routers = frozenset({token})
        self._missed: dict[str, int] = {}

    def look(self, seen: frozenset[str]) -> bool:
        """Take what one look at the store showed; whether `routers` changed."""
        missed = {router: self._missed.get(router, 0) + 1 for router in self.routers - seen}
        self._missed = {router: looks for router, looks in missed.items() if looks < GONE_AFTER_LOOKS}
        before, self.routers = self.routers, seen | self._missed.keys()
        return self.routers != before
