# SPDX-License-Identifier: Apache-2.0
"""The cost of a prompt at a worker: one number in tokens; the lowest wins. Pure.

    cost = slowness * (prefill + queued) + decode + delay + room - copy - junction - session

The cost of a prompt is the work that it needs and waits for, the work that it makes others wait for, and the blocks
that it pushes out of memory, less the savings of later prompts by its copy of a popular beginning.

- prefill: the worker's work on this prompt before its first token, in tokens computed in the same time. Where fetching
  blocks from another worker costs less than computing them, it is the price of the fetch (`pull_prices.py`).
- queued: the same for all prompts ahead of it there, minus the computed part of the current one.
- decode: the time that running sequences take from prefill.
- delay: how much longer later prompts wait, by the measured load of the fleet.
- room: the blocks of the worker's cache that the prompt's blocks push out (`cache_writes.py`); more where an API key
  that holds more than its fair part would push out the blocks of others (`key_shares.py`).
- copy: the savings of later prompts by a copy of a beginning that others share, as far as the workers that hold it have
  a queue.
- junction: a bonus for the worker that will keep a checkpoint where the prompt diverges from the blocks that it holds.
- session: a bonus for the worker that has the session.

Invariants: a cost is a whole number, so equal costs are equal, and ties are real. A worker that is no worse than
another one in any respect costs no more. Compiled, see `setup.py`: a call in C has no keyword-only arguments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import floor
from typing import TypeAlias

import msgspec

from kvrouter.contract.choices import CostTerms
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.index.matching.cache_writes import ModelWrites
from kvrouter.router.index.matching.pull import Pull
from kvrouter.router.index.matching.question import Hit
from kvrouter.router.route.load.key_shares import KeyShare
from kvrouter.router.route.load.load_table import WorkerLoad
from kvrouter.router.route.load.session_affinity import SessionPlace
from kvrouter.router.route.load.worker_load import Correction, LoadModel
from kvrouter.router.route.placement.copies import NO_COPIES, Copies
from kvrouter.router.route.placement.lenders import Lenders
from kvrouter.router.route.placement.policies import LEAST_COST, Policy
from kvrouter.router.route.placement.pull_prices import PullPrices

# The cost that each context token of the sequences running at a worker adds to a new prompt, in tokens of prefill. The
# prompt's chunks share their steps with the running sequences. A sequence of some thousand tokens takes 0.2 to 0.4 ms
# of a step (simulator/engine/timing.py), as much as 4 to 6 tokens of prefill, in each of the one to three steps of a
# prompt. A higher value lengthens the queues of other workers (benchmarks/results/2026-choosing.md).
DECODE_TOKEN_COST = 0.001

# A worker may hold a hybrid model's blocks of full attention beyond the last point where a prompt can resume, because
# windows or states were not kept there. Where such a prompt diverges from those blocks, vLLM keeps a checkpoint (a
# junction), and the next prompt with the same beginning resumes there. So a prompt that is computed at this worker
# creates reuse worth nearly as much as a hit. This share of the tokens up to the junction that cannot be reused yet is
# subtracted from the worker's cost. It is below 1, so that of two equal lengths the actual hit wins. With 0.25 even a
# short queue outweighs most of the bonus; benchmarks/results/2026-choosing.md has the effect.
JUNCTION_SHARE = 0.9

# Computing a prompt delays all later ones and evicts blocks that they might have reused. By queueing theory (one
# server, first come first served, random arrivals, mean work m, load r), work x behind queued work q makes all later
# prompts together wait r / (1 - r) * x * (2 * q + x) / (2 * m) longer; at r = 0.5 the first factor is 1. A second copy
# of a prefix evicts another one, and computing that again costs more than the wait; how much depends on the workload.
# From a sweep from 0 to 16 (benchmarks/results/2026-choosing.md): up to this value reuse grows and first tokens come as
# soon, or sooner under load; beyond it they come later.
DELAY_WEIGHT = 8.0

# A block that is pushed out and computed again pushes out another one. If it comes back with probability p, pushing it
# out costs as much as p / (1 - p) blocks: 2 at p = 2/3. Where all pools are written alike, half of this weight remains.
ROOM_WEIGHT = 4.0

# The session bonus: a share of the tokens that the session's worker would have to compute. It is never a rule. If the
# worker's cache is known, the hit already contains the session's value, and the bonus only decides near ties. If the
# cache is unknown (text that was not tokenized, a worker without events), the session's last prompt is most likely
# still there.
SESSION_SHARE_KNOWN = 0.05
SESSION_SHARE_BLIND = 0.5

_NO_LOAD = WorkerLoad()


NO_WRITES = ModelWrites()


class ChoiceContext(msgspec.Struct, frozen=True, gc=False):
    """The input of a choice besides the hits."""

    num_tokens: int
    weights: LoadModel
    # Tokens of the prompt's beginning that each worker is computing.
    pending: Mapping[WorkerKey, int] = {}
    session: SessionPlace | None = None
    policy: Policy = LEAST_COST
    # How many prompts of this model were placed before.
    turn: int = 0
    # Whether the prompt's tokens are unknown, so that hits say nothing.
    blind: bool = False
    # The current time on the clock of the load.
    now: float = 0.0
    # The blocks that were stored lately in the workers' caches.
    writes: ModelWrites = NO_WRITES
    copies: Copies = NO_COPIES
    # The share of time in which a worker computes prompts, below 1 (`busy_share.py`).
    busy: float = 0.5
    # The part of the memory that the prompt's API key holds, None if that is no more than its fair part.
    key_share: KeyShare | None = None
    # The number of prompts that are placed together; hits and `num_tokens` are their sums.
    num_prompts: int = 1
    # The workers that lend blocks, None if nothing may be fetched for this prompt; and workers at which the request failed
    # before, from which nothing is fetched.
    lenders: Lenders | None = None
    failed: frozenset[WorkerKey] = frozenset()


class Candidate(msgspec.Struct, frozen=True):
    """One worker in a choice."""

    hit: Hit
    # The sum of `parts`.
    cost: int
    # The part of the cost that is the work of other requests.
    load: int
    parts: CostTerms
    saturated: bool
    # Tokens of the prompt that the worker is computing now.
    pending: int
    # The blocks that the worker would fetch, or None if it would not.
    pull: Pull | None = None


# Tokens for one worker: first the work that the prompt needs and the work queued before it, both by a worker of usual
# speed; then the terms of the cost: prefill, queued, decode, delay, room, copy, junction, session.
Terms = tuple[float, float, float, float, float, float, float, float, float, float]


# The blocks that a worker would fetch, and the part of its prefill in which it only waits for them.
PricedPull: TypeAlias = tuple[Pull, float]
NO_PULL: tuple[None, float] = (None, 0.0)
NO_PULLS: Mapping[int, PricedPull] = {}


class Costs(msgspec.Struct, frozen=True, gc=False):
    """The costs of a prompt at the workers of all hits, in tokens; each list is in the order of the hits."""

    # The sum of each worker's terms.
    totals: list[int]
    # The part of each cost that is the work of other requests there.
    loads: list[int]
    terms: list[Terms]
    # The places, among the hits, of saturated workers.
    saturated: set[int]
    # The pulls of the workers for which fetching costs less than computing, by their places among the hits.
    pulls: Mapping[int, PricedPull] = NO_PULLS

    @property
    def skipped(self) -> set[int]:
        """The places of the saturated workers that get no prompt.

        A saturated worker is skipped if another worker is not saturated and has at most as much load. Without this
        condition, a restarted worker got all prompts, whatever its queue.
        """
        saturated, loads = self.saturated, self.loads
        if not saturated or len(saturated) == len(loads):
            return set()
        least = min(load for i, load in enumerate(loads) if i not in saturated)
        return {i for i in saturated if loads[i] >= least}

    def memory_tokens(self, i: int) -> float:
        """Return the part of the cost at this place that depends on the worker's memory."""
        return self.terms[i][6] - self.terms[i][7]

    def candidate(self, i: int, hit: Hit, pending_tokens: int) -> Candidate:
        """Return the worker at this place as a candidate; `hit` is its hit."""
        parts = CostTerms(*map(round, self.terms[i][2:]))
        pull, _ = self.pulls.get(i, NO_PULL)
        return Candidate(hit, self.totals[i], parts.load, parts, i in self.saturated, pending_tokens, pull)

    def computed_tokens(self, i: int) -> int:
        """Return the worker's own work on the prompt at this place, without the time in which it waits for blocks."""
        _, transfer_tokens = self.pulls.get(i, NO_PULL)
        return int(self.terms[i][0] - transfer_tokens + 0.5)


