# SPDX-License-Identifier: Apache-2.0
"""Why one request went where it went, as it is kept: small, and whole without anything that may have changed since.
Pure."""

from __future__ import annotations

import msgspec

from kvrouter.router.index.matching.question import Hit
from kvrouter.router.route.placement.choose import Choice
from kvrouter.router.route.placement.cost import Candidate, Costs, Terms
from kvrouter.router.route.placement.placement_request import PlacementRequest

# Workers of a decision that are kept, the chosen one and the cheapest others: a kilobyte for sixteen.
KEPT_CANDIDATES = 64


class KeptChoice(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A choice with the workers that were compared. hits, costs, loads, terms, pending: of each, the chosen one first
    and the others by their cost; saturated: places in them. compared: how many workers there were."""

    url: str | None
    reason: str
    lost_by: str
    best_hit_tokens: int
    prefill_tokens: int
    queued_tokens: int
    hits: list[Hit]
    costs: list[int]
    loads: list[int]
    terms: list[Terms]
    saturated: list[int]
    pending: list[int]
    compared: int
    expected_tokens: int = 0

    @property
    def hit(self) -> Hit:
        """Of the chosen worker."""
        return self.hits[0]

    def candidates(self) -> list[Candidate]:
        """The workers that are kept, the chosen one first."""
        found = Costs(self.costs, self.loads, self.terms, set(self.saturated))
        return [found.candidate(i, hit, self.pending[i]) for i, hit in enumerate(self.hits)]


class Decision(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """time_s: seconds since 1970. known_tokens: of the prompt's, how many are known; None where only its hashes are."""

    selection_id: str
    time_s: float
    model: str
    num_tokens: int
    known_tokens: int | None
    session_id: str | None
    max_tokens: int | None
    pinned: str | None
    choice: KeptChoice
    # Where another worker computes the prompt.
    prefill: KeptChoice | None


class Outcome(msgspec.Struct, frozen=True, gc=False):
    """What came of a request. outcome: as the metric of proxied requests names it. predicted_tokens, expected_tokens: None
    where nothing can be predicted; delivered_tokens: None where the engine does not say. Times: seconds from the whole request."""

    outcome: str
    predicted_tokens: int | None
    delivered_tokens: int | None
    prompt_tokens: int | None
    completion_tokens: int | None
    ttft_s: float | None
    e2e_s: float
    expected_tokens: int | None = None


def decision_of(selection_id: str, time_s: float, ask: PlacementRequest, choice: Choice) -> Decision:
    """choice: with its comparison."""
    question = ask.question
    known_tokens = 0 if question.is_blind else None if question.token_ids is None else len(question.token_ids)
    return Decision(
        selection_id,
        time_s,
        question.model,
        question.num_tokens,
        known_tokens,
        ask.session_id,
        ask.max_tokens,
        None if ask.pinned is None else ask.pinned if isinstance(ask.pinned, str) else ask.pinned.worker_id,
        _kept(choice),
        None if choice.prefill is None else _kept(choice.prefill),
    )


def _kept(choice: Choice) -> KeptChoice:
    compared = choice.comparison
    assert compared is not None
    hits, costs, pending = compared.hits, compared.costs, compared.pending
    order = compared.best(KEPT_CANDIDATES)
    kept = [hits[i] for i in order]
    saturated = costs.saturated
    return KeptChoice(
        choice.url,
        choice.reason,
        choice.lost,
        choice.best_hit_tokens,
        choice.prefill_tokens,
        choice.queued_tokens,
        kept,
        [costs.totals[i] for i in order],
        [costs.loads[i] for i in order],
        [costs.terms[i] for i in order],
        [place for place, i in enumerate(order) if i in saturated] if saturated else [],
        [pending.get(hit.worker, 0) for hit in kept] if pending else [0] * len(kept),
        len(hits),
        choice.expected_tokens,
    )
