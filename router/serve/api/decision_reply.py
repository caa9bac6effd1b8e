# SPDX-License-Identifier: Apache-2.0
"""A decision that was kept, as `GET /decisions` shows it. Pure."""

from __future__ import annotations

from enum import StrEnum

import msgspec
from msgspec import UNSET, UnsetType

from kvrouter.router.model.workers.stream_state import StreamState
from kvrouter.router.observe.decisions.decision import Decision, KeptChoice, Outcome
from kvrouter.router.observe.decisions.decision_log import DecisionLog, KeptDecision
from kvrouter.router.serve.api.responses import CandidateReply, Overlap, candidate_reply, overlap_of


class Proof(StrEnum):
    """What the predicted hit rests on. exact: the worker's events, with nothing in doubt, and the prompt's tokens.
    assumed: the last known residency of a worker in doubt, or of a prompt of which only the beginning is known.
    approximate: what was sent there before. unknown: the prompt's tokens were not known."""

    EXACT = "exact"
    ASSUMED = "assumed"
    APPROXIMATE = "approximate"
    UNKNOWN = "unknown"


class DecidedPrefill(msgspec.Struct, kw_only=True):
    """The worker that was to compute the prompt and hand it over."""

    worker_id: str
    dp_rank: int
    endpoint: str | None
    overlap: Overlap
    reason: str
    candidates: list[CandidateReply] | UnsetType = UNSET


class DecisionReply(msgspec.Struct, kw_only=True):
    """Why a request went where it went, with the state and the load of that moment. time_s: seconds since 1970.
    expected_tokens: the reuse expected with the prompts ahead, at least the hit. request_id: empty for a choice without
    a request. lost_by: why the chosen worker reuses less than `best_hit_tokens`,
    the longest hit of all; empty where it does not. compared: workers compared, of which `candidates` has the chosen
    and the cheapest. outcome: null while the request runs, and for a choice without a request. earlier: the selections
    of the request's attempts before, which failed."""

    selection_id: str
    request_id: str
    time_s: float
    model: str
    worker_id: str
    dp_rank: int
    endpoint: str | None
    num_tokens: int
    overlap: Overlap
    expected_tokens: int
    effective_prefill_tokens: int
    queued_tokens: int
    proof: Proof
    reason: str
    lost_by: str
    best_hit_tokens: int
    compared: int
    session_id: str | None
    max_tokens: int | None
    pinned_worker: str | None
    outcome: Outcome | None
    candidates: list[CandidateReply] | UnsetType = UNSET
    prefill: DecidedPrefill | UnsetType = UNSET
    earlier: list[str] | UnsetType = UNSET


class DecisionsReply(msgspec.Struct):
    """The newest first, without their candidates."""

    decisions: list[DecisionReply]


def decision_reply(kept: KeptDecision, earlier: list[str] | None = None, *, explain: bool = True) -> DecisionReply:
    """explain: with the candidates."""
    decision = kept.decision()
    choice, there = decision.choice, decision.prefill
    hit = choice.hit
    return DecisionReply(
        selection_id=decision.selection_id,
        request_id=kept.request_id,
        time_s=decision.time_s,
        model=decision.model,
        worker_id=hit.worker.worker_id,
        dp_rank=hit.worker.dp_rank,
        endpoint=choice.url,
        num_tokens=decision.num_tokens,
        overlap=overlap_of(hit),
        expected_tokens=max(hit.disk, choice.expected_tokens),
        effective_prefill_tokens=decision.num_tokens - hit.disk,
        queued_tokens=choice.queued_tokens,
        proof=_proof(decision),
        reason=choice.reason,
        lost_by=choice.lost_by,
        best_hit_tokens=choice.best_hit_tokens,
        compared=choice.compared,
        session_id=decision.session_id,
        max_tokens=decision.max_tokens,
        pinned_worker=decision.pinned,
        outcome=kept.outcome,
        candidates=_candidates(choice) if explain else UNSET,
        prefill=UNSET if there is None else _prefill(there, explain=explain),
        earlier=earlier or UNSET,
    )


def find_decision(decisions: DecisionLog, name: str) -> DecisionReply | None:
    """By the id of a selection, or of a request: then its last attempt."""
    found = decisions.find(name)
    return None if found is None else decision_reply(*found)


# What another process of this router sent.
read_decision = msgspec.json.Decoder(DecisionReply).decode


def _prefill(there: KeptChoice, *, explain: bool) -> DecidedPrefill:
    worker = there.hit.worker
    return DecidedPrefill(
        worker_id=worker.worker_id,
        dp_rank=worker.dp_rank,
        endpoint=there.url,
        overlap=overlap_of(there.hit),
        reason=there.reason,
        candidates=_candidates(there) if explain else UNSET,
    )


def _candidates(choice: KeptChoice) -> list[CandidateReply]:
    return [candidate_reply(one, one.hit.worker.worker_id) for one in choice.candidates()]


def _proof(decision: Decision) -> Proof:
    hit, known = decision.choice.hit, decision.known_tokens
    if hit.approximate:
        return Proof.APPROXIMATE
    if known == 0:
        return Proof.UNKNOWN
    whole = known is None or known == decision.num_tokens
    return Proof.EXACT if whole and hit.state == StreamState.LIVE.value else Proof.ASSUMED
