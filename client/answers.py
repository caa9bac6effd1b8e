# SPDX-License-Identifier: Apache-2.0
"""The router's answers.

Names and types are those of the router's OpenAPI document; `tests/unit/test_client_shapes.py` compares them. Fields
that exist for other clients are left out, and fields of newer routers are ignored.

All counts are tokens unless a name ends in `_blocks`. A field is None if it is absent or null.
"""

from __future__ import annotations

from typing import Any

import msgspec


class GroupCover(msgspec.Struct, frozen=True):
    """The part of the GPU hit that one KV cache group alone would allow."""

    group_idx: int | None
    kind: str
    covered: int


class HitLimit(msgspec.Struct, frozen=True):
    """The group that kept the hit from being longer, and a sentence that says why."""

    group_idx: int | None
    kind: str
    why: str


class HeldRuns(msgspec.Struct, frozen=True):
    """Blocks of the prompt that one place holds."""

    group_idx: int | None
    medium: str
    owner: str | None
    block_size: int
    # Ranges of tokens, [first, end), ascending, with gaps between them.
    runs: tuple[tuple[int, int], ...]


class InstanceReply(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's hit: the numbers of its best rank."""

    longest_matched: int
    # Reused from the GPU cache alone.
    gpu: int
    # Reused with the CPU tier.
    cpu: int
    # Reused with the CPU tier and the disk tier.
    disk: int
    # The longest match of each rank.
    dp: dict[str, int]
    state: str
    # Why credit is withheld.
    reason: str | None = None
    # Whether the hit is an estimate from the prompts that were sent to the worker.
    approximate: bool | None = None
    groups: tuple[GroupCover, ...] | None = None
    limited_by: HitLimit | None = None
    held: tuple[HeldRuns, ...] | None = None


class QueryReply(msgspec.Struct, frozen=True):
    """The hits of all workers of the model, also of workers without a hit."""

    instances: dict[str, InstanceReply]
    # The longest match by worker and rank.
    scores: dict[str, dict[str, int]]


class Overlap(msgspec.Struct, frozen=True):
    """Tokens that would not be computed again. Each tier includes those before it; longest_matched equals disk."""

    longest_matched: int
    gpu: int
    cpu: int
    disk: int
    dp: dict[str, int]


class CostTerms(msgspec.Struct, frozen=True):
    """The terms of one worker's cost; copy, junction and session are subtracted."""

    prefill: int
    queued: int
    decode: int
    delay: int
    junction: int
    session: int
    room: int = 0
    copy: int = 0


class CandidateReply(msgspec.Struct, frozen=True, kw_only=True):
    """One worker as the choice compared it. The lowest cost wins."""

    worker_id: str | int
    dp_rank: int
    overlap: Overlap
    # The part of the cost that other prompts cause.
    load: int
    cost: int
    parts: CostTerms
    saturated: bool
    state: str
    limited_by: HitLimit | None
    # Tokens of this prompt that the worker is computing now.
    pending: int | None = None
    reason: str | None = None
    approximate: bool | None = None


class TokensReply(msgspec.Struct, frozen=True):
    """The source of a text's tokens, and how many of them are known."""

    # given, render, tokenize, local or none.
    source: str
    num_tokens: int
    known_tokens: int
    # Why not all tokens are known.
    problem: str


class PrefillReply(msgspec.Struct, frozen=True, kw_only=True):
    """The worker that is to compute the prompt first."""

    worker_id: str | int
    dp_rank: int
    endpoint: str | None
    overlap: Overlap
    effective_prefill_tokens: int
    # How the prompt is handed over to the chosen worker.
    handover: str
    reason: str
    candidates: tuple[CandidateReply, ...] | None = None


class SelectReply(msgspec.Struct, frozen=True, kw_only=True):
    """The chosen worker."""

    selection_id: str
    model: str
    worker_id: str | int
    dp_rank: int
    # The engine's URL; None for a worker that was registered without one.
    endpoint: str | None
    overlap: Overlap
    # Tokens of the prompt that the worker must compute.
    effective_prefill_tokens: int
    reason: str
    # Whether the prompt's load counts.
    reserved: bool
    # Tokens of the prompt that the worker will reuse by the time it schedules the prompt; 0 from an older router.
    expected_tokens: int = 0
    # For texts.
    tokens: TokensReply | None = None
    # With `explain`.
    candidates: tuple[CandidateReply, ...] | None = None
    # If another worker is to compute the prompt.
    prefill: PrefillReply | None = None


class EndedReply(msgspec.Struct, frozen=True):
    """The answer to a call that ends a reservation, or a part of it."""

    status: str


class RegisteredReply(msgspec.Struct, frozen=True):
    """The answer to registering or dropping a worker."""

    status: str
    worker_id: str | int
    # How many ranks were dropped.
    dropped: int | None = None
    model_name: str | None = None
    lifecycle: str | None = None
    # The engine's HTTP address.
    endpoint: str | None = None
    kv_events_endpoint: str | None = None
    replay_endpoint: str | None = None
    block_size: int | None = None
    # Facts that the engine did not report, and the consequences.
    note: str | None = None


class PatchStatus(msgspec.Struct, frozen=True):
    """The engine patch of a worker."""

    version: str
    epoch: str
    heartbeat_age_s: float | None
    heartbeats: int
    # Heartbeats that disagreed with the index.
    mismatches: int
    snapshots: int
    features: dict[str, str]


class Recovery(msgspec.Struct, frozen=True):
    """The losses of a worker's stream, how they were recovered, and the errors of the index that snapshots showed."""

    missed_batches: int = 0
    replays: int = 0
    snapshots: int = 0
    relearned: int = 0
    # Blocks that the index held and a snapshot did not.
    ghost_blocks: int = 0
    # Blocks that a snapshot held and the index did not.
    lost_blocks: int = 0


class TokensStatus(msgspec.Struct, frozen=True):
    """The way in which the tokens of texts are found for a worker."""

    # local, render, tokenize or none.
    way: str
    # A problem with that; empty if there is none.
    problem: str = ""


class ReuseStatus(msgspec.Struct, frozen=True):
    """The predicted reuse and the reuse that the engine reported, over all answers for which both are known."""

    predicted_tokens: int
    delivered_tokens: int
    answers: int


class EngineCache(msgspec.Struct, frozen=True):
    """An engine's KV cache as its metrics page describes it; a field is None if the page lacks it."""

    # Whether the engine reuses prompts at all.
    prefix_caching: bool | None = None
    # Tokens in one block.
    block_size: int | None = None
    # Blocks on the accelerator.
    blocks: int | None = None
    # Tokens of context that fit into these blocks.
    tokens: int | None = None


class WorkerStatus(msgspec.Struct, frozen=True):
    """One rank of one worker; docs/reference/http.md describes the fields."""

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
    # Blocks by group and medium, like g0:GPU.
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
    # Why the worker takes no requests now; empty if it does.
    closed: str = ""
    role: str = ""
    handover: str = ""
    engine: str = ""
    engine_cache: EngineCache = EngineCache()
    predictions: str = ""
    reuse: ReuseStatus | None = None


class WorkersReply(msgspec.Struct, frozen=True):
    """The status of all workers."""

    workers: list[WorkerStatus]


class HealthReply(msgspec.Struct, frozen=True):
    """The health of the router."""

    # ok or degraded.
    status: str
    # Why the router is degraded.
    reasons: list[str]
    # Risks that degrade nothing yet.
    warnings: list[str] | None = None


class ErrorDetailReply(msgspec.Struct, frozen=True):
    """The cause and the fix for people, the type and the code for programs."""

    message: str
    type: str
    code: str


class ErrorReply(msgspec.Struct, frozen=True):
    """The answer to every call that fails."""

    error: ErrorDetailReply
