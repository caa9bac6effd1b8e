# SPDX-License-Identifier: Apache-2.0
"""Workers under the names that a gateway has for them: `ip:port`. Pure; rebuilt when a registration changes.

A gateway connects to an address and sends the client's own path there. Therefore a worker whose URL has a host name or
a path cannot be picked.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.index.matching.question import Hit
from kvrouter.router.serve.proxy.worker_addresses import Addresses

UNUSABLE = "register workers with the IP address that the gateway reaches them at, and without a path"


class Endpoints:
    """The endpoints of all registered workers, at one time."""

    def __init__(self, addresses: Addresses) -> None:
        # The endpoint of each worker that can be picked.
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
        # Workers that cannot be picked.
        self.unusable = frozenset(unusable)

    def at(self, endpoint: str, model: str) -> frozenset[WorkerKey]:
        """Return the workers of a model behind an endpoint."""
        workers = self._at.get(canonical(endpoint) or "", ())
        return frozenset(worker for worker in workers if worker.model == model)

    def outside(self, subset: Iterable[str] | None) -> frozenset[WorkerKey]:
        """Return the workers that must not be picked. `subset` has the only endpoints allowed; None allows all."""
        if subset is None:
            return self.unusable
        allowed = {endpoint for text in subset if (endpoint := canonical(text)) is not None}
        return self.unusable | {worker for worker, endpoint in self.of.items() if endpoint not in allowed}


def canonical(endpoint: str) -> str | None:
    """Return one spelling of an endpoint like `10.0.0.1:8000` or `[::1]:8000`, or None if it is not IP and port."""
    host, _, port = endpoint.strip().rpartition(":")
    if not (port.isascii() and port.isdigit() and int(port) < 1 << 16):
        return None
    try:
        address = ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return None
    return f"[{address}]:{int(port)}" if address.version == 6 else f"{address}:{int(port)}"


class Destination(NamedTuple):
    """The picked endpoint, followed by its fallbacks."""

    endpoints: list[str]
    # The hit of the worker behind each endpoint, in the same order.
    hits: list[Hit]

    @property
    def text(self) -> str:
        """The endpoints in the form of the protocol, separated by commas."""
        return ",".join(self.endpoints)


def destination(
    chosen: Hit, others: Sequence[Hit], endpoints: Endpoints, addresses: Addresses, most: int
) -> Destination:
    """Return the endpoints of the chosen worker and of its fallbacks.

    All endpoints get the same request, so only workers that need the same headers qualify: the same rank, and a sidecar
    if the chosen worker has one.

    Args:
        chosen: The hit of the chosen worker.
        others: The hits of other workers, the cheapest first.
        endpoints: The endpoints of the workers.
        addresses: The addresses of the workers.
        most: The largest number of fallbacks.
    """
    picked = Destination([endpoints.of[chosen.worker]], [chosen])
    rank, has_sidecar = addresses.ranks.get(chosen.worker), chosen.worker in addresses.by_header
    for hit in others:
        endpoint = endpoints.of.get(hit.worker)
        if len(picked.hits) > most:
            break
        if endpoint is None or endpoint in picked.endpoints:
            continue
        if addresses.ranks.get(hit.worker) != rank or (hit.worker in addresses.by_header) != has_sidecar:
            continue
        picked.endpoints.append(endpoint)
        picked.hits.append(hit)
    return picked