def weigh(
    hits: Sequence[Hit],
    context: ChoiceContext,
    longest: int,
    idle: bool = False,
) -> Costs:
    """Return the cost of each hit's worker.

    Args:
        hits: A hit for each worker.
        context: Everything else that counts.
        longest: The longest hit of all workers, in tokens.
        idle: Whether to ignore all other work, as if the fleet were idle.
    """
    weights, num_tokens, pending, session = context.weights, context.num_tokens, context.pending, context.session
    loads, corrections = ({}, {}) if idle else (weights.table.loads, weights.corrections)
    slow, token_costs = weights.slowness, weights.token_costs
    deepest = len(token_costs) - 1
    # In M/G/1, the value of a queue with u tokens of work is r / (1 - r) * u * u / (2 * m); `delay` is the difference
    # that a prompt makes to it.
    delay_share = DELAY_WEIGHT * context.busy / (1 - context.busy) / (2 * weights.usual_prefill_tokens)
    pressures, mean_pressure = context.writes.pressures()
    copies, key_share = context.copies, context.key_share
    # The part of the prompt's beginning that other prompts share and that one of these workers holds or computes.
    shared = min(copies.depth_tokens, longest)
    if pending and shared < copies.depth_tokens:
        computed = max([pending.get(hit.worker, 0) for hit in hits])
        shared = min(copies.depth_tokens, max(longest, computed))
    shared_copy = copies.of(shared) if shared else 0.0
    queues, saturated = _queues(hits, context, loads, corrections)
    lenders = context.lenders
    prices: PullPrices | None = None
    pulls: dict[int, PricedPull] = {}
    relief = -1.0
    costs: list[int] = []
    burdens: list[int] = []
    terms: list[Terms] = []
    # One loop: a call for each of some hundred workers would be half of the time of a choice.
    for i, hit in enumerate(hits):
        worker = hit.worker
        usual_queued, decode = queues[i]
        by_tier = hit.by_tier
        on_gpu, reached = by_tier[0], by_tier[deepest]
        prefill: float = num_tokens - reached
        new = num_tokens - on_gpu
        loading = 0.0
        if reached != on_gpu:
            for t in range(deepest):
                loading += (by_tier[t + 1] - by_tier[t]) * token_costs[t + 1]
            prefill += loading
        if pending and (coming := pending.get(worker, 0)):
            prefill = min(prefill, num_tokens - coming)
            new = min(new, num_tokens - coming)
            reached = max(reached, coming)
        burdens.append(int(usual_queued + decode + 0.5))
        slowness = slow.get(worker, 1.0) if slow else 1.0
        work, queued = slowness * prefill, slowness * usual_queued
        pull: Pull | None = None
        if lenders is not None and hit.pulls:
            if prices is None:
                prices = PullPrices(lenders, weights, context.failed, worker.model, num_tokens, idle)
            pull = prices.cheapest(hit.pulls, worker, by_tier[deepest], prefill, loading, slowness)
            if pull is not None:
                pulls[i] = (pull, prices.transfer_tokens)
                prefill = prices.prefill_tokens
                work = slowness * prefill
        junction = 0.0
        if hit.full_attention > longest:
            # The tokens that a checkpoint there would add to the reuse of the next prompt with this beginning. Blocks that
            # are fetched add no less.
            junction = (hit.full_attention - longest) * JUNCTION_SHARE
        # A checkpoint and a copy are investments: work that they save later prompts does not make them wait.
        copy, lasting = 0.0, work - junction
        if shared_copy and reached < shared:
            saved = slowness * (shared_copy - copies.of(reached) if reached else shared_copy)
            if pull is not None and prices is not None:
                saved = _fetched_saving(saved, pull.tokens, prices.token_cost, copies, reached, shared, slowness)
            if relief < 0:
                relief = _shortest_queue(hits, queues, context, shared - copies.piece_tokens)
            # While a worker that has all of the shared part is idle, later prompts are better off there.
            copy = saved * relief / (relief + work)
            lasting -= saved
        if lasting < 0:
            lasting = 0.0
        delay = delay_share * lasting * (2 * queued + lasting)
        # The cache of a worker without events is unknown. It counts as full as the others', or the worker would get
        # every new prompt.
        room = 0.0
        if mean_pressure:
            room = ROOM_WEIGHT * new * (mean_pressure if hit.approximate else pressures.get(worker, 0.0))
            if key_share is not None:
                room *= key_share.price(worker)
        bonus = 0.0
        if session is not None and session.worker == worker:
            # A worker without credit, or with a guess for a hit, may hold anything.
            known = not (context.blind or hit.reason or hit.approximate)
            bonus = min(session.tokens, prefill) * (SESSION_SHARE_KNOWN if known else SESSION_SHARE_BLIND)
        costs.append(floor(work + queued + decode + delay + room - copy - junction - bonus + 0.5))
        terms.append((prefill, usual_queued, work, queued, decode, delay, room, copy, junction, bonus))
    return Costs(costs, burdens, terms, saturated, pulls or NO_PULLS)


