# SPDX-License-Identifier: Apache-2.0
"""Whether a worker's events come from the engine that it is registered with. Pure.

Proofs: the rank in every batch, the ranks and event endpoints that an engine names over HTTP, two registrations of one
endpoint, and two patched streams of one publisher. What contradicts a registration ends its credit; what proves nothing
changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence, Set

from kvrouter.router.base.common.escaping import printable
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.model.workers.engine_answers import Stream
from kvrouter.router.model.workers.registration import NO_PATCH, Registration


def ranks_allowed(dp_rank: int, alone: bool, engine: Sequence[int]) -> frozenset[int] | None:
    """The ranks that events of a worker may name; None: any.

    alone: no other rank is registered beside it. engine: `engine_ranks` of its engine, empty while unknown.
    Source: vLLM 0.32.0 v1/core/sched/scheduler.py:196, events name data_parallel_index, the rank among all peers.
    """
    if alone and len(engine) == 1:
        # External load balancing: whatever the only core behind this address is called here.
        return frozenset(engine)
    if alone and dp_rank == 0 and not engine:
        return None
    # Hybrid load balancing: requests name the first core behind this address 0 (v1/engine/input_processor.py:395).
    return frozenset({dp_rank, *engine[dp_rank : dp_rank + 1]})


def rank_problem(published: int | None, dp_rank: int, allowed: frozenset[int] | None) -> str:
    """Why events of this rank are not the worker's; empty where nothing says so."""
    if published is None or allowed is None or published in allowed:
        return ""
    own = " or ".join(map(str, sorted(allowed)))
    return (
        f"its event endpoint publishes rank {published}; it is registered as rank {dp_rank}, whose events name rank {own}: "
        f"register the endpoint of rank {own} (vLLM adds the rank to the port of its KV events)"
    )


def origin_problems(
    registrations: Iterable[Registration],
    sources: Mapping[str, Mapping[int, Stream]],
    lives: Mapping[WorkerKey, str],
) -> dict[WorkerKey, str]:
    """By worker, what says that its events are another engine's.

    sources: by URL, the streams that the engine there names (`GET /kv_event_sources`). lives: by worker, the epoch of
    the patched publisher that is followed for it.
    """
    known = list(registrations)
    found: dict[WorkerKey, str] = {}
    for worker, epoch, others in _shared(known, lambda one: lives.get(one.worker)):
        found[worker] = (
            f"its stream is that of {others} too (both have the publisher {epoch}): register the endpoint of its own engine"
        )
    for worker, endpoint, others in _shared(
        known, lambda one: _plain(one.patch) if one.patch and one.patch != NO_PATCH else None
    ):
        found[worker] = (
            f"its patch endpoint {endpoint} is that of {others} too: register the endpoint of its own engine"
        )
    own = {one.worker: {_plain(stream.events) for stream in own_streams(one, sources)} for one in known}
    # The worker whose engine names an endpoint as its own, by endpoint.
    owners = {endpoint: worker for worker, endpoints in own.items() for endpoint in endpoints}
    right = {one.worker for one in known if one.events is not None and _plain(one.events) in own[one.worker]}
    for worker, endpoint, others in _shared(known, lambda one: _plain(one.events) if one.events else None, right):
        found[worker] = (
            f"its event endpoint {endpoint} is that of {others} too: register the endpoint of its own engine"
        )
    for one in known:
        owner = None if one.events is None or one.worker in right else owners.get(_plain(one.events))
        if owner is not None and own[one.worker]:
            found[one.worker] = (
                f"its event endpoint {one.events} is that of {printable(owner.route_name)}, by the word of the engine there; its "
                f"own engine names {' or '.join(sorted(own[one.worker]))}: register that"
            )
    return found


def _shared(
    known: Iterable[Registration],
    key_of: Callable[[Registration], str | None],
    right: Set[WorkerKey] = frozenset(),
) -> Iterable[tuple[WorkerKey, str, str]]:
    """(worker, key, the others) of workers with one key that are not one engine. right: whom a key belongs to, if it is
    one's."""
    groups: dict[str, list[Registration]] = {}
    for one in known:
        key = key_of(one)
        if key is not None:
            groups.setdefault(key, []).append(one)
    for key, members in groups.items():
        if len(members) == 1 or len(set(map(_engine, members))) == 1:
            continue
        owners = {member.worker for member in members} & right
        for member in members:
            if owners != {member.worker}:
                others = sorted(printable(other.worker.route_name) for other in members if other is not member)
                yield member.worker, key, ", ".join(others)


def _engine(registration: Registration) -> Hashable:
    """The engine core that requests for this worker reach, as far as the registration says."""
    worker = registration.worker
    if registration.url is None:
        return worker
    return _plain(registration.url.rstrip("/")), worker.dp_rank


def own_streams(registration: Registration, sources: Mapping[str, Mapping[int, Stream]]) -> list[Stream]:
    """Return the event endpoints that the worker's own engine names; empty if it names none."""
    streams = sources.get(registration.url or "")
    if not streams:
        return []
    rank = registration.worker.dp_rank
    ranks = sorted(streams)
    chosen = ranks if len(ranks) == 1 else sorted({rank, *ranks[rank : rank + 1]} & streams.keys())
    return [streams[each] for each in chosen]


def same_endpoint(one: str | None, other: str | None) -> bool:
    """Return whether two addresses are the same, as far as their texts show."""
    return one == other or (one is not None and other is not None and _plain(one) == _plain(other))


def registered_twice(registrations: Iterable[Registration]) -> list[list[WorkerKey]]:
    """Return the workers of one model that have several ids and one engine core behind them, by engine."""
    groups: dict[Hashable, list[WorkerKey]] = {}
    for one in registrations:
        if one.url is not None:
            groups.setdefault((one.worker.model, _engine(one)), []).append(one.worker)
    return [sorted(workers) for workers in groups.values() if len(workers) > 1]


def _plain(address: str) -> str:
    return address.replace("://localhost:", "://127.0.0.1:")
