# SPDX-License-Identifier: Apache-2.0
"""Which worker takes a prompt: the one whom it costs least (`cost.py`), and why. Pure: hits and load in, choice out.

The best worker's affinity ends where it is saturated: as long as another one is not, the prompt goes there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random

import msgspec

from kvrouter.router.common.escaping import printable
from kvrouter.router.common.ids import WorkerKey
from kvrouter.router.load.load_table import WorkerLoad
from kvrouter.router.load.session_affinity import SessionPlace
from kvrouter.router.load.worker_load import LoadModel
from kvrouter.router.matching.question import Hit
from kvrouter.router.placement.cost import (
    DECODE_TOKEN_COST,
    DELAY_WEIGHT,
    JUNCTION_SHARE,
    CostTerms,
    delay_tokens,
    junction_tokens,
    prefill_tokens,
    session_bonus,
)
from kvrouter.router.placement.policies import KV, LEAST_COST, Policy, PolicyInput

# Why the chosen worker reuses less of the prompt than the best one would.
EXCLUSION = "exclusion"  # the client left it out, or pinned another
STATE = "state"  # it takes nothing now: down, draining, circuit breaker open
LOAD = "load"  # too much is queued or decoded there, or it is slow
AFFINITY = "affinity"  # the session, or a prompt that begins alike, was elsewhere
TEMPERATURE = "temperature"
POLICY = "policy"  # another policy than kv
TIER = "tier"  # loading it back would take longer than computing it elsewhere

_NO_LOAD = WorkerLoad()


class Candidate(msgspec.Struct, frozen=True):
    """One worker in a choice. cost: the sum of `parts`; load: what of it is others' work; pending: tokens of the prompt
    that are just being computed there."""

    hit: Hit
    cost: int
    load: int = 0
    parts: CostTerms = CostTerms(0, 0, 0, 0, 0, 0)
    saturated: bool = False
    pending: int = 0


class ChoiceContext(msgspec.Struct, frozen=True):
    """What counts besides the hits. now: by the clock of the load; turn: prompts of this model that were placed before;
    blind: the prompt's tokens are not known, so hits say nothing."""

    num_tokens: int
    weights: LoadModel
    pending: Mapping[WorkerKey, int] = {}
    session: SessionPlace | None = None
    policy: Policy = LEAST_COST
    turn: int = 0
    blind: bool = False
    now: float = 0.0


class Choice(msgspec.Struct, frozen=True):
    """The chosen worker and a sentence why. prefill_tokens: what it must do before the first token, in computed tokens.
    best_hit_tokens: the longest hit among all that were compared; lost: why the chosen one has less, empty when it has
    not. candidates: what was compared, best first, where it was asked for. all_saturated: no worker should have taken
    it. prefill: the worker that computes the prompt and hands it over, None where the chosen one does that itself;
    alone_tokens: what prefill_tokens would be then."""

    hit: Hit
    url: str | None
    reason: str
    candidates: tuple[Candidate, ...]
    prefill_tokens: int = 0
    queued_tokens: int = 0
    best_hit_tokens: int = 0
    lost: str = ""
    all_saturated: bool = False
    prefill: Choice | None = None
    alone_tokens: int = 0


