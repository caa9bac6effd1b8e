# SPDX-License-Identifier: Apache-2.0
"""What the router answers. Names and types are those of its OpenAPI document, which `tests/unit/test_client_shapes.py`
holds them to; fields that are there for other clients are left out, and fields of newer routers are ignored.

All counts are tokens unless a name ends in `_blocks`. None: absent, or null."""

from __future__ import annotations

from typing import Any

import msgspec


class GroupCover(msgspec.Struct, frozen=True):
    """How far one KV cache group alone would let the GPU hit reach."""

    group_idx: int | None
    kind: str
    covered: int


class HitLimit(msgspec.Struct, frozen=True):
    """The group that kept the hit from being longer, and a sentence why."""

    group_idx: int | None
    kind: str
    why: str


class HeldRuns(msgspec.Struct, frozen=True):
    """Blocks of the prompt that one place holds. runs: of tokens, [first, end), ascending and apart."""

    group_idx: int | None
    medium: str
    owner: str | None
    block_size: int
    runs: tuple[tuple[int, int], ...]


class InstanceReply(msgspec.Struct, frozen=True, kw_only=True):
    """One worker: the numbers of its best rank, and the longest match of each rank in `dp`. gpu: reused from the GPU
    cache alone, cpu: with the CPU tier, disk: with the disk tier too. reason: why credit is withheld. approximate: an
    estimate from what was sent there."""

    longest_matched: int
    gpu: int
    cpu: int
    disk: int
    dp: dict[str, int]
    state: str
    reason: str | None = None
    approximate: bool | None = None
    groups: tuple[GroupCover, ...] | None = None
    limited_by: HitLimit | None = None
    held: tuple[HeldRuns, ...] | None = None


class QueryReply(msgspec.Struct, frozen=True):
    """instances: every worker of the model, also those without a hit; scores: the longest match by worker and rank."""

    instances: dict[str, InstanceReply]
    scores: dict[str, dict[str, int]]


class Overlap(msgspec.Struct, frozen=True):
    """Tokens that would not be computed again, cumulative; longest_matched equals disk."""

    longest_matched: int
    gpu: int
    cpu: int
    disk: int
    dp: dict[str, int]


class CostTerms(msgspec.Struct, frozen=True):
    """The terms of one worker's cost; copy, junction and session are taken off."""

    prefill: int
    queued: int
    decode: int
    delay: int
    junction: int
    session: int
    room: int = 0
    copy: int = 0


class CandidateReply(msgspec.Struct, frozen=True, kw_only=True):
    """One worker as compared in the choice; the lowest cost wins. load: the part of the cost that is other prompts'
    work. pending: tokens of this prompt that are being computed there."""

    worker_id: str | int
    dp_rank: int
    overlap: Overlap
    load: int
    cost: int
    parts: CostTerms
    saturated: bool
    state: str
    limited_by: HitLimit | None
    pending: int | None = None
    reason: str | None = None
    approximate: bool | None = None


class TokensReply(msgspec.Struct, frozen=True):
    """Where a text's tokens come from (given, render, tokenize, local, none), how many are known, and why not all."""

    source: str
    num_tokens: int
    known_tokens: int
    problem: str


class PrefillReply(msgspec.Struct, frozen=True, kw_only=True):
    """The worker that is to compute the prompt first. handover: how the prompt is handed over to the chosen one."""

    worker_id: str | int
    dp_rank: int
    endpoint: str | None
    overlap: Overlap
    effective_prefill_tokens: int
    handover: str
    reason: str
    candidates: tuple[CandidateReply, ...] | None = None


class SelectReply(msgspec.Struct, frozen=True, kw_only=True):
    """The chosen worker. endpoint: the engine's URL, None for a worker that was registered without one.
    effective_prefill_tokens: what it must compute; expected_tokens: what it will reuse of the prompt by the time it
    schedules it, 0 from a router of before. reserved: whether its load counts. tokens: of texts. prefill: where
    another worker is to compute the prompt. candidates: with explain."""

    selection_id: str
    model: str
    worker_id: str | int
    dp_rank: int
    endpoint: str | None
    overlap: Overlap
    effective_prefill_tokens: int
    reason: str
    reserved: bool
    expected_tokens: int = 0
    tokens: TokensReply | None = None
    candidates: tuple[CandidateReply, ...] | None = None
    prefill: PrefillReply | None = None


