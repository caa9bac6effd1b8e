# SPDX-License-Identifier: Apache-2.0
"""The assignment of workers to router processes. Pure.

Every process that sees the same routers and workers computes the same assignment. It is rendezvous hashing with room:
each worker goes to the router that ranks highest for it and has room left, so no two routers differ by more than one
worker, unless routers refuse workers. The result depends on nothing that changes when workers change hands, so it
cannot oscillate. The leases in Redis make the following safe; the assignment only decides which router should try.
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
    """Return the router that should follow each worker; a worker that all routers refuse is left out.

    Args:
        workers: The workers to assign.
        routers: The tokens of the routers, at least one.
        refused: The routers that will not follow a worker.
    """
    takers = {
        worker: [router for router in routers if router not in refused.get(worker, ())] for worker in set(workers)
    }
    # A worker with fewer possible routers is assigned first, so that the others even the loads out.
    pending = sorted(
        (worker for worker, willing in takers.items() if willing), key=lambda worker: (len(takers[worker]), worker)
    )
    least, more = divmod(len(pending), len(routers))
    loads = dict.fromkeys(routers, 0)
    assignment = {}
    for worker in pending:
        ranked = sorted(takers[worker], key=lambda router: _rank(router, worker), reverse=True)
        having_room = (router for router in ranked if loads[router] < least or (more > 0 and loads[router] == least))
        # If no willing router has room, the least loaded one takes the worker.
        chosen = next(having_room, None) or min(ranked, key=lambda router: (loads[router], router))
        more -= loads[chosen] == least
        loads[chosen] += 1
        assignment[worker] = chosen
    return assignment
