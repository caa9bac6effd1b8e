# SPDX-License-Identifier: Apache-2.0
"""The cost of a prompt at a worker: one number in tokens; the lowest wins. Pure.

    cost = slowness * (prefill + queued) + decode + delay - junction - session

prefill: the worker's work on this prompt before its first token, in tokens computed in the same time. queued: the same
for all prompts ahead of it there, minus what is already computed of the current one. decode: what running sequences
take from prefill. delay: how much longer later prompts will wait. junction: a bonus for the worker that will keep a
checkpoint where the prompt diverges from what it holds. session: a bonus for the worker that has the session.
Invariants: a cost is a whole number, so equal costs are equal, and ties are real; of two workers the one that is no
worse in any respect costs no more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import floor

import msgspec

from kvrouter.router.common.ids import WorkerKey
from kvrouter.router.load.load_table import WorkerLoad
from kvrouter.router.load.session_affinity import SessionPlace
from kvrouter.router.load.worker_load import LoadModel
from kvrouter.router.matching.question import Hit
from kvrouter.router.placement.policies import LEAST_COST, Policy

# What a token of context that is being decoded costs a new prompt. Its chunks share their steps with the running
# sequences, and a sequence of some thousand tokens takes 0.2 to 0.4 ms of a step (simulator/engine/timing.py), as much
# as 4 to 6 tokens of prefill, in each of the one to three steps of a prompt. With a higher value, queues elsewhere get
# longer (docs/reference/benchmarks.md).
DECODE_TOKEN_COST = 0.001

# A worker may hold full attention's blocks of a hybrid model's prompt beyond the last point where it can be resumed,
# because windows or states were not kept there. Where such a prompt diverges, vLLM keeps a checkpoint (a junction), and
# the next prompt with this beginning resumes there: computing that part there is worth nearly as much as a hit. Below
# 1, so that of two equal lengths the actual hit wins. With 0.25 a short queue outweighs most of it;
# docs/reference/benchmarks.md has the effect.
JUNCTION_SHARE = 0.9

# Computing a prompt delays all later ones and evicts what they might have reused. By queueing theory (one server, first
# come first served, random arrivals, mean work m, load r), work x behind queued work q makes all later prompts together
# wait r / (1 - r) * x * (2 * q + x) / (2 * m) longer; at r = 0.5 the first factor is 1. A second copy of a prefix
# evicts another one, and computing that again costs more than the wait; how much depends on the workload. From a sweep
# from 0 to 16 (docs/reference/benchmarks.md): up to this value reuse grows and first tokens come as soon, or sooner
# under load; beyond it they come later.
DELAY_WEIGHT = 8.0

# A bonus, never a rule: a share of what the session's worker would have to compute. If its cache is known, the hit
# already contains the session's value, and the bonus only decides near ties. If it is unknown (text that was not
# tokenized, a worker without events), the session's last prompt is most likely still there.
SESSION_SHARE_KNOWN = 0.05
SESSION_SHARE_BLIND = 0.5

_NO_LOAD = WorkerLoad()


class ChoiceContext(msgspec.Struct, frozen=True, gc=False):
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


class CostTerms(msgspec.Struct, frozen=True):
    """The terms of one worker's cost, in tokens, each as it goes into the sum."""

    prefill: int
    queued: int
    decode: int
    delay: int
    junction: int
    session: int

    @property
    def load(self) -> int:
        return self.queued + self.decode


class Candidate(msgspec.Struct, frozen=True):
    """One worker in a choice. cost: the sum of `parts`; load: what of it is others' work; pending: tokens of the prompt
    that are just being computed there."""

    hit: Hit
    cost: int
    load: int
    parts: CostTerms
    saturated: bool
    pending: int


# Of one worker, in tokens: what the prompt needs and what is queued before it, both by a worker of usual speed; then
# the terms of its cost: prefill, queued, decode, delay, junction, session.
Terms = tuple[float, float, float, float, float, float, float, float]


class Costs(msgspec.Struct, frozen=True, gc=False):
    """Of each hit, in tokens: its worker's cost, what of it is others' work there, and how it comes about. saturated:
    places of the hits whose workers are."""

    costs: list[int]
    loads: list[int]
    terms: list[Terms]
    saturated: set[int]

    def candidate(self, i: int, hit: Hit, pending_tokens: int) -> Candidate:
        """The worker of the hit at this place."""
        parts = CostTerms(*map(round, self.terms[i][2:]))
        return Candidate(hit, self.costs[i], parts.load, parts, i in self.saturated, pending_tokens)


def weigh(
    hits: Sequence[Hit],
    scene: ChoiceContext,
    longest: int,
    *,
    idle: bool = False,
) -> Costs:
    """The cost of each hit's worker. longest: hit of all workers. idle: as if nothing else were to be done anywhere."""
    weights, num_tokens, pending, session = scene.weights, scene.num_tokens, scene.pending, scene.session
    loads, corrections = ({}, {}) if idle else (weights.table.loads, weights.corrections)
    slow, limit, cpu_cost, disk_cost = (
        weights.slowness,
        weights.saturation_tokens,
        weights.tiers.cpu,
        weights.tiers.disk,
    )
    # The relative value of the queue M/G/1 is r / (1 - r) * u * u / (2 * m) for u tokens of work in it; `delay` is the
    # difference that a prompt makes.
    delay_share = DELAY_WEIGHT / (2 * weights.usual_prefill_tokens)
    costs: list[int] = []
    burdens: list[int] = []
    terms: list[Terms] = []
    saturated: set[int] = set()
    # One loop: a call for each of some hundred workers would be half of the time of a choice.
    for i, hit in enumerate(hits):
        worker = hit.worker
        load = loads.get(worker, _NO_LOAD)
        queued: float = load.prefill_tokens
        decode: float = load.decode_tokens
        if corrections and (correction := corrections.get(worker)) is not None:
            queued += correction.foreign_prefill_tokens
            decode += correction.foreign_decode_tokens
            if weights.is_saturated(int(queued), correction):
                saturated.add(i)
        elif queued > limit:
            saturated.add(i)
        if load.prefill_tokens:
            queued -= weights.progress_tokens(worker, load, scene.now)
        decode *= DECODE_TOKEN_COST
        disk = hit.disk
        prefill: float = num_tokens - disk
        if disk != hit.gpu:
            prefill += (hit.cpu - hit.gpu) * cpu_cost + (disk - hit.cpu) * disk_cost
        if pending and worker in pending:
            prefill = min(prefill, num_tokens - pending[worker])
        burdens.append(int(queued + decode + 0.5))
        work, usual_queued = prefill, queued
        if slow and worker in slow:
            work, queued = slow[worker] * work, slow[worker] * queued
        delay = delay_share * work * (2 * queued + work)
        junction = bonus = 0.0
        if hit.full_attention > longest:
            # What a checkpoint there would add to what the next prompt with this beginning can reuse.
            junction = (hit.full_attention - longest) * JUNCTION_SHARE
        if session is not None and session.worker == worker:
            # Without credit, or with a guess for a hit, a worker may hold anything.
            known = not (scene.blind or hit.reason or hit.approximate)
            bonus = min(session.tokens, prefill) * (SESSION_SHARE_KNOWN if known else SESSION_SHARE_BLIND)
        costs.append(floor(work + queued + decode + delay - junction - bonus + 0.5))
        terms.append((prefill, usual_queued, work, queued, decode, delay, junction, bonus))
    return Costs(costs, burdens, terms, saturated)