def choose(hits: Sequence[Hit], scene: ChoiceContext, rng: Random, *, explain: bool = False) -> Choice:
    """One of `hits`, which must not be empty; its url is left to the caller."""
    weights, num_tokens = scene.weights, scene.num_tokens
    loads, corrections, slow = weights.table.loads, weights.corrections, weights.slowness
    limit, tiers, pending, session = weights.saturation_tokens, weights.tiers, scene.pending, scene.session
    cpu_cost, disk_cost = tiers.cpu, tiers.disk
    delay_share = DELAY_WEIGHT / (2 * weights.usual_prefill_tokens)
    costs: list[int] = []
    burdens: list[int] = []
    saturated: set[int] = set()
    longest = max([hit.disk for hit in hits])
    # `weigh` in one loop: a call for each of some hundred workers would be half of the time of a choice.
    for i, hit in enumerate(hits):
        worker = hit.worker
        load = loads.get(worker, _NO_LOAD)
        queued: float = load.prefill_tokens
        decode = load.decode_tokens
        if corrections and (correction := corrections.get(worker)) is not None:
            queued += correction.foreign_prefill_tokens
            decode += correction.foreign_decode_tokens
            if weights.is_saturated(int(queued), correction):
                saturated.add(i)
        elif queued > limit:
            saturated.add(i)
        if load.prefill_tokens:
            queued -= weights.progress_tokens(worker, load, scene.now)
        burden = queued + decode * DECODE_TOKEN_COST
        disk = hit.disk
        prefill: float = num_tokens - disk
        if disk != hit.gpu:
            prefill += (hit.cpu - hit.gpu) * cpu_cost + (disk - hit.cpu) * disk_cost
        if pending and worker in pending:
            prefill = min(prefill, num_tokens - pending[worker])
        work = prefill
        if slow and worker in slow:
            work, queued = slow[worker] * work, slow[worker] * queued
        cost = work + queued + decode * DECODE_TOKEN_COST + delay_share * work * (2 * queued + work)
        if hit.full_attention > longest:
            cost -= (hit.full_attention - longest) * JUNCTION_SHARE
        if session is not None and session.worker == worker:
            cost -= session_bonus(session.tokens, prefill, _is_known(hit, scene))
        costs.append(int(cost + 0.5))
        burdens.append(int(burden + 0.5))
    chosen, free = _pick(hits, costs, burdens, saturated, scene, rng)
    hit = hits[chosen]
    best = chosen if hit.disk == longest else next(i for i, other in enumerate(hits) if other.disk == longest)
    lost = "" if best == chosen else _loss(hits, best, chosen, saturated, scene)
    return Choice(
        hit,
        None,
        _reason(hits, costs, burdens, best, chosen, lost, saturated, scene),
        _candidates(hits, scene, longest, chosen) if explain else (),
        int(prefill_tokens(hit, num_tokens, pending.get(hit.worker, 0), tiers) + 0.5),
        int(_queued_tokens(hit.worker, scene) + 0.5),
        longest,
        lost,
        not free,
    )


def _pick(
    hits: Sequence[Hit], costs: list[int], burdens: list[int], saturated: set[int], scene: ChoiceContext, rng: Random
) -> tuple[int, int]:
    """The chosen one, and how many were not saturated."""
    if not saturated or len(saturated) == len(hits):
        return scene.policy.pick(PolicyInput(hits, costs, burdens, scene.num_tokens, scene.turn), rng), len(hits) - len(
            saturated
        )
    free = [i for i in range(len(hits)) if i not in saturated]
    contest = PolicyInput(
        [hits[i] for i in free], [costs[i] for i in free], [burdens[i] for i in free], scene.num_tokens, scene.turn
    )
    return free[scene.policy.pick(contest, rng)], len(free)


def weigh(hit: Hit, scene: ChoiceContext, longest: int) -> Candidate:
    """One worker's cost with its parts, as `choose` has it. longest: hit of all that are compared."""
    weights, worker = scene.weights, hit.worker
    burden = weights.burden(worker)
    pending = scene.pending.get(worker, 0)
    factor = weights.slowness.get(worker, 1.0)
    prefill = prefill_tokens(hit, scene.num_tokens, pending, weights.tiers)
    queued = factor * _queued_tokens(worker, scene)
    decode = burden.decode_tokens * DECODE_TOKEN_COST
    bonus = 0.0
    if scene.session is not None and scene.session.worker == worker:
        bonus = session_bonus(scene.session.tokens, prefill, _is_known(hit, scene))
    junction = junction_tokens(hit, longest) * JUNCTION_SHARE
    work = factor * prefill
    delay = delay_tokens(work, queued, weights.usual_prefill_tokens)
    parts = CostTerms(round(work), round(queued), round(decode), round(delay), round(junction), round(bonus))
    cost = work + queued + decode + delay - junction - bonus
    return Candidate(hit, int(cost + 0.5), parts.load, parts, burden.saturated, pending)


