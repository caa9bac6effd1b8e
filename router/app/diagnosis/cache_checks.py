# SPDX-License-Identifier: Apache-2.0
"""Checks of the engines' caches as the router knows them: hashes, groups, tiers. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator

from kvrouter.contract.diagnosis import Finding
from kvrouter.events.patch.messages import PeerAddress
from kvrouter.router.app.diagnosis.snapshot import Snapshot, WorkerFacts
from kvrouter.router.base.common.escaping import printable
from kvrouter.router.model.engines.known import engine_named
from kvrouter.router.model.kvcache.catalog import FULL_KINDS, Catalog
from kvrouter.router.model.kvcache.scheme_verification import SchemeState
from kvrouter.router.model.workers.stream_state import StreamState
from kvrouter.router.observe.findings.finding import WARNING, found
from kvrouter.router.observe.findings.subject import Subject

# The number of blocks after which all groups of an engine have shown themselves, because a prompt stores into each of
# them.
SHOWN_BLOCKS = 8
# Families of models with several kinds of layers, by the names of their checkpoints. The list is incomplete and only a
# hint: a name proves nothing about the layers.
HYBRID_FAMILIES = re.compile(
    r"gemma-?[23]|gpt-?oss|qwen3-?next|qwen3\.5|llama-?4|deepseek-?v4|jamba|bamba|zamba|nemotron-?h|falcon-?h1|"
    r"granite-?4|minimax-?text|kimi-?linear|lfm2|olmo-?3|cohere2|exaone-?4",
)
ENABLE_HYBRID = (
    "start the engine without --disable-hybrid-kv-cache-manager (some KV connectors turn it off by themselves)"
)


def cache_findings(snapshot: Snapshot) -> Iterator[Finding]:
    """Yield the findings about the caches of workers and of models."""
    for worker in snapshot.workers:
        if worker.is_down or worker.state is StreamState.MISMATCHED:
            # The events are another engine's, or useless while the worker is down.
            continue
        yield from _of_hashes(worker)
        yield from _of_catalog(worker)
        yield from _of_tiers(worker)
        yield from _of_hybrid(worker, snapshot)
    yield from _of_models(snapshot)
    yield from _of_lenders(snapshot)


def _of_hashes(worker: WorkerFacts) -> Iterator[Finding]:
    if worker.state is StreamState.UNHASHABLE:
        fix = f"{engine_named(worker.registration.engine).flags.hashes}; if the evidence names an extra key: install a newer router"
        yield found("KV301", worker.subject, f"its hashes are {worker.hash_label}", fix)
    elif worker.scheme in (SchemeState.ASSUMED, SchemeState.DECLARED) and worker.blocks and not worker.catalog.problem:
        # A wrong catalog may be why no hash could be compared, and KV303 reports it.
        yield found(
            "KV302",
            worker.subject,
            f"it holds {worker.blocks} blocks, and none of them could be compared: {worker.hash_label}",
        )


def _of_catalog(worker: WorkerFacts) -> Iterator[Finding]:
    catalog = worker.catalog
    if catalog.problem is not None and (catalog.groups or worker.blocks):
        yield found("KV303", worker.subject, catalog.problem)
    if worker.refused:
        yield found("KV308", worker.subject, worker.refused)


def _of_tiers(worker: WorkerFacts) -> Iterator[Finding]:
    if worker.withheld:
        yield found("KV306", worker.subject, worker.withheld)
    if worker.cpu_tier:
        yield found("KV307", worker.subject, worker.cpu_tier)


def _of_hybrid(worker: WorkerFacts, snapshot: Snapshot) -> Iterator[Finding]:
    """Yield a finding if vLLM's hybrid KV cache manager seems to be off.

    With the manager off, vLLM puts all layers into one group of full attention, and reports nowhere that it did.
    """
    catalog = worker.catalog
    if not _is_single_full(catalog) or worker.blocks < SHOWN_BLOCKS:
        return
    (group,) = catalog.groups
    siblings = [
        other.name
        for other in snapshot.workers
        if other.registration.worker.model == worker.registration.worker.model and len(other.catalog.groups) > 1
    ]
    if group.sliding_window:
        evidence = (
            f"its only group is full attention, and its layers have a window of {group.sliding_window} tokens: a group of sliding "
            "windows is missing"
        )
        yield found("KV304", worker.subject, evidence, ENABLE_HYBRID)
    elif siblings:
        evidence = f"its only group is full attention, and {siblings[0]} has several groups for the same model"
        yield found("KV304", worker.subject, evidence, ENABLE_HYBRID)
    elif family := _family(worker):
        evidence = (
            f"its only group is full attention, and {printable(family)} is called as models are that have several kinds of layers "
            "(known by the name alone)"
        )
        yield found("KV304", worker.subject, evidence, ENABLE_HYBRID, WARNING)


def _is_single_full(catalog: Catalog) -> bool:
    return len(catalog.groups) == 1 and catalog.groups[0].kind in FULL_KINDS and catalog.problem is None


def _family(worker: WorkerFacts) -> str:
    """Return the name that suggests a hybrid model, of the loaded model or of the registered one; "" if none does."""
    names = (worker.engine_model, worker.registration.worker.model)
    return next((name for name in names if HYBRID_FAMILIES.search(name.lower().replace("_", "-"))), "")


def _of_models(snapshot: Snapshot) -> Iterator[Finding]:
    """Yield a finding for each model whose workers have different groups.

    Groups that two workers both have must be equal; a group that a worker has not shown yet proves nothing.
    """
    first: dict[tuple[str, int | None], tuple[WorkerFacts, tuple[object, ...]]] = {}
    named: set[str] = set()
    for worker in snapshot.workers:
        model = worker.registration.worker.model
        if worker.catalog.problem is not None or worker.is_down:
            continue
        for group in worker.catalog.groups:
            shape = (group.kind, group.block_size, group.sliding_window, group.attention_chunk_size)
            other, other_shape = first.setdefault((model, group.group_idx), (worker, shape))
            if shape != other_shape and model not in named:
                named.add(model)
                yield found(
                    "KV305",
                    Subject.of_model(model, other.subject.workers + worker.subject.workers),
                    f"{group.name} of {worker.name} has (kind, block, window, chunk) {_text(shape)}, that of {other.name} "
                    f"{_text(other_shape)}",
                )


def _of_lenders(snapshot: Snapshot) -> Iterator[Finding]:
    """Yield a finding for each model whose workers lend blocks that not all of them can fetch."""
    first: dict[str, tuple[WorkerFacts, PeerAddress]] = {}
    named: set[str] = set()
    for worker in snapshot.workers:
        model, peer = worker.registration.worker.model, worker.peer
        if peer is None or worker.is_down:
            continue
        other, other_peer = first.setdefault(model, (worker, peer))
        difference = _difference(peer, other_peer)
        if difference and model not in named:
            named.add(model)
            subject = Subject.of_model(model, other.subject.workers + worker.subject.workers)
            yield found(
                "KV309", subject, f"{worker.name} fetches nothing from {other.name}, nor the reverse: {difference}"
            )


def _difference(peer: PeerAddress, other: PeerAddress) -> str:
    """Return why two engines exchange no blocks, or "" if they do."""
    if peer.exchange != other.exchange:
        return "they differ in tier, model, layout or hash seed, or lend at loopback addresses of different machines"
    if peer.resets != other.resets:
        return f"its caches were reset {_times(peer.resets)}, those of the other {_times(other.resets)}"
    return ""


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


def _text(shape: tuple[object, ...]) -> str:
    return "(" + ", ".join("-" if part is None else str(part) for part in shape) + ")"