def _fetched_saving(
    saved: float, fetched: int, token_cost: float, copies: Copies, reached: int, shared: int, slowness: float
) -> float:
    """Return the saving of a copy that the worker fetches: later prompts could fetch it too, and save that price alone.

    Args:
        saved: The saving of the copy if later prompts had to compute it.
        fetched: The tokens of the prompt that the worker has after the pull.
        token_cost: The price of a fetched token.
        copies: The savings of copies.
        reached: The tokens of the prompt that the worker has.
        shared: The tokens of the prompt that others share.
        slowness: How many times longer than usual the worker takes for a token.
    """
    if fetched >= shared:
        return saved * token_cost
    if fetched <= reached:
        return saved
    return saved - slowness * (copies.of(fetched) - copies.of(reached)) * (1.0 - token_cost)


def _queues(
    hits: Sequence[Hit],
    context: ChoiceContext,
    loads: Mapping[WorkerKey, WorkerLoad],
    corrections: Mapping[WorkerKey, Correction],
) -> tuple[list[tuple[float, float]], set[int]]:
    """Return the work that waits at each hit's worker, and the places of the saturated workers.

    The work has two parts, both in tokens at the usual speed: the queued tokens, less the computed part of the prompt
    under way, and the cost of decoding.
    """
    weights, limit = context.weights, context.weights.saturation_tokens
    queues: list[tuple[float, float]] = []
    saturated: set[int] = set()
    for i, hit in enumerate(hits):
        worker = hit.worker
        load = loads.get(worker, _NO_LOAD)
        queued: float = load.prefill_tokens
        decode: float = load.decode_tokens
        if corrections and (correction := corrections.get(worker)) is not None:
            queued += correction.foreign_prefill_tokens
            decode += correction.foreign_decode_tokens
            # A call for each worker would take a tenth of the time of a choice.
            if (queued > limit or correction.is_full) and weights.is_saturated(int(queued), correction):
                saturated.add(i)
        elif queued > limit:
            saturated.add(i)
        if load.prefill_tokens and weights.rates:
            queued -= weights.progress_tokens(worker, load, context.now)
        queues.append((queued, decode * DECODE_TOKEN_COST))
    return queues, saturated


def _shortest_queue(
    hits: Sequence[Hit], queues: Sequence[tuple[float, float]], context: ChoiceContext, beyond: int
) -> float:
    """Return the least work in tokens that waits at a worker with a long enough part of the prompt.

    These are the workers that hold or compute more than `beyond` tokens of it; 0 if there are none.
    """
    pending, slow = context.pending, context.weights.slowness
    deepest = len(context.weights.token_costs) - 1
    return min(
        [
            (queued + decode) * slow.get(hit.worker, 1.0)
            for hit, (queued, decode) in zip(hits, queues, strict=True)
            if hit.by_tier[deepest] > beyond or pending.get(hit.worker, 0) > beyond
        ],
        default=0.0,
    )