def _idle_cost(hit: Hit, scene: ChoiceContext, longest: int) -> float:
    """What it would cost if nothing else were to be done there."""
    parts = weigh(hit, scene, longest).parts
    alone = delay_tokens(parts.prefill, 0.0, scene.weights.usual_prefill_tokens)
    return parts.prefill + alone - parts.junction - parts.session


def _queued_tokens(worker: WorkerKey, scene: ChoiceContext) -> float:
    """What is queued there now, without what is computed of the prompt under way."""
    weights = scene.weights
    load = weights.table.loads.get(worker)
    progress = weights.progress_tokens(worker, load, scene.now) if load is not None and load.prefill_tokens else 0.0
    return weights.burden(worker).queued_tokens - progress


def _candidates(hits: Sequence[Hit], scene: ChoiceContext, longest: int, chosen: int) -> tuple[Candidate, ...]:
    """The chosen one first, as it is the best whatever chance or another policy said."""
    first = weigh(hits[chosen], scene, longest)
    rest = [weigh(hit, scene, longest) for i, hit in enumerate(hits) if i != chosen]
    rest.sort(key=lambda c: (c.saturated, c.cost, -c.hit.gpu, -c.hit.cpu))
    return (first, *rest)


def _is_known(hit: Hit, scene: ChoiceContext) -> bool:
    """Whether the hit says what the worker holds: a worker without credit, or one that is guessed at, may hold
    anything."""
    return not (scene.blind or hit.reason or hit.approximate)


def _loss(hits: Sequence[Hit], best: int, chosen: int, saturated: set[int], scene: ChoiceContext) -> str:
    if best in saturated and chosen not in saturated:
        return LOAD
    if scene.policy is not LEAST_COST:
        return TEMPERATURE if scene.policy.softened else POLICY
    worker = hits[chosen].worker
    longest = hits[best].disk
    slow = hits[best].worker in scene.weights.slowness
    if slow or _idle_cost(hits[best], scene, longest) <= _idle_cost(hits[chosen], scene, longest):
        return LOAD
    if worker in scene.pending or (scene.session is not None and scene.session.worker == worker):
        return AFFINITY
    if junction_tokens(hits[chosen], hits[best].disk):
        return AFFINITY
    return TIER


def _reason(
    hits: Sequence[Hit],
    costs: Sequence[int],
    burdens: Sequence[int],
    best: int,
    chosen: int,
    lost: str,
    saturated: set[int],
    scene: ChoiceContext,
) -> str:
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
        text += f"; {coming} tokens of it are just being computed there"
    if lost:
        other = hits[best]
        why = _but(lost, other, best, burdens, saturated)
        text += f"; {printable(other.worker.route_name)} would reuse {other.disk}, but {why}"
    elif scene.policy.name == KV:
        text += _among(hits, costs, burdens, chosen, saturated)
    return f"{text}; all workers are saturated" if len(saturated) == len(hits) else text


def _but(lost: str, other: Hit, best: int, burdens: Sequence[int], saturated: set[int]) -> str:
    if best in saturated:
        return "it is saturated"
    if lost == LOAD:
        return f"has {burdens[best]} tokens of load"
    if lost == AFFINITY:
        return "the session, or a prompt that begins alike, was here"
    if lost == TEMPERATURE:
        return "the choice was made by temperature sampling"
    if lost == TIER:
        return "would load them back more slowly than they are computed"
    return "the policy is another than kv"


def _among(hits: Sequence[Hit], costs: Sequence[int], burdens: Sequence[int], chosen: int, saturated: set[int]) -> str:
    """Who else could as well have been chosen; where the load alone was different, that it decided."""
    hit, cost, tokens = hits[chosen], costs[chosen], hits[chosen].disk
    alike = [i for i, other in enumerate(hits) if other.disk == tokens]
    if len(alike) == 1:
        return ""
    equal = [i for i in alike if (hits[i].gpu, hits[i].cpu) == (hit.gpu, hit.cpu)]
    ties = sum(costs[i] == cost and (i in saturated) == (chosen in saturated) for i in equal)
    text = f"; chosen at random among {ties} equals" if ties > 1 else ""
    if len(equal) > ties and any(burdens[i] > burdens[chosen] for i in equal):
        text = f"; the least loaded of {len(equal)} that reuse as much{text}"
    return text
