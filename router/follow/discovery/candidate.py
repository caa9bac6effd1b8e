# SPDX-License-Identifier: Apache-2.0
"""A worker as a source describes it, completed by its engine's answers. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.model.workers.engine_answers import EngineAnswers, Stream
from kvrouter.router.model.workers.registration import NO_PATCH, UNKNOWN_MODEL, Registration
from kvrouter.router.model.workers.worker_spec import MAX_DP_RANK, WorkerSpec


class Candidate(msgspec.Struct, frozen=True):
    """registration: as far as it is known; its model may be UNKNOWN_MODEL.

    any_rank: no rank was named, so it stands for all ranks that its engine reports. fallback: where its events are if
    its engine cannot report that. only_known: it takes no request now, and is only of interest if it is registered
    already. problem: why it cannot be registered as it is described; what is registered of it stays."""

    registration: Registration
    any_rank: bool = False
    fallback: Stream | None = None
    only_known: bool = False
    problem: str = ""

    @property
    def asks_model(self) -> bool:
        return self.registration.worker.model == UNKNOWN_MODEL

    @property
    def asks_events(self) -> bool:
        """Whether the engine is to say where its events are: nobody else did, and no patch is named that would have
        them."""
        registration = self.registration
        return registration.url is not None and registration.events is None and registration.patch in (None, NO_PATCH)


def candidate_of(spec: WorkerSpec, source: str) -> Candidate:
    """What a `--worker` stands for."""
    registration = spec.registration(spec.model or UNKNOWN_MODEL)
    return Candidate(msgspec.structs.replace(registration, source=source), any_rank=spec.dp_rank is None)


def completed(candidate: Candidate, told: EngineAnswers, known: Sequence[Registration]) -> list[Registration]:
    """The workers that the candidate is. Empty while its model is not known.

    known: what is registered under its id by its source. It stays while the engine does not answer: a router that
    restarts while an engine is away must not forget where its events are."""
    given = candidate.registration
    known = [one for one in known if one.url == given.url]
    model = given.worker.model
    if candidate.asks_model:
        model = told.model or (known[0].worker.model if known else "")
        if not model:
            return []
        given = _as_worker(given, model, given.worker.dp_rank)
    if given.engine is None and told.engine is not None:
        given = msgspec.structs.replace(given, engine=told.engine)
    if not candidate.asks_events:
        return [given]
    if told.streams is None:
        with_events = [one for one in known if one.events is not None and one.worker.model == model]
        if not candidate.any_rank:
            with_events = [one for one in with_events if one.worker.dp_rank == given.worker.dp_rank]
        if with_events:
            return [
                msgspec.structs.replace(
                    _as_worker(given, model, one.worker.dp_rank),
                    events=one.events,
                    replay=one.replay,
                    note=one.note,
                    engine=given.engine or one.engine,
                )
                for one in with_events
            ]
        return [_noted(given, told.problem)]
    streams = told.streams
    if not streams:
        if candidate.fallback is not None and told.silent:
            return [msgspec.structs.replace(given, events=candidate.fallback.events, replay=candidate.fallback.replay)]
        return [_noted(given, told.problem)]
    if len(streams) == 1:
        # One core behind this address, whatever rank it has among its peers: requests name none, or that which was
        # given.
        return [_with(given, next(iter(streams.values())))]
    if candidate.any_rank:
        return [_with(_as_worker(given, model, rank), stream) for rank, stream in sorted(streams.items())]
    if given.worker.dp_rank in streams:
        return [_with(given, streams[given.worker.dp_rank])]
    ranks = ", ".join(map(str, sorted(streams)))
    return [_noted(given, f"its engine has no rank {given.worker.dp_rank}: there are {ranks}; correct dp_rank")]


def ranked(candidate: Candidate, ranks: int) -> list[Candidate]:
    """The endpoints of this number of ranks, with ports counted up as in vLLM (distributed/kv_events.py,
    offset_endpoint_port)."""
    given = candidate.registration

    def of(rank: int) -> Candidate:
        registration = msgspec.structs.replace(
            _as_worker(given, given.worker.model, rank),
            events=offset_port(given.events, rank),
            replay=offset_port(given.replay, rank),
        )
        fallback = candidate.fallback and Stream(
            offset_port(candidate.fallback.events, rank) or "", offset_port(candidate.fallback.replay, rank)
        )
        return msgspec.structs.replace(candidate, registration=registration, any_rank=False, fallback=fallback)

    return [of(rank) for rank in range(min(ranks, MAX_DP_RANK + 1))]


def offset_port(endpoint: str | None, rank: int) -> str | None:
    """A TCP endpoint as the rank with this number has it."""
    if endpoint is None or not rank:
        return endpoint
    base, _, port = endpoint.rpartition(":")
    return f"{base}:{int(port) + rank}"


def _as_worker(registration: Registration, model: str, rank: int) -> Registration:
    worker = WorkerKey(model, registration.worker.worker_id, rank)
    return msgspec.structs.replace(registration, worker=worker)


def _with(registration: Registration, stream: Stream) -> Registration:
    note = stream.note or registration.note
    return msgspec.structs.replace(registration, events=stream.events, replay=stream.replay, note=note)


def _noted(registration: Registration, note: str) -> Registration:
    joined = "; ".join(filter(None, (registration.note, note)))
    return msgspec.structs.replace(registration, note=joined)
