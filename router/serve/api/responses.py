# SPDX-License-Identifier: Apache-2.0
"""The answers of the API as typed structs, and their encoding.

docs/reference/http.md describes them; all counts are tokens.
"""

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
    """One worker id: the numbers of its best rank, and the longest match of each rank in `dp`."""

    longest_matched: int
    gpu: int
    cpu: int
    disk: int
    dp: dict[str, int]
    state: str
    reason: str | msgspec.UnsetType = msgspec.UNSET
    # Present if true: the numbers are estimated from the prompts that were sent there.
    approximate: bool | msgspec.UnsetType = msgspec.UNSET
    groups: tuple[GroupCover, ...] | msgspec.UnsetType = msgspec.UNSET
    limited_by: HitLimit | msgspec.UnsetType | None = msgspec.UNSET
    held: tuple[HeldRuns, ...] | msgspec.UnsetType = msgspec.UNSET


class QueryReply(msgspec.Struct):
    """The answer of `/query` and `/query_by_hash`: every worker of the model, including those without a hit."""

    instances: dict[str, InstanceReply]
    scores: dict[str, dict[str, int]]
    # Always empty; clients of `dynamo.indexer` expect it.
    frequencies: tuple[int, ...] = ()


class Overlap(msgspec.Struct):
    """The tokens that would not be computed again. The counts are cumulative, and longest_matched equals disk."""

    longest_matched: int
    gpu: int
    cpu: int
    disk: int
    # The longest match of the rank.
    dp: dict[str, int]


class CandidateReply(msgspec.Struct, kw_only=True):
    """One worker as compared in the choice; the lowest cost wins."""

    worker_id: str | int
    dp_rank: int
    overlap: Overlap
    # In tokens. The cost is the sum of its parts, except that copy, junction and session are subtracted. The load
    # is the part of the cost that is other prompts' work.
    load: int
    cost: int
    parts: CostTerms
    saturated: bool
    state: str
    limited_by: HitLimit | None
    # Present if not zero: the tokens of this prompt that are being computed there.
    pending: int | msgspec.UnsetType = msgspec.UNSET
    reason: str | msgspec.UnsetType = msgspec.UNSET
    approximate: bool | msgspec.UnsetType = msgspec.UNSET


class TokensReply(msgspec.Struct):
    """The source of a text's tokens (`given`, `render`, `tokenize`, `local`, `none`), and how many are known."""

    source: str
    num_tokens: int
    known_tokens: int
    # Why not all tokens are known.
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
    """The answer of `/select` and `/select_and_reserve`.

    model_name, routing_group, isl_tokens, block_size and potential_decode_blocks are for Dynamo's clients.
    """

    selection_id: str
    model: str
    # A number if the worker was registered with one.
    worker_id: str | int
    dp_rank: int
    # The engine's URL, or None for a worker that was registered without one.
    endpoint: str | None
    overlap: Overlap
    # The tokens that the worker is expected to reuse when it schedules the prompt, after the prompts ahead.
    expected_tokens: int
    # The tokens that the worker does not reuse.
    effective_prefill_tokens: int
    reason: str
    # Present for texts.
    tokens: TokensReply | msgspec.UnsetType = msgspec.UNSET
    model_name: str
    routing_group: str
    isl_tokens: int
    block_size: int
    # The blocks that the worker then decodes.
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
    """One worker's load, from all routers and from requests that bypassed them. The first five fields are Dynamo's."""

    worker_id: str | int
    dp_rank: int
    potential_prefill_tokens: int
    potential_decode_blocks: int
    active_requests: int
    decode_tokens: int
    # Whether the worker takes no more prompts.
    saturated: bool
    engine: EngineReply | None
    # In tokens/s; None until measured.
    prefill_rate: float | None
    decode_rate: float | None


class ModelLoadReply(msgspec.Struct):
    """One entry of `GET /loads`."""

    model_name: str
    routing_group: str
    loads: list[WorkerLoadReply]
    # The prompts that wait in this process because all workers are saturated.
    pending_count: int
    pending_isl_tokens: int


class ReservedReply(msgspec.Struct):
    """The answer of `POST /reservations`."""

    selection_id: str
    model_name: str
    routing_group: str
    worker_id: str | int
    dp_rank: int
    endpoint: str | None


