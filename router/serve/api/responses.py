# SPDX-License-Identifier: Apache-2.0
"""Hits and candidates as answers of the API, and the encoding of answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from kvrouter.contract.choices import CandidateReply
from kvrouter.contract.hits import Overlap, PeerHit
from kvrouter.contract.queries import ExplainedInstance, InstanceReply, QueryReply
from kvrouter.contract.tiers import TIERS
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.index.matching.pull import Pull
from kvrouter.router.index.matching.question import Hit
from kvrouter.router.route.placement.choose import Choice
from kvrouter.router.route.placement.cost import Candidate
from kvrouter.router.serve.api.requests import (
    MSGPACK,
    MSGPACK_TYPES,
)

JSON = "application/json"
# The fields of the tiers in an answer, in the order of a hit's tokens.
TIER_FIELDS = tuple(tier.name for tier in TIERS)

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

    The best rank is the one with the most tokens with all tiers, then with all but the last, and so on.
    """
    best: dict[str, Hit] = {}
    scores: dict[str, dict[str, int]] = {}
    # The best source of each worker that has one, over all of its ranks.
    pulls: dict[str, Pull] = {}
    for hit in hits:
        if hit.pulls:
            pull = hit.pulls[0]
            pulls[hit.worker.worker_id] = max(pull, pulls.get(hit.worker.worker_id, pull), key=lambda pull: pull.tokens)
        name = hit.worker.worker_id
        ranks = scores.get(name)
        if ranks is None:
            scores[name] = {str(hit.worker.dp_rank): hit.tokens}
            best[name] = hit
            continue
        ranks[str(hit.worker.dp_rank)] = hit.tokens
        best_hit = best[name]
        if hit.by_tier[::-1] > best_hit.by_tier[::-1]:
            best[name] = hit
    return QueryReply(
        {
            name: _instance(hit, scores[name], pulls.get(name) if pulls else None, explain, held)
            for name, hit in best.items()
        },
        scores,
    )


def _instance(hit: Hit, dp: dict[str, int], pull: Pull | None, explain: bool, held: bool) -> InstanceReply:
    """Return the entry of one worker. `dp` has the longest match of each of its ranks, and `pull` the best source."""
    always: dict[str, Any] = {
        **_tokens(hit, dp),
        "state": hit.state,
        "reason": hit.reason or None,
        "approximate": hit.approximate or None,
        "held": hit.held if held else None,
    }
    # If another rank reuses as much without a source, the source adds nothing.
    if pull is not None and pull.tokens > hit.tokens:
        always["peer"] = _peer(pull, _id_text)
    if not explain:
        return InstanceReply(**always)
    return ExplainedInstance(**always, groups=hit.groups, limited_by=hit.limited_by)


def overlap_of(hit: Hit) -> Overlap:
    """Return the overlap of a hit."""
    return Overlap(**_tokens(hit, {str(hit.worker.dp_rank): hit.tokens}))


def _tokens(hit: Hit, ranks: dict[str, int]) -> dict[str, Any]:
    """Return the fields of an overlap; `ranks` has the longest match of each rank."""
    return dict(zip(TIER_FIELDS, hit.by_tier, strict=True), longest_matched=hit.tokens, dp=ranks)


def _id_text(worker: WorkerKey) -> str:
    """Return a worker's id as text."""
    return worker.worker_id


def _peer(pull: Pull, given_id: Callable[[WorkerKey], str | int]) -> PeerHit:
    """Return a hit with blocks of a source. `given_id` returns a worker's id as it is shown."""
    return PeerHit(given_id(pull.source), pull.source.dp_rank, pull.tokens)


def candidate_reply(candidate: Candidate, given_id: Callable[[WorkerKey], str | int] = _id_text) -> CandidateReply:
    """Return a candidate of a choice as a reply. `given_id` returns a worker's id as it is shown."""
    hit = candidate.hit
    return CandidateReply(
        worker_id=given_id(hit.worker),
        dp_rank=hit.worker.dp_rank,
        overlap=overlap_of(hit),
        load=candidate.load,
        cost=candidate.cost,
        parts=candidate.parts,
        saturated=candidate.saturated,
        state=hit.state,
        limited_by=hit.limited_by,
        pending=candidate.pending or None,
        reason=hit.reason or None,
        approximate=hit.approximate or None,
        peer=_peer(hit.pulls[0], given_id) if hit.pulls else None,
    )


def candidate_replies(choice: Choice, given_id: Callable[[WorkerKey], str | int]) -> tuple[CandidateReply, ...]:
    """Return the candidates of a choice as replies. `given_id` returns a worker's id as registered."""
    return tuple(candidate_reply(candidate, given_id) for candidate in choice.candidates)
