# SPDX-License-Identifier: Apache-2.0
"""Answers of the API as typed structs, and their encoding. docs/reference/http.md describes them; all counts are
tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from kvrouter.router.index.matching.held_runs import HeldRuns
from kvrouter.router.index.matching.question import GroupCover, Hit, HitLimit
from kvrouter.router.model.workers.role import HandoverWay
from kvrouter.router.model.workers.worker_status import WorkerStatus
from kvrouter.router.route.placement.cost import Candidate, CostTerms
from kvrouter.router.serve.api.requests import (
    MSGPACK,
    MSGPACK_TYPES,
)

JSON = "application/json"


class InstanceReply(msgspec.Struct, kw_only=True):
    """One worker_id: the numbers of its best rank, and `dp` with the longest match of each rank."""

    longest_matched: int
    gpu: int
    cpu: int
    disk: int
    dp: dict[str, int]
    state: str
    reason: str | msgspec.UnsetType = msgspec.UNSET
    # Present if true: estimated from what was sent there.
    approximate: bool | msgspec.UnsetType = msgspec.UNSET
    groups: tuple[GroupCover, ...] | msgspec.UnsetType = msgspec.UNSET
    limited_by: HitLimit | msgspec.UnsetType | None = msgspec.UNSET
    held: tuple[HeldRuns, ...] | msgspec.UnsetType = msgspec.UNSET


class QueryReply(msgspec.Struct):
    """Of `/query` and `/query_by_hash`: every worker of the model, also those without a hit. frequencies: always empty;
    clients of `dynamo.indexer` expect it."""

    instances: dict[str, InstanceReply]
    scores: dict[str, dict[str, int]]
    frequencies: tuple[int, ...] = ()


class Overlap(msgspec.Struct):
    """Tokens that would not be computed again; cumulative, and longest_matched equals disk. dp: the same for the
    rank."""

    longest_matched: int
    gpu: int
    cpu: int
    disk: int
    dp: dict[str, int]


class CandidateReply(msgspec.Struct, kw_only=True):
    """One worker as compared in the choice; the lowest cost wins."""

    worker_id: str | int
    dp_rank: int
    overlap: Overlap
    # In tokens: cost = sum of the parts minus session; load = the part of it that is other prompts' work.
    load: int
    cost: int
    parts: CostTerms
    saturated: bool
    state: str
    limited_by: HitLimit | None
    # Present if not zero: tokens of this prompt that are being computed there.
    pending: int | msgspec.UnsetType = msgspec.UNSET
    reason: str | msgspec.UnsetType = msgspec.UNSET
    approximate: bool | msgspec.UnsetType = msgspec.UNSET


class TokensReply(msgspec.Struct):
    """The source of a text's tokens (`given`, `render`, `tokenize`, `local`, `none`), how many are known, and why not
    all are."""

    source: str
    num_tokens: int
    known_tokens: int
    problem: str


class PrefillReply(msgspec.Struct, kw_only=True):
    """The worker that is to compute the prompt first, and how the prompt is handed over to the chosen one."""

    worker_id: str | int
    dp_rank: int
    endpoint: str | None
    overlap: Overlap
    effective_prefill_tokens: int
    handover: HandoverWay
    reason: str
    candidates: list[CandidateReply] | msgspec.UnsetType = msgspec.UNSET


class SelectReply(msgspec.Struct, kw_only=True):
    """Of `/select` and `/select_and_reserve`. `endpoint` is the engine's URL, null for a worker that was registered
    without one; effective_prefill_tokens: what it does not reuse; expected_tokens: what it will reuse by the time it
    schedules the prompt, with the prompts ahead of it, as far as can be expected. worker_id: a number where it was
    registered as one. model_name, routing_group, isl_tokens, block_size and potential_decode_blocks (what the worker
    decodes then) are for Dynamo's clients."""

    selection_id: str
    model: str
    worker_id: str | int
    dp_rank: int
    endpoint: str | None
    overlap: Overlap
    expected_tokens: int
    effective_prefill_tokens: int
    reason: str
    # Present for texts.
    tokens: TokensReply | msgspec.UnsetType = msgspec.UNSET
    model_name: str
    routing_group: str
    isl_tokens: int
    block_size: int
    potential_decode_blocks: int
    reserved: bool
    candidates: list[CandidateReply] | msgspec.UnsetType = msgspec.UNSET
    # Present if another worker is to compute the prompt.
    prefill: PrefillReply | msgspec.UnsetType = msgspec.UNSET


class EngineReply(msgspec.Struct):
    """An engine's report of its load, and its age."""

    waiting: int
    running: int
    kv_usage: float
    age_s: float


class WorkerLoadReply(msgspec.Struct):
    """One worker's load, from all routers and from requests that bypassed them. The first five are Dynamo's; saturated:
    it takes no more prompts; rates in tokens/s, null until they are measured."""

    worker_id: str | int
    dp_rank: int
    potential_prefill_tokens: int
    potential_decode_blocks: int
    active_requests: int
    decode_tokens: int
    saturated: bool
    engine: EngineReply | None
    prefill_rate: float | None
    decode_rate: float | None


class ModelLoadReply(msgspec.Struct):
    """One entry of `GET /loads`: pending are the prompts that wait in this process because all workers are
    saturated."""

    model_name: str
    routing_group: str
    loads: list[WorkerLoadReply]
    pending_count: int
    pending_isl_tokens: int


class ReservedReply(msgspec.Struct):
    """Of `POST /reservations`."""

    selection_id: str
    model_name: str
    routing_group: str
    worker_id: str | int
    dp_rank: int
    endpoint: str | None


