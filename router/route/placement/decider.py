# SPDX-License-Identifier: Apache-2.0
"""The decision where a prompt goes, from hits, load, pending prefixes and the workers' availability.

Synchronous, no I/O, for one asyncio loop. Everything that decides is pure (`candidates.py`, `choose.py`,
`prefill_split.py`); this joins it with the fleet and remembers what went where. Nothing is reserved here.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import msgspec
import numpy as np

from kvrouter.router.base.common.errors import RouterError
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.index.matching.cache_writes import ModelWrites
from kvrouter.router.index.matching.question import Hit, Question
from kvrouter.router.model.config.settings import Config
from kvrouter.router.model.kvcache.resume_rule import ResumeRule
from kvrouter.router.route.load.busy_share import BusyShare
from kvrouter.router.route.load.key_shares import KeyShares
from kvrouter.router.route.load.pending_prefixes import (
    PENDING_TTL_S,
    SELECTED_TTL_S,
    SETTLE_S,
    PendingPrefixes,
    names_of,
)
from kvrouter.router.route.load.prefix_popularity import PrefixPopularity
from kvrouter.router.route.load.prompts_ahead import AHEAD_TTL_S, ARRIVAL_S, PromptAhead, PromptsAhead
from kvrouter.router.route.load.session_affinity import SessionMemory
from kvrouter.router.route.load.worker_load import LoadModel
from kvrouter.router.route.placement.admission_queue import RETRY_AFTER_S
from kvrouter.router.route.placement.candidates import candidates, no_worker_error, split_by_role
from kvrouter.router.route.placement.choose import Choice, choose
from kvrouter.router.route.placement.copies import copies_of
from kvrouter.router.route.placement.cost import ChoiceContext
from kvrouter.router.route.placement.expected_reuse import ExpectedReuse, ReuseShares
from kvrouter.router.route.placement.lost_reuse import count_losses
from kvrouter.router.route.placement.placement_metrics import PlacementMetrics
from kvrouter.router.route.placement.placement_request import PlacementRequest
from kvrouter.router.route.placement.policies import policy
from kvrouter.router.route.placement.prefill_split import PrefillOutcome, SplitRules, with_prefill

NOBODY: frozenset[WorkerKey] = frozenset()


class HitSource(Protocol):
    """The part of the core that a decision needs."""

    def hits(self, question: Question) -> Sequence[Hit]:
        """Return one hit for each worker of the model. Raises UnknownModel."""
        ...

    async def hash_ahead(self, question: Question) -> None:
        """Hash a long prompt in turns, before `hits` is called. Raises UnknownModel."""

    def url(self, worker: WorkerKey) -> str | None: ...

    def sent(self, question: Question, worker: WorkerKey) -> None:
        """Note that the prompt is on its way to the worker."""

    def hash_block_size(self, model: str) -> int: ...

    def writes(self, model: str) -> ModelWrites:
        """Return what was stored lately in the GPU caches of the model's workers."""
        ...

    def state_pools(self) -> None:
        """Take the sizes of the GPU caches that engines have stated since the last call."""

    def resume_rule(self, worker: WorkerKey) -> ResumeRule | None:
        """Return where prompts can resume in what others leave there, None while that is not known."""

    def workers(self) -> Iterable[WorkerKey]: ...


class _ModelTraffic:
    """The prompts of one model that were placed so far."""

    __slots__ = ("busy", "keys", "turns")

    def __init__(self) -> None:
        self.turns = 0
        self.busy = BusyShare()
        self.keys = KeyShares()


