# SPDX-License-Identifier: Apache-2.0
"""Workers as a gateway knows them: `ip:port`. Pure; rebuilt when a registration changes.

A gateway connects to an address and sends the client's own path there. So a worker whose URL has a name for a host, or
a path, cannot be picked."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.index.matching.question import Hit
from kvrouter.router.serve.proxy.worker_addresses import Addresses

UNUSABLE = "register workers with the IP address that the gateway reaches them at, and without a path"


class Endpoints:
    """of: the endpoint of each worker that can be picked. unusable: the others."""

    def __init__(self, addresses: Addresses) -> None:
        self.of: dict[WorkerKey, str] = {}
        self._at: dict[str, set[WorkerKey]] = {}
        unusable = set(addresses.unreachable)
        for worker, target in addresses.targets.items():
            endpoint = None if target.prefix else canonical(target.host_port.decode("latin-1"))
            if endpoint is None:
                unusable.add(worker)
                continue
            self.of[worker] = endpoint
            self._at.setdefault(endpoint, set()).add(worker)
        self.unusable = frozenset(unusable)

    def at(self, endpoint: str, model: str) -> frozenset[WorkerKey]:
        """The workers of a model behind an endpoint."""
        there = self._at.get(canonical(endpoint) or "", ())
        return frozenset(worker for worker in there if worker.model == model)

    def outside(self, subset: Iterable[str] | None) -> frozenset[WorkerKey]:
        """The workers that must not be picked. subset: the only endpoints allowed; None: all are."""
        if subset is None:
            return self.unusable
        allowed = {endpoint for one in subset if (endpoint := canonical(one)) is not None}
        return self.unusable | {worker for worker, endpoint in self.of.items() if endpoint not in allowed}


def canonical(endpoint: str) -> str | None:
    """`10.0.0.1:8000`, `[::1]:8000` in one spelling; None where it is no address with a port."""
    host, _, port = endpoint.strip().rpartition(":")
    if not (port.isascii() and port.isdigit() and int(port) < 1 << 16):
        return None
    try:
        address = ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return None
    return f"[{address}]:{int(port)}" if address.version == 6 else f"{address}:{int(port)}"


class Destination(NamedTuple):
    """The picked endpoint and, after it, those that may serve in its place. hits: of the workers behind each, in the
    same order."""

    endpoints: list[str]
    hits: list[Hit]

    @property
    def text(self) -> str:
        """As the protocol has it."""
        return ",".join(self.endpoints)


def destination(
    chosen: Hit, others: Sequence[Hit], endpoints: Endpoints, addresses: Addresses, most: int
) -> Destination:
    """The chosen worker, and `most` others at most, the cheapest first. All get the same request, so only those qualify
    that want the same headers: the same rank, and a sidecar where the chosen one has one."""
    found = Destination([endpoints.of[chosen.worker]], [chosen])
    rank, has_sidecar = addresses.ranks.get(chosen.worker), chosen.worker in addresses.by_header
    for hit in others:
        endpoint = endpoints.of.get(hit.worker)
        if len(found.hits) > most:
            break
        if endpoint is None or endpoint in found.endpoints:
            continue
        if addresses.ranks.get(hit.worker) != rank or (hit.worker in addresses.by_header) != has_sidecar:
            continue
        found.endpoints.append(endpoint)
        found.hits.append(hit)
    return found
