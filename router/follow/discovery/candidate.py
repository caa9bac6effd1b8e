# SPDX-License-Identifier: Apache-2.0
"""A worker as a source describes it, completed by its engine's answers. Pure, except that it writes a log line."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec

from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.model.workers.engine_answers import EngineAnswers, Stream
from kvrouter.router.model.workers.listed_worker import ListedWorker
from kvrouter.router.model.workers.registration import BASE_PATH_LEFT_OUT, NO_PATCH, UNKNOWN_MODEL, Registration
from kvrouter.router.model.workers.worker_spec import MAX_DP_RANK

log = logging.getLogger(__name__)


class Candidate(msgspec.Struct, frozen=True):
    """A worker as one source describes it."""

    # As complete as the source knows it. The model may be UNKNOWN_MODEL.
    registration: Registration
    # Whether the source named no rank, so the candidate stands for all ranks that its engine reports.
    any_rank: bool = False
    # The event stream to follow if the engine cannot report its streams.
    fallback: Stream | None = None
    # Whether the worker takes no requests now, and matters only if it is registered already.
    only_known: bool = False
    # Why the worker cannot be registered as described, or "" if it can. Existing registrations of it stay.
    problem: str = ""

    @property
    def asks_model(self) -> bool:
        """Whether the engine must be queried for its model."""
        return self.registration.worker.model == UNKNOWN_MODEL

    @property
    def asks_events(self) -> bool:
        """Whether the engine must be queried for its event streams.

        It must if the source names neither them nor an engine patch, which has the same events.
        """
        registration = self.registration
        return registration.url is not None and registration.events is None and registration.patch in (None, NO_PATCH)


def candidate_of(listed: ListedWorker, source: str) -> Candidate:
    """Return the candidate that an entry of a list of workers describes."""
    registration = listed.registration
    if listed.had_base_path:
        log.info(BASE_PATH_LEFT_OUT, extra={"worker": registration.worker.worker_id, "url": registration.url})
    return Candidate(msgspec.structs.replace(registration, source=source), any_rank=listed.any_rank)


def completed(candidate: Candidate, answers: EngineAnswers, known: Sequence[Registration]) -> list[Registration]:
    """Return the workers that the candidate stands for, completed by `answers`, the answers of its engine.

    The list is empty while the candidate's model is not known.

    `known` has the registrations of the same id by the same source. They fill in for an engine that does not answer,
    because a router that restarts while an engine is away must not forget where the engine's events are.
    """
    registration = candidate.registration
    known = [other for other in known if other.url == registration.url]
    model = registration.worker.model
    if candidate.asks_model:
        model = answers.model or (known[0].worker.model if known else "")
        if not model:
            return []
        registration = _as_worker(registration, model, registration.worker.dp_rank)
    if registration.engine is None and answers.engine is not None:
        registration = msgspec.structs.replace(registration, engine=answers.engine)
    if not candidate.asks_events:
        return [registration]
    if answers.streams is None:
        with_events = [other for other in known if other.events is not None and other.worker.model == model]
        if not candidate.any_rank:
            with_events = [other for other in with_events if other.worker.dp_rank == registration.worker.dp_rank]
        if with_events:
            return [
                msgspec.structs.replace(
                    _as_worker(registration, model, other.worker.dp_rank),
                    events=other.events,
                    replay=other.replay,
                    note=other.note,
                    engine=registration.engine or other.engine,
                )
                for other in with_events
            ]
        return [_noted(registration, answers.problem)]
    streams = answers.streams
    if not streams:
        if candidate.fallback is not None and answers.silent:
            return [
                msgspec.structs.replace(
                    registration, events=candidate.fallback.events, replay=candidate.fallback.replay
                )
            ]
        return [_noted(registration, answers.problem)]
    if len(streams) == 1:
        # There is one core behind this address, whatever rank it has among its peers. Requests to it name no rank, or
        # the rank that the source gave.
        return [_with(registration, next(iter(streams.values())))]
    if candidate.any_rank:
        return [_with(_as_worker(registration, model, rank), stream) for rank, stream in sorted(streams.items())]
    if registration.worker.dp_rank in streams:
        return [_with(registration, streams[registration.worker.dp_rank])]
    ranks = ", ".join(map(str, sorted(streams)))
    return [
        _noted(
            registration, f"its engine has no rank {registration.worker.dp_rank}: there are {ranks}; correct dp_rank"
        )
    ]


def ranked(candidate: Candidate, ranks: int) -> list[Candidate]:
    """Return a candidate for each of this number of ranks.

    The ports of each rank are counted up as in vLLM (distributed/kv_events.py, offset_endpoint_port).
    """
    template = candidate.registration

    def of(rank: int) -> Candidate:
        registration = msgspec.structs.replace(
            _as_worker(template, template.worker.model, rank),
            events=offset_port(template.events, rank),
            replay=offset_port(template.replay, rank),
        )
        fallback = candidate.fallback and Stream(
            offset_port(candidate.fallback.events, rank) or "", offset_port(candidate.fallback.replay, rank)
        )
        return msgspec.structs.replace(candidate, registration=registration, any_rank=False, fallback=fallback)

    return [of(rank) for rank in range(min(ranks, MAX_DP_RANK + 1))]


def offset_port(endpoint: str | None, rank: int) -> str | None:
    """Return the TCP endpoint of this rank, whose port is that of rank 0 plus the rank."""
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
