# SPDX-License-Identifier: Apache-2.0
"""The choice of the worker with the lowest cost (`cost.py`), and the reason for it. Pure.

A saturated worker is skipped while another worker that is not saturated has no more load; affinity never overrides
this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import nlargest
from random import Random

import msgspec

from kvrouter.contract.tiers import TIERS
from kvrouter.router.base.common.escaping import printable
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.index.matching.question import Hit
from kvrouter.router.route.placement.cost import Candidate, ChoiceContext, Costs, weigh
from kvrouter.router.route.placement.expected_reuse import ExpectedReuse
from kvrouter.router.route.placement.planned_pull import PlannedPull
from kvrouter.router.route.placement.policies import KV, LEAST_COST, PolicyInput

# The reasons why the chosen worker reuses less of the prompt than the best one would.
EXCLUSION = "exclusion"  # the client excluded it, or pinned another
STATE = "state"  # it takes no requests now: down, draining, circuit breaker open
LOAD = "load"  # too much is queued or decoded there, or it is slow
AFFINITY = "affinity"  # the session, or a prompt with the same beginning, was elsewhere
TEMPERATURE = "temperature"
POLICY = "policy"  # a policy other than kv
MEMORY = "memory"  # its cache is written more often, so the blocks that the prompt pushes out are worth more
TIER = "tier"  # loading it back would take longer than computing or fetching it elsewhere
PULL = "pull"  # the chosen worker fetches as much, so it is lost only if the blocks do not arrive
LOST_REASONS = (EXCLUSION, STATE, LOAD, AFFINITY, TEMPERATURE, POLICY, MEMORY, TIER, PULL)


class Comparison(msgspec.Struct, frozen=True, eq=False, gc=False):
    """The workers of a choice and their costs."""

    hits: Sequence[Hit]
    costs: Costs
    # The place of the chosen worker among the hits.
    chosen: int
    # Tokens of the prompt that each worker is computing.
    pending: Mapping[WorkerKey, int]

    def best(self, limit: int | None = None) -> list[int]:
        """Return the indices of the cheapest workers among the candidates, the chosen one first.

        The chosen one comes first even if chance or a policy other than `kv` chose it.

        Args:
            limit: How many indices to return, or None for all.
        """
        hits, costs, skipped = self.hits, self.costs.totals, self.costs.skipped
        chosen = self.chosen
        ranks = [(i not in skipped, -costs[i], hit.by_tier[:-1], -i) for i, hit in enumerate(hits) if i != chosen]
        best = sorted(ranks, reverse=True) if limit is None or limit >= len(hits) else nlargest(limit - 1, ranks)
        return [chosen, *[-rank[-1] for rank in best]]

    def candidates(self) -> list[Candidate]:
        """Return all workers, the best one first."""
        pending = self.pending
        return [self.costs.candidate(i, hit := self.hits[i], pending.get(hit.worker, 0)) for i in self.best()]


class Choice(msgspec.Struct, frozen=True, gc=False):
    """The chosen worker, and why it was chosen."""

    hit: Hit
    url: str | None
    # A sentence for people.
    reason: str
    # The workers that were compared, or None where they are not kept.
    comparison: Comparison | None = None
    # The worker's work on this prompt, and on those queued before it, in computed tokens. The time in which it waits for
    # fetched blocks is no work.
    prefill_tokens: int = 0
    queued_tokens: int = 0
    # The longest hit of all workers that were compared.
    best_hit_tokens: int = 0
    # The reason why the chosen worker has a shorter hit: one of LOST_REASONS, or empty if its hit is the longest.
    lost: str = ""
    all_saturated: bool = False
    # The choice of the worker that computes the prompt and hands it over, or None where the chosen one computes it.
    prefill: Choice | None = None
    # The work before the first token if the chosen worker computes the prompt itself.
    alone_tokens: int = 0
    # The reuse that prompts ahead of this one add to the hit, or None if nothing is known about them.
    expected: ExpectedReuse | None = None
    # The blocks that the chosen worker is to fetch from another one before it computes, or None.
    pull: PlannedPull | None = None

    @property
    def expected_tokens(self) -> int:
        """The reuse that is expected at the chosen worker; never below its hit."""
        return self.hit.tokens if self.expected is None else self.expected.tokens

    @property
    def candidates(self) -> list[Candidate]:
        """The workers that were compared, the best one first; empty where they are not kept."""
        return [] if self.comparison is None else self.comparison.candidates()

    def alone(self) -> Choice:
        """Return this choice without its comparisons, which take memory."""
        prefill = self.prefill and self.prefill.alone()
        return msgspec.structs.replace(self, comparison=None, prefill=prefill)


def choose(hits: Sequence[Hit], context: ChoiceContext, rng: Random) -> Choice:
    """Choose one of `hits`, which must not be empty; the caller sets the choice's URL."""
    tokens = [hit.by_tier[-1] for hit in hits]
    longest = max(tokens)
    costs = weigh(hits, context, longest)
    skipped = costs.skipped
    chosen = _pick(hits, costs, skipped, context, rng)
    pull = None
    if (priced := costs.pulls.get(chosen)) is not None and context.lenders is not None:
        pull = context.lenders.plan(hits[chosen], priced[0])
    best = chosen if tokens[chosen] == longest else tokens.index(longest)
    lost = "" if best == chosen else _loss(hits, best, chosen, skipped, pull, context)
    return Choice(
        hits[chosen],
        None,
        _reason(hits, costs, skipped, best, chosen, lost, pull, context),
        Comparison(hits, costs, chosen, context.pending),
        costs.computed_tokens(chosen),
        int(costs.terms[chosen][1] + 0.5),
        longest,
        lost,
        len(costs.saturated) == len(hits),
        pull=pull,
    )


