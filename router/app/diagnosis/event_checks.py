# SPDX-License-Identifier: Apache-2.0
"""Checks of the engines' events: whether they arrive, and whether they come from the right engine. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from kvrouter.contract.diagnosis import Finding
from kvrouter.router.app.diagnosis.endpoint_probe import PUBLISHERS, REPLIERS, EndpointAnswer
from kvrouter.router.app.diagnosis.snapshot import PromptCount, Snapshot, WorkerFacts
from kvrouter.router.model.engines.known import engine_named
from kvrouter.router.model.workers.engine_answers import Stream
from kvrouter.router.model.workers.engine_cache import cache_problem
from kvrouter.router.model.workers.provenance import same_endpoint
from kvrouter.router.model.workers.registration import NO_PATCH, Registration
from kvrouter.router.model.workers.source_precedence import REGISTER
from kvrouter.router.model.workers.stream_state import StreamState
from kvrouter.router.observe.findings.finding import argument, found

# How many prompts of whole blocks an engine must have computed without an event before it counts as unheard: the events
# of the last prompt may still be under way.
UNHEARD_PROMPTS = 3
# The states in which events are not followed and for which no other check gives the cause.
UNFOLLOWED = frozenset({StreamState.CONNECTING, StreamState.SUSPECT, StreamState.RESYNCING})
# The type of a ZMQ socket that does not name its type.
UNKNOWN_SOCKET = ""
# The roles of the endpoints that an engine itself names.
STREAM_ROLES = ("events", "replay")


def event_findings(snapshot: Snapshot) -> Iterator[Finding]:
    """Yield the findings about the event streams of workers that are not down."""
    for worker in snapshot.workers:
        if worker.is_down:
            # The ports of an engine that does not run are closed.
            continue
        findings = list(_of_endpoints(worker, snapshot))
        yield from findings
        yield from _of_stream(worker, explained=bool(findings))


def _of_stream(worker: WorkerFacts, *, explained: bool) -> Iterator[Finding]:
    registration = worker.registration
    engine = engine_named(registration.engine)
    flags = engine.flags
    if worker.is_silent:
        reasons = (registration.note or worker.reason or "it was registered without one", cache_problem(worker.cache))
        yield found("KV201", worker.subject, "; ".join(filter(None, reasons)), _publishing(worker))
        return
    if cache_problem(worker.cache):
        # An engine without prefix caching stores no block and so sends no event. Other problems of its events do not
        # matter then.
        yield found(
            "KV202", worker.subject, cache_problem(worker.cache), f"{flags.serve} {flags.prefix_cache} {flags.events}"
        )
        return
    if worker.state is StreamState.MISMATCHED:
        yield found(
            "KV203",
            worker.subject,
            worker.reason,
            f"register each worker with the endpoints of its own engine and rank; the engine names them (vLLM from 0.31 on): curl "
            f"{argument(registration.url or 'ENGINE')}{engine.info_path}",
        )
    elif worker.state in UNFOLLOWED and not explained:
        yield found(
            "KV208",
            worker.subject,
            f"it is {worker.state.value}: {worker.reason}",
            "wait some seconds and run doctor again; if it stays: can this machine reach "
            f"{registration.events or registration.patch}?",
        )
    elif _is_unheard(worker.prompts, worker):
        yield found(
            "KV202",
            worker.subject,
            f"it computed {worker.prompts.whole} prompts of whole blocks, and no event came from "
            f"{registration.events or registration.patch}",
            f"{flags.serve} {flags.prefix_cache} {flags.events}; and register the endpoint that this engine publishes on",
        )
    if worker.clears:
        yield found("KV209", worker.subject, worker.clears)
    if registration.events is not None and registration.replay is None and not worker.is_patched and not explained:
        yield found(
            "KV207",
            worker.subject,
            "batches that are lost cannot be had again: after a gap or a restart of the router, everything is learned again",
            f"{flags.serve} {flags.events}; and register replay=tcp://HOST:5558",
        )


def _publishing(worker: WorkerFacts) -> str:
    """Return the steps that give a worker without an event endpoint one."""
    registration = worker.registration
    flags = engine_named(registration.engine).flags
    if worker.published:
        return f"register {_endpoints_text(worker.published[0])}: its engine publishes there"
    caching = f"{flags.prefix_cache} " if cache_problem(worker.cache) else ""
    start = f"{flags.serve} {caching}{flags.events}"
    if not worker.names_streams:
        # The engine is a vLLM before 0.31, or cannot be reached.
        return f"{start}; and register events=tcp://HOST:5557,replay=tcp://HOST:5558"
    return f"{start}; then register it again" if registration.source == REGISTER else start


def _endpoints_text(stream: Stream) -> str:
    """Return a stream's endpoints as they are written into a registration."""
    replay = "" if stream.replay is None else f",replay={argument(stream.replay)}"
    return f"events={argument(stream.events)}{replay}"


