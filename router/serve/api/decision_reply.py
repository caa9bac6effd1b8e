# SPDX-License-Identifier: Apache-2.0
"""A kept decision in the form of `GET /decisions`. Pure."""

from __future__ import annotations

from enum import StrEnum

import msgspec
from msgspec import UNSET, UnsetType

from kvrouter.router.model.workers.stream_state import StreamState
from kvrouter.router.observe.decisions.decision import Decision, KeptChoice, Outcome
from kvrouter.router.observe.decisions.decision_log import DecisionLog, KeptDecision
from kvrouter.router.serve.api.responses import CandidateReply, Overlap, candidate_reply, overlap_of


class Proof(StrEnum):
    """The evidence behind a predicted hit."""

    # The worker's events, with nothing in doubt, and the prompt's tokens.
    EXACT = "exact"
    # The last known residency of a worker in doubt, or of a prompt of which only the beginning is known.
    ASSUMED = "assumed"
    # The prompts that were sent there before.
    APPROXIMATE = "approximate"
    # Nothing: the prompt's tokens were not known.
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
    """The explanation of one choice, with the state and the load of that moment."""

    selection_id: str
    # Empty for a choice without a request.
    request_id: str
    # Seconds since 1970.
    time_s: float
    model: str
    worker_id: str
    dp_rank: int
    endpoint: str | None
    num_tokens: int
    overlap: Overlap
    # The reuse expected after the prompts ahead; at least the hit.
    expected_tokens: int
    effective_prefill_tokens: int
    queued_tokens: int
    proof: Proof
    reason: str
    # Why the chosen worker reuses less than best_hit_tokens; empty if it does not.
    lost_by: str
    # The longest hit of all workers.
    best_hit_tokens: int
    # The number of workers compared; `candidates` has the chosen one and the cheapest.
    compared: int
    session_id: str | None
    max_tokens: int | None
    pinned_worker: str | None
    # None while the request runs, and for a choice without a request.
    outcome: Outcome | None
    candidates: list[CandidateReply] | UnsetType = UNSET
    prefill: DecidedPrefill | UnsetType = UNSET
    # The selections of the request's earlier attempts, which failed.
    earlier: list[str] | UnsetType = UNSET


class DecisionsReply(msgspec.Struct):
    """The decisions, the newest first, without their candidates."""

    decisions: list[DecisionReply]


def decision_reply(kept: KeptDecision, earlier: list[str] | None = None, *, explain: bool = True) -> DecisionReply:
    """Return a kept decision as a reply, with its candidates if `explain`.

    `earlier` has the selections of the request's earlier attempts.
    """
    decision = kept.decision()
    choice, prefill = decision.choice, decision.prefill
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
        prefill=UNSET if prefill is None else _prefill(prefill, explain=explain),
        earlier=earlier or UNSET,
    )


def find_decision(decisions: DecisionLog, name: str) -> DecisionReply | None:
    """Return the decision with this selection id, or the last attempt of the request with this id, or None."""
    kept_and_earlier = decisions.find(name)
    return None if kept_and_earlier is None else decision_reply(*kept_and_earlier)


# Reads a reply that another process of this router sent.
read_decision = msgspec.json.Decoder(DecisionReply).decode


def _prefill(choice: KeptChoice, *, explain: bool) -> DecidedPrefill:
    """Return the reply's part about the prefill worker."""
    worker = choice.hit.worker
    return DecidedPrefill(
        worker_id=worker.worker_id,
        dp_rank=worker.dp_rank,
        endpoint=choice.url,
        overlap=overlap_of(choice.hit),
        reason=choice.reason,
        candidates=_candidates(choice) if explain else UNSET,
    )


def _candidates(choice: KeptChoice) -> list[CandidateReply]:
    """Return the candidates that were kept with the choice."""
    return [candidate_reply(candidate, candidate.hit.worker.worker_id) for candidate in choice.candidates()]


def _proof(decision: Decision) -> Proof:
    """Return the evidence behind the chosen worker's hit."""
    hit, known_tokens = decision.choice.hit, decision.known_tokens
    if hit.approximate:
        return Proof.APPROXIMATE
    if known_tokens == 0:
        return Proof.UNKNOWN
    whole = known_tokens is None or known_tokens == decision.num_tokens
    return Proof.EXACT if whole and hit.state == StreamState.LIVE.value else Proof.ASSUMED