def without_pull(choice: Choice, context: ChoiceContext) -> Choice:
    """Return the choice of the same worker without its pull; the choice must have its comparison."""
    comparison = choice.comparison
    assert comparison is not None
    hits, costs, chosen = comparison.hits, comparison.costs, comparison.chosen
    skipped = costs.skipped
    best = chosen
    if choice.lost:
        best = [hit.tokens for hit in hits].index(choice.best_hit_tokens)
    lost = _loss(hits, best, chosen, skipped, None, context) if choice.lost else ""
    reason = _reason(hits, costs, skipped, best, chosen, lost, None, context)
    return msgspec.structs.replace(choice, reason=reason, lost=lost, pull=None)


def _pick(hits: Sequence[Hit], costs: Costs, skipped: set[int], context: ChoiceContext, rng: Random) -> int:
    """Return the place of the chosen worker."""
    loads = costs.loads
    if not skipped:
        return context.policy.pick(PolicyInput(hits, costs.totals, loads, context.num_tokens, context.turn), rng)
    free = [i for i in range(len(hits)) if i not in skipped]
    contest = PolicyInput(
        [hits[i] for i in free],
        [costs.totals[i] for i in free],
        [loads[i] for i in free],
        context.num_tokens,
        context.turn,
    )
    return free[context.policy.pick(contest, rng)]


def _loss(
    hits: Sequence[Hit],
    best: int,
    chosen: int,
    skipped: set[int],
    pull: PlannedPull | None,
    context: ChoiceContext,
) -> str:
    """Return the reason why the chosen worker was preferred to the one with the longest hit.

    Args:
        hits: The hits of all workers.
        best: Place of the longest hit.
        chosen: Place of the chosen worker.
        skipped: Places of the saturated workers that get no prompt.
        pull: The blocks that the chosen worker fetches.
        context: The context of the choice.
    """
    if pull is not None and pull.tokens >= hits[best].tokens and context.policy is LEAST_COST:
        return PULL
    if best in skipped:
        return LOAD
    if context.policy is not LEAST_COST:
        return TEMPERATURE if context.policy.softened else POLICY
    worker = hits[chosen].worker
    longest = hits[best].tokens
    idle = weigh((hits[best], hits[chosen]), context, longest, idle=True)
    best_cost, chosen_cost = idle.totals
    if hits[best].worker in context.weights.slowness or best_cost <= chosen_cost:
        return LOAD
    if best_cost - idle.memory_tokens(0) <= chosen_cost - idle.memory_tokens(1):
        return MEMORY
    if worker in context.pending or (context.session is not None and context.session.worker == worker):
        return AFFINITY
    if hits[chosen].full_attention > longest:
        return AFFINITY
    return TIER