class Decider:
    """The choice of the worker that takes a prompt, and of the one that computes it."""

    def __init__(
        self,
        fleet: HitSource,
        weights: LoadModel,
        *,
        config: Config,
        metrics: PlacementMetrics,
        rng: random.Random,
        unavailable: Callable[[WorkerKey], str | None],
        prefillers: Callable[[str], frozenset[WorkerKey]],
    ) -> None:
        """Decide for the workers of this fleet.

        Args:
            unavailable: Returns why a worker takes no requests now, None if it does.
            prefillers: Returns the workers of a model that only compute prompts.
        """
        self._fleet = fleet
        self._weights = weights
        self._metrics = metrics
        self._rng = rng
        self._unavailable = unavailable
        self._prefillers = prefillers
        self._policy = policy(config.policy, config.temperature)
        self._rules = SplitRules(config.remote_prefill_min_tokens, config.handover_token_cost)
        self._sessions = SessionMemory()
        # Prefixes that a worker is just computing, and prefixes on their way to a worker by a hand-over.
        self._pending = PendingPrefixes()
        self._arriving = PendingPrefixes()
        self._ahead = PromptsAhead()
        self._shares = ReuseShares()
        self._pending_seed = rng.getrandbits(64)
        self._popular = PrefixPopularity()
        self._models: defaultdict[str, _ModelTraffic] = defaultdict(_ModelTraffic)

    def decide(self, ask: PlacementRequest, now: float, *, anyway: bool = False) -> tuple[Choice, PromptAhead]:
        """Choose a worker. Return the choice, and the prompt in the form with which later ones are compared.

        Args:
            ask: The request.
            now: The time by the clock of the load.
            anyway: Whether to ignore the workers' roles.

        Raises:
            UnknownModel: No worker serves the model.
            UnknownWorker: The request names a worker that does not exist.
            NoWorker: No worker may take the prompt now.
        """
        question, unavailable = ask.question, self._unavailable
        everybody = self._fleet.hits(question)
        found = candidates(everybody, question, ask.pinned, unavailable)
        prefillers = NOBODY if anyway else self._prefillers(question.model)
        hits, others = split_by_role(found.hits, prefillers) if prefillers else (found.hits, [])
        if not hits:
            wanted = [hit.worker for hit in found.wanted if hit.worker in prefillers]
            raise no_worker_error(question.model, found, RETRY_AFTER_S, wanted)
        names, step_tokens = self._names(question)
        context = self._context(ask, names, step_tokens, now)
        if not prefillers:
            choice = choose(hits, context, self._rng)
            if not ask.dry_run:
                count_losses(self._metrics, choice, everybody, found.wanted)
        else:
            arriving = self._arriving.tokens(names, step_tokens, question.num_tokens, now)
            here = (
                msgspec.structs.replace(context, pending=_furthest(context.pending, arriving)) if arriving else context
            )
            choice = choose(hits, here, self._rng)
            if not ask.dry_run:
                count_losses(
                    self._metrics,
                    choice,
                    split_by_role(everybody, prefillers)[0],
                    split_by_role(found.wanted, prefillers)[0],
                )
            choice = self._with_prefill(
                ask, choice, others, context, arriving, any(hit.worker in prefillers for hit in found.wanted)
            )
        if context.key_share is not None and not ask.dry_run:
            self._metrics.over_share(question.model).inc()
        prompt = PromptAhead(question, names, self._fleet.hash_block_size(question.model))
        computes = choice if choice.prefill is None else choice.prefill
        prompt.new_tokens -= max(computes.hit.gpu, context.pending.get(computes.hit.worker, 0))
        expected = self._expected(question, choice, prompt, now)
        return msgspec.structs.replace(choice, url=self._fleet.url(choice.hit.worker), expected=expected), prompt

    def takers(self, model: str) -> list[WorkerKey]:
        """Return the workers that may take a prompt of this model now. Raises UnknownModel, and NoWorker with the reasons
        if none may."""
        question = Question(model, 1, block_hashes=np.empty(0, np.uint64))
        found = candidates(self._fleet.hits(question), question, None, self._unavailable)
        hits, others = split_by_role(found.hits, self._prefillers(model))
        if not hits:
            raise no_worker_error(model, found, RETRY_AFTER_S, [hit.worker for hit in others])
        return [hit.worker for hit in hits]

    def _names(self, question: Question) -> tuple[list[int], int]:
        return names_of(question, self._fleet.hash_block_size(question.model), self._pending_seed)

    def _context(self, ask: PlacementRequest, names: list[int], step_tokens: int, now: float) -> ChoiceContext:
        question = ask.question
        writes, traffic = self._fleet.writes(question.model), self._models[question.model]
        return ChoiceContext(
            num_tokens=question.num_tokens,
            weights=self._weights,
            pending=self._pending.tokens(names, step_tokens, question.num_tokens, now),
            session=self._sessions.find(question.model, ask.session_id, now) if ask.session_id else None,
            policy=self._policy,
            turn=traffic.turns,
            blind=question.is_blind,
            now=now,
            writes=writes,
            copies=copies_of(self._popular.counts(names), step_tokens, len(writes.workers)),
            key_share=traffic.keys.share(ask.fair_key),
            busy=traffic.busy.at_least(self._busy_now(question.model, len(writes.workers))),
        )

    def _busy_now(self, model: str, workers: int) -> float:
        """Return the share of the model's workers that compute a prompt now."""
        loads = self._weights.table.loads
        busy = sum(1 for worker, load in loads.items() if load.prefill_tokens and worker.model == model)
        return min(1.0, busy / max(1, workers))

    def _with_prefill(
        self,
        ask: PlacementRequest,
        choice: Choice,
        others: list[Hit],
        context: ChoiceContext,
        arriving: Mapping[WorkerKey, int],
        wants_any: bool,
    ) -> Choice:
        """Return the choice, with one of `others` to compute the prompt where that is worth it, and count the outcome."""
        if not ask.may_hand_over or ask.pinned is not None:
            outcome = PrefillOutcome.REQUEST
        elif others:
            choice, outcome = with_prefill(choice, others, context, self._rules, self._rng, arriving=arriving)
        else:
            outcome = PrefillOutcome.UNAVAILABLE if wants_any else PrefillOutcome.EXCLUDED
        if not ask.dry_run:
            self._metrics.prefill_decisions[outcome].inc()
        if choice.prefill is None:
            return choice
        url = self._fleet.url(choice.prefill.hit.worker)
        return msgspec.structs.replace(choice, prefill=msgspec.structs.replace(choice.prefill, url=url))

    def another_prefill(self, ask: PlacementRequest, choice: Choice, now: float) -> Choice | None:
        """Return another worker to compute the prompt for the chosen one, None where that is worth nothing."""
        question = ask.question
        try:
            found = candidates(self._fleet.hits(question), question, ask.pinned, self._unavailable)
        except RouterError:
            # It was all unregistered meanwhile.
            return None
        _, others = split_by_role(found.hits, self._prefillers(question.model))
        if not others:
            return None
        names, step_tokens = self._names(question)
        arriving = self._arriving.tokens(names, step_tokens, question.num_tokens, now)
        alone = msgspec.structs.replace(choice, prefill=None)
        context = self._context(ask, names, step_tokens, now)
        found_choice, _ = with_prefill(alone, others, context, self._rules, self._rng, arriving=arriving)
        there = found_choice.prefill
        return there and msgspec.structs.replace(there, url=self._fleet.url(there.hit.worker))

    def record_choice(
        self, ask: PlacementRequest, choice: Choice, prompt: PromptAhead, now: float, *, reserved: bool
    ) -> None:
        """Remember that the prompt goes to the chosen worker now. reserved: whether its outcome will be reported."""
        worker, names = choice.hit.worker, prompt.names
        ttl_s = PENDING_TTL_S if reserved else SELECTED_TTL_S
        self._fleet.sent(ask.question, worker)
        self._popular.placed(prompt)
        writes, traffic = self._fleet.writes(worker.model), self._models[worker.model]
        traffic.turns += 1
        computes = choice if choice.prefill is None else choice.prefill
        key = ask.fair_key
        traffic.keys.wrote(key, computes.hit.worker, prompt.new_tokens, writes.writings)
        traffic.busy.observe(self._busy_now(worker.model, len(writes.workers)), now)
        if choice.prefill is None:
            self._pending.sent(worker, names, now + ttl_s)
        else:
            there = choice.prefill.hit.worker
            traffic.keys.wrote(key, worker, ask.question.num_tokens - choice.hit.gpu, writes.writings)
            self._fleet.sent(ask.question, there)
            self._pending.sent(there, names, now + ttl_s)
            self._arriving.sent(worker, names, now + ttl_s)
        if choice.expected is not None:
            prompt.checkpoints = choice.expected.checkpoints
        self._ahead.add(computes.hit.worker, prompt, now + (AHEAD_TTL_S if reserved else SELECTED_TTL_S))
        if ask.session_id:
            self._sessions.record_choice(ask.session_id, worker, ask.question.num_tokens, now)

    # -- what is expected beside the hit

    def _expected(self, question: Question, choice: Choice, prompt: PromptAhead, now: float) -> ExpectedReuse | None:
        """Return what the chosen worker is expected to reuse, None where nothing is known beside its hit."""
        hit = choice.hit
        # A guess of a hit counts what was sent there already.
        if hit.approximate or question.without_cache or choice.prefill is not None:
            return None
        rule = self._fleet.resume_rule(hit.worker)
        if rule is None:
            return None
        coming = self._ahead.coming(hit.worker, prompt, rule, now)
        return self._shares.expect(question.model, question.num_tokens, hit.disk, hit.full_attention, coming)

    def reused(self, choice: Choice, reused_tokens: int) -> None:
        """Learn from what an engine reported of a placed prompt."""
        if choice.expected is not None:
            self._shares.learn(choice.hit.worker.model, choice.expected, reused_tokens)

    # -- what is on its way

    def mark_pending(self, worker: WorkerKey, names: list[int], now: float) -> None:
        """Note that a worker computes, or receives, the prompt with these beginnings from now on."""
        self._pending.sent(worker, names, now + PENDING_TTL_S)
        self._arriving.settle(worker, names, now)
        self._ahead.move(worker, names, now + AHEAD_TTL_S)

    def computed(self, worker: WorkerKey, names: list[int], now: float) -> None:
        """Note that a worker has computed the prompt: the engine's events take over."""
        self._pending.settle(worker, names, now + SETTLE_S)
        self._arriving.settle(worker, names, now)
        self._ahead.settle(worker, names, now + ARRIVAL_S)

    def failed(self, worker: WorkerKey, names: list[int], now: float) -> None:
        """Forget a prompt that may never have come to the worker."""
        self._pending.settle(worker, names, now)
        self._arriving.settle(worker, names, now)
        self._ahead.settle(worker, names, now)

    def expire(self, now: float) -> None:
        """Drop entries that are too old."""
        self._sessions.expire(now)
        self._pending.expire(now)
        self._ahead.expire(now)
        self._arriving.expire(now)
        workers = set(self._fleet.workers())
        models = {worker.model for worker in workers}
        for model in [model for model in self._models if model not in models]:
            del self._models[model]
        for traffic in self._models.values():
            traffic.keys.keep(workers)


def _furthest(some: Mapping[WorkerKey, int], others: Mapping[WorkerKey, int]) -> Mapping[WorkerKey, int]:
    """Return the larger value of each worker."""
    return {**some, **{worker: max(tokens, some.get(worker, 0)) for worker, tokens in others.items()}}
