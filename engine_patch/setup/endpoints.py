# SPDX-License-Identifier: Apache-2.0
"""Where the patch listens: as configured, else beside the engine's own event endpoint. Pure."""

from __future__ import annotations

from typing import NamedTuple

from kvrouter.events.patch.messages import reports_endpoint, requests_endpoint


class Endpoints(NamedTuple):
    requests: str
    reports: str


def binds(endpoint: str) -> bool:
    """Whether vLLM's publisher binds what it was configured with; it connects to anything else.

    Source: vLLM 0.32.0 distributed/kv_events.py, _is_bind_endpoint; the same rule since 0.20.
    """
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))


def of_rank(endpoint: str, dp_rank: int) -> str:
    """The endpoint of one data-parallel rank, as vLLM's offset_endpoint_port has it, and for ipc too; a port of 0
    stays."""
    if dp_rank == 0:
        return endpoint
    if not endpoint.startswith("tcp://"):
        return f"{endpoint}_dp{dp_rank}"
    host, _, port = endpoint.rpartition(":")
    return f"{host}:{int(port) + dp_rank}" if int(port) else endpoint


def choose(configured: str, bound: str, dp_rank: int, requests: str | None, reports: str | None) -> Endpoints | str:
    """Where to listen, or why that is not possible.

    configured, bound: the publisher's endpoint as set and as it came out, with the rank's offset. requests, reports: as
    the user set them, for rank 0, or None.
    """
    beside = binds(configured)
    requests_at = of_rank(requests, dp_rank) if requests else requests_endpoint(bound) if beside else None
    reports_at = of_rank(reports, dp_rank) if reports else reports_endpoint(bound) if beside else None
    if requests_at and reports_at:
        return Endpoints(requests_at, reports_at)
    why = "has no port" if beside else "is connected to, not bound"
    return (
        f"the engine's event endpoint {configured!r} {why}, so there is no place beside it to listen on; "
        "set KVROUTER_PATCH_REQUESTS and KVROUTER_PATCH_REPORTS"
    )
