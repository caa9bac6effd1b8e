# SPDX-License-Identifier: Apache-2.0
"""Checks of engines: whether they can be reached, and whether they serve the model they are registered for. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from kvrouter.contract.diagnosis import Finding
from kvrouter.router.app.diagnosis.clocks import SET_CLOCKS, clock_difference
from kvrouter.router.app.diagnosis.snapshot import Snapshot, WorkerFacts
from kvrouter.router.base.common.escaping import printable
from kvrouter.router.model.engines.known import engine_named
from kvrouter.router.model.workers.provenance import registered_twice
from kvrouter.router.model.workers.registration import UNKNOWN_MODEL, Registration
from kvrouter.router.model.workers.source_precedence import PLACES, REGISTER
from kvrouter.router.observe.findings.finding import NOTE, ROUTER, argument, found
from kvrouter.router.observe.findings.subject import Subject

# The most models that one finding lists.
MAX_MODELS = 20


def engine_findings(snapshot: Snapshot) -> Iterator[Finding]:
    """Yield the findings about engines and their registrations."""
    if not snapshot.workers and not snapshot.unregistered:
        yield found(
            "KV005",
            "fleet",
            "neither --worker, nor a file, nor Kubernetes, nor POST /register named one",
            f"kvrouter serve --worker w0=http://HOST:8000, or: curl {ROUTER}register -d "
            '\'{"worker_id": "w0", "url": "http://HOST:8000"}\'',
        )
    if snapshot.unready and snapshot.workers and not any(facts.is_down or facts.breaker for facts in snapshot.workers):
        yield found(
            "KV009",
            "fleet",
            snapshot.unready,
            f'end a drain: curl -X PATCH {ROUTER}workers/ID -d \'{{"state": "active"}}\'; a model whose workers are all of role '
            "prefill needs one that decodes",
        )
    for entry in snapshot.unregistered:
        model, worker_id, dp_rank = entry.registration.worker
        subject = Subject.of_listed(worker_id, dp_rank, entry.registration.source, model)
        yield found("KV104", subject, entry.waiting.reason, entry.waiting.fix)
    yield from _of_aliases(snapshot)
    for key, reason in snapshot.left_out.items():
        yield found("KV108", Subject.of_worker(key), reason)
    for worker in snapshot.workers:
        yield from _of_worker(worker)
    for twins in registered_twice(worker.registration for worker in snapshot.workers):
        names = tuple(twin.route_name for twin in twins)
        registrations = [worker.registration for worker in snapshot.workers if worker.registration.worker in twins]
        # Prefer a worker that a client registered, because it can be dropped at once.
        extra = next((entry for entry in registrations if entry.source == REGISTER), registrations[-1])
        yield found(
            "KV110",
            Subject(f"workers {' and '.join(map(printable, names))}", names, twins[0].model),
            "they have the same url and rank, so the router takes one engine for several: each of them shows a part of its load, "
            "and a prompt may choose the same engine under several names",
            f"drop all but one: {_removal(extra)}; an adapter or another name of the model needs no worker (--model-alias)",
        )
    for worker in snapshot.workers:
        ahead_s = snapshot.engine_clocks.get(worker.registration.url or "", 0.0)
        if (differs := clock_difference(ahead_s)) is not None:
            yield found(
                "KV107", worker.subject, f"its clock is {differs} this router's, by the Date of its answers", SET_CLOCKS
            )


def _of_aliases(snapshot: Snapshot) -> Iterator[Finding]:
    """Yield the aliases of models that no worker serves, except those of models that a starting worker may serve."""
    waiting = {entry.registration.worker.model for entry in snapshot.unregistered}
    # The adapters of a starting engine are not known, and neither is the model of a worker that only its engine names.
    if not snapshot.workers or UNKNOWN_MODEL in waiting or any(worker.is_starting for worker in snapshot.workers):
        return
    models = sorted({worker.registration.worker.model for worker in snapshot.workers})
    more = f" and {len(models) - MAX_MODELS} more" if len(models) > MAX_MODELS else ""
    for alias, target in sorted(snapshot.unserved_aliases.items()):
        if target in waiting:
            continue
        yield found(
            "KV113",
            f"alias {printable(alias)}",
            f"it stands for {printable(target)}, which no worker serves; models of "
            f"workers: {', '.join(map(printable, models[:MAX_MODELS]))}{more}",
            f"correct --model-alias {argument(f'{alias}=MODEL')} on all routers (model_aliases in the settings file applies "
            f"without a restart), or start a worker that serves {argument(target)}",
        )


def _of_worker(worker: WorkerFacts) -> Iterator[Finding]:
    url = argument(worker.registration.url or "ENGINE")
    name = argument(worker.registration.worker.worker_id)
    engine = engine_named(worker.registration.engine)
    if worker.refusal:
        yield found("KV103", worker.subject, worker.refusal)
    elif worker.is_down:
        yield found(
            "KV101",
            worker.subject,
            worker.reason,
            f"start the engine; test it from the router's machine: curl -i {url}{engine.health_path}; if it moved: "
            f"{_change(worker.registration)}; if it is gone: {_removal(worker.registration)}",
        )
    if worker.unserved:
        model = argument(worker.registration.worker.model)
        yield found(
            "KV102",
            worker.subject,
            worker.unserved,
            f"{engine.flags.serve} --served-model-name {model}, or register model= as the engine calls it",
        )
    if worker.drains_s is not None:
        registration = worker.registration
        origin = "a client said so" if registration.draining else f"its source {registration.source} says so"
        yield found(
            "KV111",
            worker.subject,
            f"it has taken no new requests for at least {worker.drains_s:.0f} s, because {origin}",
            f'if it should take some: curl -X PATCH {ROUTER}workers/{name} -d \'{{"state": "active"}}\'',
        )
    if worker.refused_key and not worker.is_down:
        yield found("KV109", worker.subject, worker.refused_key)
    if worker.refuses and not (worker.refused_key or worker.unserved):
        # A missing key or a wrong model explains the refusals, and has a finding of its own.
        yield found(
            "KV112",
            worker.subject,
            worker.refuses.evidence,
            f"find the refused requests in its engine's log, and start it with its peers' version and flags (such as "
            f"--max-model-len, adapters, tools); compare: curl -s {url}/v1/models",
            # If not several clients sent the refused requests, one client's wrong requests may be the cause.
            None if worker.refuses.is_spread else NOTE,
        )
    if worker.breaker:
        yield found(
            "KV105",
            worker.subject,
            worker.breaker,
            f"look into the engine's log for the failed requests; test it: curl -i {url}/v1/models",
        )
    if worker.disk:
        yield found("KV106", worker.subject, worker.disk)


def _change(registration: Registration) -> str:
    """Return how to give a worker another address. The router refuses to change what a source keeps."""
    if registration.source != REGISTER:
        return f"change its url in {PLACES.get(registration.source, registration.source)}"
    name = argument(registration.worker.worker_id)
    return f'curl -X PATCH {ROUTER}workers/{name} -d \'{{"url": "http://HOST:PORT"}}\''


def _removal(registration: Registration) -> str:
    """Return how to remove a worker. One that a source keeps would come back at once."""
    if registration.source != REGISTER:
        return f"take it out of {PLACES.get(registration.source, registration.source)}"
    return f"curl -X DELETE {ROUTER}workers/{argument(registration.worker.worker_id)}"
