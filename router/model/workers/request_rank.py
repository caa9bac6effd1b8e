# SPDX-License-Identifier: Apache-2.0
"""The number by which a request names one of the ranks behind an address. Pure.

vLLM's events, `/metrics` and `/kv_event_sources` name a rank among all peers, but a request names it by its place behind
the address: with `--data-parallel-start-rank 8`, the cores 8 and 9 are 0 and 1. Source: vLLM 0.32.0
v1/engine/core_client.py:720, v1/engine/input_processor.py:396; the same since 0.19.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.model.workers.engine_answers import Stream
from kvrouter.router.model.workers.provenance import same_endpoint
from kvrouter.router.model.workers.registration import Registration


def request_ranks(
    registrations: Iterable[Registration], sources: Mapping[str, Mapping[int, Stream]]
) -> dict[WorkerKey, int]:
    """Return the rank to send with a request, for each worker whose URL has several registered ranks of its model.

    An engine with one rank rejects requests that name another, so the only rank behind a URL is not named.

    Args:
        registrations: The registered workers.
        sources: By URL, the streams that the engine there names, by its rank among all peers.
    """
    at: dict[tuple[str, str], list[Registration]] = {}
    for registration in registrations:
        if registration.url is not None:
            at.setdefault((registration.url, registration.worker.model), []).append(registration)
    ranks: dict[WorkerKey, int] = {}
    for (url, _), members in at.items():
        if len(members) > 1:
            ranks |= _places(members, sources.get(url) or {})
    return ranks


def _places(members: Sequence[Registration], streams: Mapping[int, Stream]) -> dict[WorkerKey, int]:
    """Return the place of each member's core behind their address.

    A member may be registered by its rank among all peers or by its place. The event stream that it follows decides; if
    the engine does not name that stream, all members are registered by their rank if the engine names each of them. An
    engine that names no streams has no core before the lowest registered rank.
    """
    registered = {member.worker.dp_rank for member in members}
    first = min(streams or registered)
    offset = first if not streams or registered <= streams.keys() else 0
    places: dict[WorkerKey, int] = {}
    for member in members:
        followed = [rank for rank, stream in streams.items() if same_endpoint(stream.events, member.events)]
        places[member.worker] = followed[0] - first if len(followed) == 1 else member.worker.dp_rank - offset
    return places
