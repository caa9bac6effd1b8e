# SPDX-License-Identifier: Apache-2.0
"""Chooses the worker with the lowest cost (`cost.py`), and says why. Pure: hits and load in, choice out.

A saturated worker is skipped while another one that is not has no more load; affinity never overrides this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import nsmallest
from random import Random

import msgspec

from kvrouter.router.common.escaping import printable
from kvrouter.router.common.ids import WorkerKey
from kvrouter.router.matching.question import Hit
from kvrouter.router.placement.cost import Candidate, ChoiceContext, Costs, weigh
from kvrouter.router.placement.expected_reuse import ExpectedReuse
from kvrouter.router.placement.policies import KV, LEAST_COST, PolicyInput

# Why the chosen worker reuses less of the prompt than the best one would.
EXCLUSION = "exclusion"  # the client excluded it, or pinned another
STATE = "state"  # it takes no requests now: down, draining, circuit breaker open
LOAD = "load"  # too much is queued or decoded there, or it is slow
AFFINITY = "affinity"  # the session, or a prompt with the same beginning, was elsewhere
TEMPERATURE = "temperature"
POLICY = "policy"  # a policy other than kv
MEMORY = "memory"  # its cache is written more often, so that what the prompt pushes out is worth more
TIER = "tier"  # loading it back would take longer than computing it elsewhere
LOST_REASONS = (EXCLUSION, STATE, LOAD, AFFINITY, TEMPERATURE, POLICY, MEMORY, TIER)


class Comparison(msgspec.Struct, frozen=True, eq=False, gc=False):
    """The workers of a choice, as they were compared. chosen: place of the chosen one; pending: tokens of the prompt that
    are being computed at a worker."""

    hits: Sequence[Hit]
    found: Costs
    chosen: int
    pending: Mapping[WorkerKey, int]

    def best(self, most: int | None = None) -> list[int]:
        """The places of the cheapest workers, the chosen one first: it is the best whatever chance or another policy
        said. most: of them."""
        hits, costs, skipped = self.hits, self.found.costs, self.found.skipped
        chosen = self.chosen
        others = [(i in skipped, costs[i], -hit.gpu, -hit.cpu, i) for i, hit in enumerate(hits) if i != chosen]
        best = sorted(others) if most is None or most >= len(hits) else nsmallest(most - 1, others)
        return [chosen, *[one[-1] for one in best]]

    def candidates(self) -> list[Candidate]:
        """All of them, best first."""
        pending = self.pending
        return [self.found.candidate(i, hit := self.hits[i], pending.get(hit.worker, 0)) for i in self.best()]


class Choice(msgspec.Struct, frozen=True, gc=False):
    """The chosen worker and a sentence why. prefill_tokens: what it must do before the first token, in computed tokens.
    best_hit_tokens: the longest hit of all workers compared; lost: why the chosen one has less, empty if it does not.
    comparison: of the workers, None where it is not kept. all_saturated: every worker was saturated. prefill: the
    worker that computes the prompt and hands it over, None where the chosen one does that itself; alone_tokens: what
    prefill_tokens would be then. expected: what the prompts ahead add to the hit."""

    hit: Hit
    url: str | None
    reason: str
    comparison: Comparison | None = None
    prefill_tokens: int = 0
    queued_tokens: int = 0
    best_hit_tokens: int = 0
    lost: str = ""
    all_saturated: bool = False
    prefill: Choice | None = None
    alone_tokens: int = 0
    expected: ExpectedReuse | None = None

    @property
    def expected_tokens(self) -> int:
        """The reuse expected of the chosen worker, never below its hit."""
        return self.hit.disk if self.expected is None else self.expected.tokens

    @property
    def candidates(self) -> list[Candidate]:
        """The workers compared, best first; none where they are not kept."""
        return [] if self.comparison is None else self.comparison.candidates()

    def alone(self) -> Choice:
        """The same without the other workers, which take memory."""
        there = self.prefill and self.prefill.alone()
        return msgspec.structs.replace(self, comparison=None, prefill=there)


def choose(hits: Sequence[Hit], scene: ChoiceContext, rng: Random) -> Choice:
    """One of `hits`, which must not be empty; its url is left to the caller."""
    longest = max([hit.disk for hit in hits])
    found = weigh(hits, scene, longest)
    skipped = found.skipped
    chosen = _pick(hits, found, skipped, scene, rng)
    hit = hits[chosen]
    best = chosen if hit.disk == longest else next(i for i, other in enumerate(hits) if other.disk == longest)
    lost = "" if best == chosen else _loss(hits, best, chosen, skipped, scene)
    return Choice(
        hit,
        None,
        _reason(hits, found, best, chosen, lost, scene),
        Comparison(hits, found, chosen, scene.pending),
        int(found.terms[chosen][0] + 0.5),
        int(found.terms[chosen][1] + 0.5),
        longest,
        lost,
        len(found.saturated) == len(hits),
    )


def _pick(hits: Sequence[Hit], found: Costs, skipped: set[int], scene: ChoiceContext, rng: Random) -> int:
    """Return the place of the chosen one."""
    costs, loads = found.costs, found.loads
    if not skipped:
        return scene.policy.pick(PolicyInput(hits, costs, loads, scene.num_tokens, scene.turn), rng)
    free = [i for i in range(len(hits)) if i not in skipped]
    contest = PolicyInput(
        [hits[i] for i in free], [costs[i] for i in free], [loads[i] for i in free], scene.num_tokens, scene.turn
    )
    return free[scene.policy.pick(contest, rng)]


def _loss(hits: Sequence[Hit], best: int, chosen: int, skipped: set[int], scene: ChoiceContext) -> str:
    if best in skipped:
        return LOAD
    if scene.policy is not LEAST_COST:
        return TEMPERATURE if scene.policy.softened else POLICY
    worker = hits[chosen].worker
    longest = hits[best].disk
    idle = weigh((hits[best], hits[chosen]), scene, longest, idle=True)
    there, here = idle.costs
    if hits[best].worker in scene.weights.slowness or there <= here:
        return LOAD
    if there - idle.memory_tokens(0) <= here - idle.memory_tokens(1):
        return MEMORY
    if worker in scene.pending or (scene.session is not None and scene.session.worker == worker):
        return AFFINITY
    if hits[chosen].full_attention > longest:
        return AFFINITY
    return TIER


def _reason(hits: Sequence[Hit], found: Costs, best: int, chosen: int, lost: str, scene: ChoiceContext) -> str:
    hit, num_tokens = hits[chosen], scene.num_tokens
    if hit.disk == 0:
        text = f"no worker holds a reusable prefix of the {num_tokens} tokens"
        if hits[best].disk:
            text = f"computes all {num_tokens} tokens"
    elif hit.approximate:
        text = f"approximate: {hit.disk} of {num_tokens} tokens were sent there before"
    else:
        tiers = [f"{hit.gpu} on the GPU"]
        if hit.cpu > hit.gpu:
            tiers.append(f"{hit.cpu - hit.gpu} more from the CPU tier")
        if hit.disk > hit.cpu:
            tiers.append(f"{hit.disk - hit.cpu} more from storage")
        text = f"reuses {hit.disk} of {num_tokens} tokens ({', '.join(tiers)})"
    if (coming := scene.pending.get(hit.worker, 0)) > hit.disk:
        text += f"; {coming} tokens of it are being computed there"
    if lost:
        other = hits[best]
        why = _but(lost, best, found)
        text += f"; {printable(other.worker.route_name)} would reuse {other.disk}, but {why}"
    elif scene.policy.name == KV:
        text += _among(hits, found, chosen)
    if scene.key_share is not None:
        text += f"; its API key holds {scene.key_share.excess:.1f} times its fair part of the memory"
    return f"{text}; all workers are saturated" if len(found.saturated) == len(hits) else text


def _but(lost: str, best: int, found: Costs) -> str:
    if best in found.skipped:
        return "it is saturated"
    if lost == LOAD:
        return f"has {found.loads[best]} tokens of load"
    if lost == AFFINITY:
        return "the session, or a prompt with the same beginning, was here"
    if lost == TEMPERATURE:
        return "the choice was made by temperature sampling"
    if lost == MEMORY:
        return "what the prompt pushes out of its cache is worth more"
    if lost == TIER:
        return "would load them back more slowly than they are computed"
    return "the policy is not kv"


def _among(hits: Sequence[Hit], found: Costs, chosen: int) -> str:
    """Who else could as well have been chosen; where the load alone was different, that it decided."""
    costs, loads, skipped = found.costs, found.loads, found.skipped
    hit, cost, tokens = hits[chosen], costs[chosen], hits[chosen].disk
    alike = [i for i, other in enumerate(hits) if other.disk == tokens]
    if len(alike) == 1:
        return ""
    equal = [i for i in alike if (hits[i].gpu, hits[i].cpu) == (hit.gpu, hit.cpu)]
    ties = sum(costs[i] == cost and i not in skipped for i in equal)
    text = f"; chosen at random among {ties} equals" if ties > 1 else ""
    if len(equal) > ties and any(loads[i] > loads[chosen] for i in equal):
        text = f"; the least loaded of {len(equal)} that reuse as much{text}"
    return text