def _is_unheard(prompts: PromptCount, worker: WorkerFacts) -> bool:
    return worker.state is StreamState.LIVE and not worker.is_heard and prompts.whole >= UNHEARD_PROMPTS


def _of_endpoints(worker: WorkerFacts, snapshot: Snapshot) -> Iterator[Finding]:
    registration = worker.registration
    if worker.refusal:
        return
    answers = {
        role: snapshot.endpoints.get(at, EndpointAnswer(is_zmq=True)) for role, at in endpoints_of(registration).items()
    }
    events, replay = answers.get("events"), answers.get("replay")
    if events and replay and events.socket in REPLIERS and replay.socket in PUBLISHERS:
        yield found(
            "KV204",
            worker.subject,
            f"a {events.socket} socket answers at the event endpoint {registration.events}, and a {replay.socket} socket at the "
            f"replay endpoint {registration.replay}",
            f"register events={argument(registration.replay or '')},replay={argument(registration.events or '')}",
        )
        return
    problems = {role: problem for role, answer in answers.items() if (problem := _problem(registration, role, answer))}
    named = {role: problem for role, problem in problems.items() if role in STREAM_ROLES}
    if named and (right := _published_elsewhere(worker)):
        # One finding for both endpoints, because one change corrects both.
        info_path = engine_named(registration.engine).info_path
        evidence = "; ".join(
            [*(problem.evidence for problem in named.values()), f"its engine names {right} ({info_path})"]
        )
        yield found(next(iter(named.values())).code, worker.subject, evidence, f"register {right}")
        problems = {role: problem for role, problem in problems.items() if role not in named}
    for problem in problems.values():
        yield found(problem.code, worker.subject, problem.evidence, problem.fix)


class _EndpointProblem(NamedTuple):
    """The problem of one endpoint. `fix` applies if the engine does not name other endpoints itself."""

    code: str
    evidence: str
    fix: str


def _problem(registration: Registration, role: str, answer: EndpointAnswer) -> _EndpointProblem | None:
    """Return the problem that an endpoint's answer shows, or None if it shows none."""
    at = endpoints_of(registration)[role]
    if answer.problem:
        return _EndpointProblem(
            "KV205",
            f"{role} endpoint {at}: {answer.problem}",
            f"open the port between this router and the engine (firewall, NetworkPolicy, container port); test: {_test(at)}",
        )
    if role == "url" or (answer.is_zmq and answer.socket in _expected(role) | {UNKNOWN_SOCKET}):
        return None
    what = f"a {answer.socket} socket" if answer.socket else "a program that does not speak ZMQ"
    return _EndpointProblem(
        "KV206",
        f"{role} endpoint {at}: {what} answers there",
        f"register the port of --kv-events-config for {role} ({'/'.join(sorted(_expected(role)))})",
    )


def _published_elsewhere(worker: WorkerFacts) -> str:
    """Return the endpoints that the engine names for this worker, or "" if it names none or the registered ones."""
    registration = worker.registration
    if not worker.published:
        return ""
    stream = worker.published[0]
    if same_endpoint(stream.events, registration.events) and same_endpoint(stream.replay, registration.replay):
        return ""
    return _endpoints_text(stream)


def endpoints_of(given: Registration) -> dict[str, str]:
    """Return a worker's endpoints by role: `events`, `replay`, `patch`, and `url` for its HTTP address."""
    patch = None if given.patch == NO_PATCH else given.patch
    endpoints = {"events": given.events, "replay": given.replay, "patch": patch, "url": given.url}
    return {role: at for role, at in endpoints.items() if at is not None}


def _expected(role: str) -> frozenset[str]:
    """Return the types of ZMQ sockets that belong at an endpoint of this role."""
    return PUBLISHERS if role == "events" else REPLIERS


def _test(endpoint: str) -> str:
    host, _, port = endpoint.rpartition("://")[2].rpartition(":")
    return f"nc -vz {argument(host)} {argument(port)}" if host else f"ls -l {argument(port)}"