def _reason(
    hits: Sequence[Hit],
    costs: Costs,
    skipped: set[int],
    best: int,
    chosen: int,
    lost: str,
    pull: PlannedPull | None,
    context: ChoiceContext,
) -> str:
    """Return the sentence that explains a choice to people."""
    hit, whole = hits[chosen], f"{context.num_tokens} tokens"
    if context.num_prompts > 1:
        whole += f" of {context.num_prompts} prompts"
    tokens = hit.tokens
    if context.blind:
        text = "no reuse can be predicted, because the prompt's tokens are not known"
    elif tokens == 0:
        text = f"no worker holds a reusable prefix of the {whole}"
        if pull is not None:
            text = f"holds none of the {whole}"
        elif hits[best].tokens:
            text = f"computes all {whole}"
    elif hit.approximate:
        text = f"approximate: {tokens} of {whole} were sent there before"
    else:
        text = f"reuses {tokens} of {whole} ({_origins(hit.by_tier)})"
    if pull is not None:
        text += f"; fetches {pull.fetched_tokens} tokens from {printable(pull.source.route_name)}"
    if (coming := context.pending.get(hit.worker, 0)) > tokens:
        text += f"; {coming} tokens of it are being computed there"
    if lost:
        other = hits[best]
        obstacle = _but(lost, best, costs, skipped)
        text += f"; {printable(other.worker.route_name)} would reuse {other.tokens}, but {obstacle}"
    elif context.policy.name == KV:
        text += _among(hits, costs, skipped, chosen)
    if context.key_share is not None:
        text += f"; its API key holds {context.key_share.excess:.1f} times its fair part of the memory"
    return f"{text}; all workers are saturated" if len(costs.saturated) == len(hits) else text


def _origins(by_tier: tuple[int, ...]) -> str:
    """Return where the tokens of a hit are, as a part of a sentence."""
    before = by_tier[0]
    text = f"{before} {TIERS[0].origin}"
    # Most hits need no load, and a loop would take 3 % of a choice among eight workers.
    if by_tier[-1] > before:
        for tier, tokens in zip(TIERS, by_tier, strict=True):
            if tokens > before:
                text += f", {tokens - before} more {tier.origin}"
                before = tokens
    return text


def _but(lost: str, best: int, costs: Costs, skipped: set[int]) -> str:
    """Return why the worker with the longest hit was not chosen, as a part of a sentence."""
    if best in skipped:
        return "it is saturated"
    if lost == LOAD:
        return f"has {costs.loads[best]} tokens of load"
    if lost == AFFINITY:
        return "the session, or a prompt with the same beginning, was here"
    if lost == TEMPERATURE:
        return "the choice was made by temperature sampling"
    if lost == MEMORY:
        return "what the prompt pushes out of its cache is worth more"
    if lost == PULL:
        return "costs more"
    if lost == TIER:
        return "would load them back more slowly than they are computed"
    return "the policy is not kv"


def _among(hits: Sequence[Hit], costs: Costs, skipped: set[int], chosen: int) -> str:
    """Return how many workers were as good as the chosen one, or that the load alone decided, as part of a sentence."""
    loads = costs.loads
    hit, cost, tokens = hits[chosen], costs.totals[chosen], hits[chosen].tokens
    alike = [i for i, other in enumerate(hits) if other.by_tier[-1] == tokens]
    if len(alike) == 1:
        return ""
    equal = [i for i in alike if hits[i].by_tier == hit.by_tier]
    ties = sum(costs.totals[i] == cost and i not in skipped for i in equal)
    text = f"; chosen at random among {ties} equals" if ties > 1 else ""
    if len(equal) > ties and any(loads[i] > loads[chosen] for i in equal):
        text = f"; the least loaded of {len(equal)} that reuse as much{text}"
    return text