class EndedReply(msgspec.Struct):
    """Of all that end a reservation, or a part of it."""

    status: str


class WorkersReply(msgspec.Struct):
    """Of `GET /workers`."""

    workers: list[WorkerStatus]


class ModelReply(msgspec.Struct):
    """One model. created: OpenAI's clients need a number; the real date is unknown."""

    id: str
    object: str = "model"
    created: int = 0
    owned_by: str = "kvrouter"


class ModelsReply(msgspec.Struct):
    """Of `GET /v1/models`."""

    data: list[ModelReply]
    object: str = "list"


class RegisteredReply(msgspec.Struct):
    """Answer to registering, changing or dropping a worker; `dropped` counts the dropped ranks. The fields after it are
    for Dynamo's clients, on Dynamo's paths. lifecycle: schedulable; incomplete, without an address for requests;
    unschedulable, once dropped."""

    status: str
    worker_id: str | int
    dropped: int | msgspec.UnsetType = msgspec.UNSET
    model_name: str | msgspec.UnsetType = msgspec.UNSET
    routing_group: str | msgspec.UnsetType = msgspec.UNSET
    lifecycle: str | msgspec.UnsetType = msgspec.UNSET
    endpoint: str | msgspec.UnsetType | None = msgspec.UNSET
    kv_events_endpoint: str | msgspec.UnsetType | None = msgspec.UNSET
    replay_endpoint: str | msgspec.UnsetType | None = msgspec.UNSET
    block_size: int | msgspec.UnsetType | None = msgspec.UNSET
    # What the engine did not report, and what follows from that.
    note: str | msgspec.UnsetType = msgspec.UNSET


class HealthReply(msgspec.Struct):
    """Of `GET /health`; status is ok or degraded, by the reasons. warnings: risks that degrade nothing yet; absent if
    there are none."""

    status: str
    reasons: list[str]
    warnings: list[str] | msgspec.UnsetType = msgspec.UNSET


class ReadyReply(msgspec.Struct):
    """Of `GET /ready`. The last two are for Dynamo's clients; schedulable_workers counts ids."""

    status: str
    ready: bool
    schedulable_workers: int


class VersionReply(msgspec.Struct):
    """Of `GET /version`."""

    name: str
    version: str


class ErrorDetailReply(msgspec.Struct):
    """Cause and fix for people, type and code for programs."""

    message: str
    type: str
    code: str


class ErrorReply(msgspec.Struct):
    """Of everything that fails, in OpenAI's shape."""

    error: ErrorDetailReply


_json = msgspec.json.Encoder()
_msgpack = msgspec.msgpack.Encoder()


def encode(reply: Any, accept: str) -> tuple[bytes, str]:
    """The reply and its media type: MessagePack if `accept` prefers it to JSON or ranks both equal, else JSON."""
    # Nearly every request stops here.
    if "msgpack" in accept and _wants_msgpack(accept):
        return _msgpack.encode(reply), MSGPACK
    return _json.encode(reply), JSON


def _wants_msgpack(accept: str) -> bool:
    willing = {"msgpack": 0.0, "json": 0.0}
    for part in accept.lower().split(","):
        name, *parameters = (piece.strip() for piece in part.split(";"))
        quality = 1.0
        for parameter in parameters:
            if parameter.startswith("q="):
                try:
                    quality = float(parameter[2:])
                except ValueError:
                    quality = 0.0
        if name in MSGPACK_TYPES:
            willing["msgpack"] = quality
        elif name == JSON:
            willing["json"] = quality
    return willing["msgpack"] > 0 and willing["msgpack"] >= willing["json"]


def query_reply(hits: Iterable[Hit], explain: bool, held: bool = False) -> QueryReply:
    """The ranks of one worker_id merged; the best is the one with the most by disk, then cpu, then gpu."""
    best: dict[str, Hit] = {}
    scores: dict[str, dict[str, int]] = {}
    for hit in hits:
        name = hit.worker.worker_id
        ranks = scores.get(name)
        if ranks is None:
            scores[name] = {str(hit.worker.dp_rank): hit.disk}
            best[name] = hit
            continue
        ranks[str(hit.worker.dp_rank)] = hit.disk
        known = best[name]
        if (hit.disk, hit.cpu, hit.gpu) > (known.disk, known.cpu, known.gpu):
            best[name] = hit
    instances = {
        name: InstanceReply(
            longest_matched=hit.disk,
            gpu=hit.gpu,
            cpu=hit.cpu,
            disk=hit.disk,
            dp=scores[name],
            state=hit.state,
            reason=hit.reason or msgspec.UNSET,
            approximate=hit.approximate or msgspec.UNSET,
            groups=hit.groups if explain else msgspec.UNSET,
            limited_by=hit.limited_by if explain else msgspec.UNSET,
            held=hit.held if held else msgspec.UNSET,
        )
        for name, hit in best.items()
    }
    return QueryReply(instances, scores)


def overlap_of(hit: Hit) -> Overlap:
    return Overlap(hit.disk, hit.gpu, hit.cpu, hit.disk, {str(hit.worker.dp_rank): hit.disk})


def candidate_reply(candidate: Candidate, worker_id: str | int) -> CandidateReply:
    hit = candidate.hit
    return CandidateReply(
        worker_id=worker_id,
        dp_rank=hit.worker.dp_rank,
        overlap=overlap_of(hit),
        load=candidate.load,
        cost=candidate.cost,
        parts=candidate.parts,
        saturated=candidate.saturated,
        state=hit.state,
        limited_by=hit.limited_by,
        pending=candidate.pending or msgspec.UNSET,
        reason=hit.reason or msgspec.UNSET,
        approximate=hit.approximate or msgspec.UNSET,
    )
