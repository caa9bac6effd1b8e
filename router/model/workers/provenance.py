# SPDX-License-Identifier: Apache-2.0
"""Checks whether a worker's events come from the engine that it is registered with. Pure.

The evidence is the rank in every batch, the ranks and event endpoints that an engine names over HTTP, two registrations
of one endpoint, and two patched streams of one publisher. Evidence that contradicts a registration ends the worker's
credit; missing evidence changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence, Set

from kvrouter.router.base.common.escaping import printable
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.model.workers.engine_answers import Stream
from kvrouter.router.model.workers.registration import NO_PATCH, Registration


def ranks_allowed(dp_rank: int, alone: bool, engine: Sequence[int]) -> frozenset[int] | None:
    """Return the ranks that events of a worker may name, or None if they may name any rank.

    Source: vLLM 0.32.0 v1/core/sched/scheduler.py:196, events name data_parallel_index, the rank among all peers.

    Args:
        dp_rank: The rank with which the worker is registered.
        alone: Whether no other rank of the engine is registered.
        engine: The `engine_ranks` of the worker's engine, empty while they are not known.
    """
    if alone and len(engine) == 1:
        # With external load balancing, the only core behind this address may have any rank.
        return frozenset(engine)
    if alone and dp_rank == 0 and not engine:
        return None
    # With hybrid load balancing, requests name the first core behind this address 0
    # (v1/engine/input_processor.py:395).
    return frozenset({dp_rank, *engine[dp_rank : dp_rank + 1]})


def rank_problem(published: int | None, dp_rank: int, allowed: frozenset[int] | None) -> str:
    """Return why events of rank `published` are not the worker's, or "" if nothing contradicts them.

    Args:
        published: The rank in the events, or None if they name none.
        dp_rank: The rank with which the worker is registered.
        allowed: The result of `ranks_allowed`.
    """
    if published is None or allowed is None or published in allowed:
        return ""
    expected = " or ".join(map(str, sorted(allowed)))
    return (
        f"its event endpoint publishes rank {published}; it is registered as rank {dp_rank}, whose events name rank {expected}: "
        f"register the endpoint of rank {expected} (vLLM adds the rank to the port of its KV events)"
    )


def origin_problems(
    registrations: Iterable[Registration],
    sources: Mapping[str, Mapping[int, Stream]],
    lives: Mapping[WorkerKey, str],
) -> dict[WorkerKey, str]:
    """Return, by worker, why its events seem to come from another engine.

    Args:
        registrations: The present registrations.
        sources: By URL, the streams that the engine there names (`GET /kv_event_sources`).
        lives: By worker, the epoch of the patched publisher that is followed for it.
    """
    registered = list(registrations)
    problems: dict[WorkerKey, str] = {}
    for worker, epoch, others in _shared(registered, lambda registration: lives.get(registration.worker)):
        problems[worker] = (
            f"its stream is that of {others} too (both have the publisher {epoch}): register the endpoint of its own engine"
        )
    for worker, endpoint, others in _shared(
        registered,
        lambda registration: (
            _plain(registration.patch) if registration.patch and registration.patch != NO_PATCH else None
        ),
    ):
        problems[worker] = (
            f"its patch endpoint {endpoint} is that of {others} too: register the endpoint of its own engine"
        )
    own_endpoints = {
        registration.worker: {_plain(stream.events) for stream in own_streams(registration, sources)}
        for registration in registered
    }
    # By endpoint, the worker whose engine names the endpoint as its own.
    owners = {endpoint: worker for worker, endpoints in own_endpoints.items() for endpoint in endpoints}
    confirmed = {
        registration.worker
        for registration in registered
        if registration.events is not None and _plain(registration.events) in own_endpoints[registration.worker]
    }
    for worker, endpoint, others in _shared(
        registered, lambda registration: _plain(registration.events) if registration.events else None, confirmed
    ):
        problems[worker] = (
            f"its event endpoint {endpoint} is that of {others} too: register the endpoint of its own engine"
        )
    for registration in registered:
        owner = (
            None
            if registration.events is None or registration.worker in confirmed
            else owners.get(_plain(registration.events))
        )
        if owner is not None and own_endpoints[registration.worker]:
            problems[registration.worker] = (
                f"its event endpoint {registration.events} is that of {printable(owner.route_name)}, by the word of "
                f"the engine there; its own engine names {' or '.join(sorted(own_endpoints[registration.worker]))}: register that"
            )
    return problems


def _shared(
    registrations: Iterable[Registration],
    key_of: Callable[[Registration], str | None],
    confirmed: Set[WorkerKey] = frozenset(),
) -> Iterable[tuple[WorkerKey, str, str]]:
    """Yield the workers that share a key although they are different engines.

    A worker in `confirmed` is left out if no other worker with its key is in `confirmed`, because the key is its own.

    Yields:
        The worker, the key, and the names of the other workers with that key.
    """
    groups: dict[str, list[Registration]] = {}
    for registration in registrations:
        key = key_of(registration)
        if key is not None:
            groups.setdefault(key, []).append(registration)
    for key, members in groups.items():
        if len(members) == 1 or len(set(map(_engine, members))) == 1:
            continue
        owners = {member.worker for member in members} & confirmed
        for member in members:
            if owners != {member.worker}:
                others = sorted(printable(other.worker.route_name) for other in members if other is not member)
                yield member.worker, key, ", ".join(others)


def _engine(registration: Registration) -> Hashable:
    """Return a key of the engine core that requests for this worker reach, as far as the registration shows."""
    worker = registration.worker
    if registration.url is None:
        return worker
    return _plain(registration.url.rstrip("/")), worker.dp_rank


def own_streams(registration: Registration, sources: Mapping[str, Mapping[int, Stream]]) -> list[Stream]:
    """Return the event streams that the worker's own engine names for its rank; empty if it names none.

    Args:
        registration: The worker.
        sources: By URL, the streams that the engine there names, by rank.
    """
    streams = sources.get(registration.url or "")
    if not streams:
        return []
    rank = registration.worker.dp_rank
    ranks = sorted(streams)
    own_ranks = ranks if len(ranks) == 1 else sorted({rank, *ranks[rank : rank + 1]} & streams.keys())
    return [streams[own_rank] for own_rank in own_ranks]


def same_endpoint(first: str | None, second: str | None) -> bool:
    """Return whether two addresses are the same as far as their texts show; `localhost` equals 127.0.0.1."""
    return first == second or (first is not None and second is not None and _plain(first) == _plain(second))


def registered_twice(registrations: Iterable[Registration]) -> list[list[WorkerKey]]:
    """Return groups of workers of one model that reach the same engine core under different ids."""
    groups: dict[Hashable, list[WorkerKey]] = {}
    for registration in registrations:
        if registration.url is not None:
            groups.setdefault((registration.worker.model, _engine(registration)), []).append(registration.worker)
    return [sorted(workers) for workers in groups.values() if len(workers) > 1]


def _plain(address: str) -> str:
    return address.replace("://localhost:", "://127.0.0.1:")
