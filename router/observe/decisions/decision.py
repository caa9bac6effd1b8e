# SPDX-License-Identifier: Apache-2.0
"""A decision about one request, as it is kept: small, and complete without values that may have changed since. Pure.

A decision is made for every request and read for few, so nothing is sorted or worded before it is read.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvrouter.router.index.matching.question import Hit
from kvrouter.router.route.placement.choose import Choice, Comparison
from kvrouter.router.route.placement.cost import Candidate, Costs, Terms
from kvrouter.router.route.placement.placement_request import PlacementRequest
from kvrouter.router.route.placement.planned_pull import PlannedPull

# How many workers of a decision are kept, the chosen one and the cheapest others: a kilobyte for sixteen.
KEPT_CANDIDATES = 64


class KeptChoice(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A choice with the compared workers that are kept: all, or the best, the chosen one first."""

    url: str | None
    reason: str
    lost_by: str
    best_hit_tokens: int
    prefill_tokens: int
    queued_tokens: int
    # One element for each kept worker.
    hits: Sequence[Hit]
    costs: list[int]
    loads: list[int]
    terms: list[Terms]
    # Indices of the saturated workers in the lists above, and of the chosen one.
    saturated: set[int]
    chosen: int
    # Tokens of the prompt that each kept worker is computing now; empty if none is.
    pending: list[int]
    # How many workers were compared.
    compared: int
    expected_tokens: int = 0
    # The blocks that the chosen worker was to fetch, or None.
    pull: PlannedPull | None = None

    @property
    def hit(self) -> Hit:
        """The hit of the chosen worker."""
        return self.hits[self.chosen]

    def candidates(self) -> list[Candidate]:
        """Return the kept workers, the chosen one first, then the others by their cost."""
        costs = Costs(self.costs, self.loads, self.terms, self.saturated)
        pending = self.pending or [0] * len(self.hits)
        is_sorted = self.compared > len(self.hits)
        order = range(len(self.hits)) if is_sorted else Comparison(self.hits, costs, self.chosen, {}).best()
        return [costs.candidate(i, self.hits[i], pending[i]) for i in order]


class Decision(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One decision with the request that it was made for."""

    selection_id: str
    # Seconds since 1970.
    time_s: float
    model: str
    num_tokens: int
    # How many tokens of the prompt are known; None if only its hashes are, and 0 if they are a guess.
    known_tokens: int | None
    session_id: str | None
    max_tokens: int | None
    pinned: str | None
    choice: KeptChoice
    # The choice of another worker that computes the prompt; None if the chosen one does.
    prefill: KeptChoice | None
    # The number of prompts, of which `num_tokens` is the sum, and of answers to each of them.
    num_prompts: int = 1
    answers: int = 1


def decision_of(selection_id: str, time_s: float, request: PlacementRequest, choice: Choice) -> Decision:
    """Return a decision as it is kept. `choice` must have its comparison."""
    question = request.question
    known_tokens = 0 if question.is_guess else question.known_tokens
    return Decision(
        selection_id,
        time_s,
        question.model,
        question.num_tokens,
        known_tokens,
        request.session_id,
        request.max_tokens,
        None
        if request.pinned is None
        else request.pinned
        if isinstance(request.pinned, str)
        else request.pinned.worker_id,
        _kept_choice(choice),
        None if choice.prefill is None else _kept_choice(choice.prefill),
        question.num_prompts,
        request.answers,
    )


def _kept_choice(choice: Choice) -> KeptChoice:
    comparison = choice.comparison
    assert comparison is not None
    hits, costs, chosen, saturated = comparison.hits, comparison.costs, comparison.chosen, comparison.costs.saturated
    totals, loads, terms = costs.totals, costs.loads, costs.terms
    if len(hits) > KEPT_CANDIDATES:
        order = comparison.best(KEPT_CANDIDATES)
        hits, terms = [hits[i] for i in order], [terms[i] for i in order]
        totals, loads = [totals[i] for i in order], [loads[i] for i in order]
        chosen, saturated = 0, {place for place, i in enumerate(order) if i in saturated}
    pending = comparison.pending
    return KeptChoice(
        choice.url,
        choice.reason,
        choice.lost,
        choice.best_hit_tokens,
        choice.prefill_tokens,
        choice.queued_tokens,
        hits,
        totals,
        loads,
        terms,
        saturated,
        chosen,
        [pending.get(hit.worker, 0) for hit in hits] if pending else [],
        len(comparison.hits),
        choice.expected_tokens,
        choice.pull,
    )
