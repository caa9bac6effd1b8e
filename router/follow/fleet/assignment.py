# SPDX-License-Identifier: Apache-2.0
"""Which router process follows which worker: the same answer in every process that sees the same routers and workers.
Pure.

Rendezvous hashing with room: each worker goes to the router that ranks highest for it and has room left, so that no two
routers differ by more than one worker, but where routers refuse workers. It depends on nothing that changes when
workers change hands, so it cannot swing. The leases in Redis make it safe; this only says who should try.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from hashlib import blake2b

from kvrouter.router.base.common.ids import WorkerKey


def _rank(router: str, worker: WorkerKey) -> bytes:
    text = "\0".join((router, worker.model, worker.worker_id, str(worker.dp_rank)))
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()


def assign_workers(
    workers: Iterable[WorkerKey], routers: Collection[str], refused: Mapping[WorkerKey, Collection[str]]
) -> dict[WorkerKey, str]:
    """The router of each worker; `routers` must not be empty. refused: the routers that will not follow a worker: where
    none is left, nobody should."""
    takers = {
        worker: [router for router in routers if router not in refused.get(worker, ())] for worker in set(workers)
    }
    # Who has less choice chooses first, so that the others even it out.
    pending = sorted((worker for worker, able in takers.items() if able), key=lambda one: (len(takers[one]), one))
    least, more = divmod(len(pending), len(routers))
    loads = dict.fromkeys(routers, 0)
    found = {}
    for worker in pending:
        ranked = sorted(takers[worker], key=lambda router: _rank(router, worker), reverse=True)
        having_room = (router for router in ranked if loads[router] < least or (more > 0 and loads[router] == least))
        # With no room among those that take it, the one that has least to do.
        chosen = next(having_room, None) or min(ranked, key=lambda router: (loads[router], router))
        more -= loads[chosen] == least
        loads[chosen] += 1
        found[worker] = chosen
    return found
