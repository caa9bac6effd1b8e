# SPDX-License-Identifier: Apache-2.0
"""The addresses on which the patch listens: as configured, else next to the engine's own event endpoint.

No I/O.
"""

from __future__ import annotations

from typing import NamedTuple

from kvrouter.events.patch.messages import reports_endpoint, requests_endpoint


class Endpoints(NamedTuple):
    """The addresses of the patch's two sockets, as given to ZMQ."""

    requests: str
    reports: str


def binds(endpoint: str) -> bool:
    """Return whether vLLM's publisher binds the endpoint that it was configured with; it connects to all others.

    Source: vLLM 0.32.0 distributed/kv_events.py, _is_bind_endpoint; the same rule since 0.20.
    """
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))


def of_rank(endpoint: str, dp_rank: int) -> str:
    """Return the endpoint of one data-parallel rank.

    TCP ports are offset as in vLLM's offset_endpoint_port, except for port 0, which stays 0. All other endpoints, such
    as ipc, get a suffix.
    """
    if dp_rank == 0:
        return endpoint
    if not endpoint.startswith("tcp://"):
        return f"{endpoint}_dp{dp_rank}"
    host, _, port = endpoint.rpartition(":")
    return f"{host}:{int(port) + dp_rank}" if int(port) else endpoint


def choose(configured: str, bound: str, dp_rank: int, requests: str | None, reports: str | None) -> Endpoints | str:
    """Return the addresses to listen on, or a text that says why there are none.

    Args:
        configured: The publisher's endpoint in the engine's configuration.
        bound: The publisher's actual endpoint, with the rank's offset.
        dp_rank: The publisher's data-parallel rank.
        requests: The address for requests that the user set for rank 0, or None.
        reports: The address for reports that the user set for rank 0, or None.
    """
    is_bound = binds(configured)
    requests_address = of_rank(requests, dp_rank) if requests else requests_endpoint(bound) if is_bound else None
    reports_address = of_rank(reports, dp_rank) if reports else reports_endpoint(bound) if is_bound else None
    if requests_address and reports_address:
        return Endpoints(requests_address, reports_address)
    reason = "has no port" if is_bound else "is connected to, not bound"
    return (
        f"the engine's event endpoint {configured!r} {reason}, so there is no place beside it to listen on; "
        "set KVROUTER_PATCH_REQUESTS and KVROUTER_PATCH_REPORTS"
    )
