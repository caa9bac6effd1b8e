# SPDX-License-Identifier: Apache-2.0
"""Checks of predictions: whether they come true, and whether they could.

Pure; `quality/prediction_judge.py` judges the single predictions.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from kvrouter.contract.diagnosis import Finding
from kvrouter.router.app.diagnosis.snapshot import Snapshot
from kvrouter.router.model.engines.known import engine_named
from kvrouter.router.observe.findings.finding import found
from kvrouter.router.observe.findings.subject import Subject
from kvrouter.router.observe.quality.prediction_judge import DoubtKind
from kvrouter.router.route.tokens.prompt_tokens import Reason

# How many prompts a model must have had before the share of short ones is judged: fewer say nothing about its traffic.
COUNTED_PROMPTS = 32
HALF = 0.5

DOUBTS = {
    DoubtKind.SILENT: ("KV401", "{serve} {usage}"),
    DoubtKind.TOKENIZER: (
        "KV402",
        "give the router the engine's tokenizer folder (kvrouter serve --tokenizer MODEL=FOLDER) with its chat template, or none, "
        "so that the engine tokenizes",
    ),
    DoubtKind.UNTRUE: (
        "KV403",
        "start engines and router with the same PYTHONHASHSEED (--none-hash-seed) and hash algorithm; register each engine's own "
        "event endpoint; if its cache is too small for its load: {serve} {memory}, or more replicas",
    ),
    DoubtKind.UNFORESEEN: (
        "KV407",
        "if the prompts have a cache_salt, also one that the router makes: update the engine, because this version ignores it at "
        "their path, and all tenants share one cache; if the engine is older than the router: give it a replay endpoint or the "
        "engine patch (KV207); if neither holds: report it with kvrouter doctor --bundle FILE",
    ),
}

WITH_RENDERING = (
    "start vLLM with --enable-scale-out, or kvrouter serve --tokenizer MODEL=FOLDER or --renderer MODEL=URL"
)
RENDERS_RESPONSES = (
    "start vLLM 0.31 or later with --enable-scale-out, or kvrouter serve --tokenizer MODEL=FOLDER or "
    "--renderer MODEL=URL"
)
KEEPS_CONVERSATIONS = (
    "no setting of the engine helps; let clients send x-session-id, which keeps a conversation at its worker"
)
# The fix for each reason for which tokens are missing.
TOKEN_FIXES: dict[Reason, str] = {
    "timeout": "kvrouter serve --tokenizer MODEL=FOLDER, or --tokenize-timeout-s S with more",
    "busy": "kvrouter serve --processes N with more, or --tokenizer MODEL=FOLDER",
    "no_engine": "start the engines, or register the workers with their url; the finding ends when an engine is verified",
    "unreachable": "test it from the router's machine with curl, and look into the engine's log",
    "unauthorized": "kvrouter serve --worker-api-key KEY (all routers)",
    "unverified": WITH_RENDERING,
    "unsupported": WITH_RENDERING,
}


def prediction_findings(snapshot: Snapshot) -> Iterator[Finding]:
    """Yield the findings about predictions and about the tokens that they need."""
    for worker in snapshot.workers:
        if worker.doubt is not None:
            code, fix = DOUBTS[worker.doubt.kind]
            flags = engine_named(worker.registration.engine).flags
            yield found(code, worker.subject, worker.doubt.text, fix.format(**msgspec.structs.asdict(flags)))
    yield from _of_prompts(snapshot)
    for missing in snapshot.missing_tokens:
        yield found("KV406", Subject.of_model(missing.model), missing.text, TOKEN_FIXES[missing.reason])
    for model, url, problem in snapshot.tokens:
        yield found("KV405", Subject.of_engine(model, url), problem)
    for model, url, problem in snapshot.front_ends:
        yield found("KV408", Subject.of_engine(model, url), problem)
    for unread in snapshot.unread_responses:
        fix = RENDERS_RESPONSES if unread.can_render else KEEPS_CONVERSATIONS
        yield found("KV409", Subject.of_model(unread.model), unread.problem, fix)
    for model, url, problem in snapshot.renderers:
        yield found("KV410", Subject.of_engine(model, url), f"renderer {url}: {problem}")


def _of_prompts(snapshot: Snapshot) -> Iterator[Finding]:
    counts: dict[str, tuple[int, int, int]] = {}
    for worker in snapshot.workers:
        if worker.catalog.problem is None:
            model = worker.registration.worker.model
            total, short, unit = counts.get(model, (0, 0, 0))
            prompts = worker.prompts
            counts[model] = total + prompts.total, short + prompts.short, max(unit, worker.catalog.align)
    for model, (total, short, unit) in counts.items():
        if total >= COUNTED_PROMPTS and short > HALF * total:
            yield found(
                "KV404",
                Subject.of_model(model),
                f"{short} of {total} prompts were shorter than {unit} tokens, the unit in which this model's cache is reused: "
                "nothing of them can be",
            )