class EndedReply(msgspec.Struct):
    """The answer to a request that ends a reservation, or a part of it."""

    status: str


class WorkersReply(msgspec.Struct):
    """The answer of `GET /workers`."""

    workers: list[WorkerStatus]


class ModelReply(msgspec.Struct):
    """One model."""

    id: str
    object: str = "model"
    # OpenAI's clients need a number; the real date is unknown.
    created: int = 0
    owned_by: str = "kvrouter"


class ModelsReply(msgspec.Struct):
    """The answer of `GET /v1/models`."""

    data: list[ModelReply]
    object: str = "list"


class RegisteredReply(msgspec.Struct):
    """The answer to registering, changing or dropping a worker."""

    status: str
    worker_id: str | int
    # The number of dropped ranks.
    dropped: int | msgspec.UnsetType = msgspec.UNSET
    # The fields up to block_size are for Dynamo's clients, on Dynamo's paths.
    model_name: str | msgspec.UnsetType = msgspec.UNSET
    routing_group: str | msgspec.UnsetType = msgspec.UNSET
    # One of: schedulable; incomplete, without an address for requests; unschedulable, once dropped.
    lifecycle: str | msgspec.UnsetType = msgspec.UNSET
    endpoint: str | msgspec.UnsetType | None = msgspec.UNSET
    kv_events_endpoint: str | msgspec.UnsetType | None = msgspec.UNSET
    replay_endpoint: str | msgspec.UnsetType | None = msgspec.UNSET
    block_size: int | msgspec.UnsetType | None = msgspec.UNSET
    # The facts that the engine did not report, and the consequence.
    note: str | msgspec.UnsetType = msgspec.UNSET


class HealthReply(msgspec.Struct):
    """The answer of `GET /health`."""

    # ok, or degraded for the listed reasons.
    status: str
    reasons: list[str]
    # Risks that degrade nothing yet; absent if there are none.
    warnings: list[str] | msgspec.UnsetType = msgspec.UNSET


class ReadyReply(msgspec.Struct):
    """The answer of `GET /ready`. The last two fields are for Dynamo's clients."""

    status: str
    ready: bool
    # The number of worker ids.
    schedulable_workers: int


class VersionReply(msgspec.Struct):
    """The answer of `GET /version`."""

    name: str
    version: str


class ErrorDetailReply(msgspec.Struct):
    """The cause and the fix for people; type and code for programs."""

    message: str
    type: str
    code: str


class ErrorReply(msgspec.Struct):
    """The answer to every request that fails, in OpenAI's shape."""

    error: ErrorDetailReply


_json = msgspec.json.Encoder()
_msgpack = msgspec.msgpack.Encoder()


def encode(reply: Any, accept: str) -> tuple[bytes, str]:
    """Return the encoded reply and its media type.

    The encoding is MessagePack if `accept` prefers it to JSON or ranks both equal, otherwise JSON.
    """
    # This test settles nearly every request.
    if "msgpack" in accept and _wants_msgpack(accept):
        return _msgpack.encode(reply), MSGPACK
    return _json.encode(reply), JSON


def _wants_msgpack(accept: str) -> bool:
    """Return whether an Accept header with MessagePack ranks it at least as high as JSON."""
    qualities = {"msgpack": 0.0, "json": 0.0}
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
            qualities["msgpack"] = quality
        elif name == JSON:
            qualities["json"] = quality
    return qualities["msgpack"] > 0 and qualities["msgpack"] >= qualities["json"]


def query_reply(hits: Iterable[Hit], explain: bool, held: bool = False) -> QueryReply:
    """Return the reply with the ranks of each worker id merged.

    The best rank is the one with the largest disk hit, then cpu, then gpu.
    """
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
        best_hit = best[name]
        if (hit.disk, hit.cpu, hit.gpu) > (best_hit.disk, best_hit.cpu, best_hit.gpu):
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
    """Return the overlap of a hit."""
    return Overlap(hit.disk, hit.gpu, hit.cpu, hit.disk, {str(hit.worker.dp_rank): hit.disk})


def candidate_reply(candidate: Candidate, worker_id: str | int) -> CandidateReply:
    """Return a candidate of a choice as a reply. `worker_id` is the worker's id as registered."""
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
