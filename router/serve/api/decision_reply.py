# SPDX-License-Identifier: Apache-2.0
"""A kept decision in the form of `GET /decisions`. Pure."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TypeVar

import msgspec

from kvrouter.contract.choices import CandidateReply, PullReply
from kvrouter.contract.decisions import DecidedPrefill, DecisionReply, DecisionsReply, Proof
from kvrouter.router.model.workers.stream_state import StreamState
from kvrouter.router.observe.decisions.decision import Decision, KeptChoice
from kvrouter.router.observe.decisions.decision_log import DecisionFilter, DecisionLog, KeptDecision
from kvrouter.router.route.placement.planned_pull import PlannedPull
from kvrouter.router.serve.api.responses import candidate_reply, overlap_of

log = logging.getLogger("kvrouter.decisions")

Reply = TypeVar("Reply", DecisionReply, DecisionsReply)


def decision_reply(
    kept_decision: KeptDecision, earlier: list[str] | None = None, *, explain: bool = True
) -> DecisionReply:
    """Return a kept decision as a reply, with its candidates if `explain`.

    `earlier` has the selections of the request's earlier attempts.
    """
    decision = kept_decision.decision()
    choice, prefill = decision.choice, decision.prefill
    hit = choice.hit
    return DecisionReply(
        selection_id=decision.selection_id,
        request_id=kept_decision.request_id,
        time_s=decision.time_s,
        model=decision.model,
        worker_id=hit.worker.worker_id,
        dp_rank=hit.worker.dp_rank,
        endpoint=choice.url,
        num_tokens=decision.num_tokens,
        num_prompts=decision.num_prompts,
        answers=decision.answers,
        overlap=overlap_of(hit),
        expected_tokens=max(hit.tokens, choice.expected_tokens),
        effective_prefill_tokens=decision.num_tokens - hit.tokens,
        queued_tokens=choice.queued_tokens,
        proof=_proof(decision),
        reason=choice.reason,
        lost_by=choice.lost_by,
        best_hit_tokens=choice.best_hit_tokens,
        compared=choice.compared,
        session_id=decision.session_id,
        max_tokens=decision.max_tokens,
        pinned_worker=decision.pinned,
        outcome=kept_decision.outcome,
        candidates=_candidates(choice) if explain else None,
        prefill=None if prefill is None else _prefill(prefill, explain=explain),
        pull=None if choice.pull is None else _pull(choice.pull),
        earlier=earlier or None,
    )


def find_decision(decisions: DecisionLog, name: str) -> DecisionReply | None:
    """Return the decision with this selection id, or the last attempt of the request with this id, or None."""
    kept_and_earlier = decisions.find(name)
    return None if kept_and_earlier is None else decision_reply(*kept_and_earlier)


def list_decisions(decisions: DecisionLog, most: int, wanted: DecisionFilter) -> DecisionsReply:
    """Return the last of the wanted decisions."""
    kept_decisions, searched = decisions.last(most, wanted)
    replies = [decision_reply(kept_decision, explain=False) for kept_decision in kept_decisions]
    return DecisionsReply(replies, decisions.num_kept, searched)


def joined(replies: list[DecisionsReply], most: int) -> DecisionsReply:
    """Return the lists of several processes as one, the newest decisions first."""
    entries = sorted((entry for reply in replies for entry in reply.decisions), key=lambda entry: -entry.time_s)
    return DecisionsReply(
        entries[:most], sum(reply.kept for reply in replies), sum(reply.searched for reply in replies)
    )


_decision = msgspec.json.Decoder(DecisionReply)
_decisions = msgspec.json.Decoder(DecisionsReply)


def read_decision(sent: bytes) -> DecisionReply | None:
    """Return the reply that another process of this router sent, or None if it ended while it was writing."""
    return _read(_decision, sent)


def read_decisions(sent: Iterable[bytes]) -> list[DecisionsReply]:
    """Return the replies that other processes of this router sent, without those of processes that ended meanwhile."""
    return [reply for reply in (_read(_decisions, part) for part in sent) if reply is not None]


def _read(decoder: msgspec.json.Decoder[Reply], sent: bytes) -> Reply | None:
    try:
        return decoder.decode(sent)
    except msgspec.DecodeError as error:
        log.warning("left out the decisions of another process of this router, whose answer cannot be read: %s", error)
        return None


def _prefill(choice: KeptChoice, *, explain: bool) -> DecidedPrefill:
    """Return the reply's part about the prefill worker."""
    worker = choice.hit.worker
    return DecidedPrefill(
        worker_id=worker.worker_id,
        dp_rank=worker.dp_rank,
        endpoint=choice.url,
        overlap=overlap_of(choice.hit),
        reason=choice.reason,
        candidates=_candidates(choice) if explain else None,
    )


def _pull(pull: PlannedPull) -> PullReply:
    """Return the reply's part about the blocks that the chosen worker was to fetch."""
    return PullReply(
        worker_id=pull.source.worker_id,
        dp_rank=pull.source.dp_rank,
        tokens=pull.tokens,
        fetched_tokens=pull.fetched_tokens,
        timeout_s=pull.timeout_s,
    )


def _candidates(choice: KeptChoice) -> tuple[CandidateReply, ...]:
    """Return the candidates that were kept with the choice."""
    return tuple(candidate_reply(candidate) for candidate in choice.candidates())


def _proof(decision: Decision) -> Proof:
    """Return the evidence behind the chosen worker's hit."""
    hit, known_tokens = decision.choice.hit, decision.known_tokens
    if hit.approximate:
        return Proof.APPROXIMATE
    if known_tokens == 0:
        return Proof.UNKNOWN
    whole = known_tokens is None or known_tokens == decision.num_tokens
    return Proof.EXACT if whole and hit.state == StreamState.LIVE.value else Proof.ASSUMED