class EndedReply(msgspec.Struct, frozen=True):
    """Of what ends a reservation, or a part of it."""

    status: str


class RegisteredReply(msgspec.Struct, frozen=True):
    """Of registering and dropping a worker. dropped: ranks that were dropped. endpoint: the engine's HTTP address. note:
    what the engine did not report, and what follows from that."""

    status: str
    worker_id: str | int
    dropped: int | None = None
    model_name: str | None = None
    lifecycle: str | None = None
    endpoint: str | None = None
    kv_events_endpoint: str | None = None
    replay_endpoint: str | None = None
    block_size: int | None = None
    note: str | None = None


class PatchStatus(msgspec.Struct, frozen=True):
    """The engine patch of a worker. mismatches: heartbeats that disagreed with the index."""

    version: str
    epoch: str
    heartbeat_age_s: float | None
    heartbeats: int
    mismatches: int
    snapshots: int
    features: dict[str, str]


class Recovery(msgspec.Struct, frozen=True):
    """What went missing, how it was recovered, and by how many blocks a snapshot showed the index to be wrong."""

    missed_batches: int = 0
    replays: int = 0
    snapshots: int = 0
    relearned: int = 0
    ghost_blocks: int = 0
    lost_blocks: int = 0


class TokensStatus(msgspec.Struct, frozen=True):
    """How the tokens of texts are found for a worker (local, render, tokenize, none), and what is wrong with that."""

    way: str
    problem: str = ""


class ReuseStatus(msgspec.Struct, frozen=True):
    """What was predicted to be reused, and what the engine reported, of all answers where both are known."""

    predicted_tokens: int
    delivered_tokens: int
    answers: int


class EngineCache(msgspec.Struct, frozen=True):
    """An engine's KV cache as its metrics page describes it; a field is None where the page does not say it."""

    # Whether prompts are reused at all.
    prefix_caching: bool | None = None
    # Tokens of one block.
    block_size: int | None = None
    # Blocks on the accelerator.
    blocks: int | None = None
    # Tokens of context that fit there.
    tokens: int | None = None


class WorkerStatus(msgspec.Struct, frozen=True):
    """One rank of one worker; docs/reference/http.md describes the fields. residency: blocks by group and medium, like
    g0:GPU. closed: why it takes no requests now, empty if it does."""

    worker_id: str
    dp_rank: int
    model: str
    url: str | None
    state: str
    state_age_s: float
    credited: bool
    approximate: bool
    reason: str
    epoch: str | None
    seq: int | None
    catalog: dict[str, Any] | None
    catalog_source: str | None
    hash_scheme: str
    residency: dict[str, int]
    lag_ms: float | None
    gaps: int
    recovery: Recovery
    last_event_age_s: float | None
    patch: PatchStatus | None = None
    refused_blocks: int = 0
    tokens: TokensStatus | None = None
    source: str = ""
    draining: bool = False
    closed: str = ""
    role: str = ""
    handover: str = ""
    engine: str = ""
    engine_cache: EngineCache = EngineCache()
    predictions: str = ""
    reuse: ReuseStatus | None = None


class WorkersReply(msgspec.Struct, frozen=True):
    """All workers."""

    workers: list[WorkerStatus]


class HealthReply(msgspec.Struct, frozen=True):
    """status: ok, or degraded by the reasons. warnings: risks that degrade nothing yet."""

    status: str
    reasons: list[str]
    warnings: list[str] | None = None


class ErrorDetailReply(msgspec.Struct, frozen=True):
    """Cause and fix for people, type and code for programs."""

    message: str
    type: str
    code: str


class ErrorReply(msgspec.Struct, frozen=True):
    """Of everything that fails."""

    error: ErrorDetailReply
