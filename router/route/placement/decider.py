# SPDX-License-Identifier: Apache-2.0
"""The decision which worker gets a prompt, from hits, load, pending prefixes and the workers' availability.

Synchronous, without I/O, for one asyncio loop. The rules are pure (`candidates.py`, `choose.py`, `prefill_split.py`);
this module applies them to the fleet and remembers which prompts went to which worker. It reserves nothing.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import msgspec
import numpy as np

from kvrouter.events.patch.messages import PeerAddress
from kvrouter.router.base.common.errors import RouterError
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.index.matching.cache_writes import ModelWrites
from kvrouter.router.index.matching.question import Hit, Question
from kvrouter.router.model.config.settings import Config
from kvrouter.router.model.kvcache.resume_rule import ResumeRule
from kvrouter.router.route.load.busy_share import BusyShare
from kvrouter.router.route.load.key_shares import KeyShares
from kvrouter.router.route.load.prefix_tree import (
    ARRIVING,
    COMPUTING,
    PENDING_TTL_S,
    SELECTED_TTL_S,
    SETTLE_S,
    Path,
    PrefixTree,
    PromptPrefixes,
    counts_of,
    names_of,
    settle,
    step_of,
    tokens_at,
)
from kvrouter.router.route.load.prompts_ahead import AHEAD_TTL_S, ARRIVAL_S, PromptAhead, PromptsAhead
from kvrouter.router.route.load.session_affinity import SessionMemory
from kvrouter.router.route.load.traffic_sums import TrafficSums
from kvrouter.router.route.load.worker_load import LoadModel
from kvrouter.router.route.placement.admission_queue import RETRY_AFTER_S
from kvrouter.router.route.placement.candidates import candidates, no_worker_error, split_by_role
from kvrouter.router.route.placement.choose import Choice, choose
from kvrouter.router.route.placement.copies import copies_of
from kvrouter.router.route.placement.cost import ChoiceContext
from kvrouter.router.route.placement.expected_reuse import ExpectedReuse, ReuseShares
from kvrouter.router.route.placement.lenders import Lenders
from kvrouter.router.route.placement.lost_reuse import count_losses
from kvrouter.router.route.placement.placement_metrics import PlacementMetrics
from kvrouter.router.route.placement.placement_request import PlacementRequest
from kvrouter.router.route.placement.policies import policy
from kvrouter.router.route.placement.prefill_split import PrefillOutcome, SplitRules, with_prefill

NOBODY: frozenset[WorkerKey] = frozenset()


class HitSource(Protocol):
    """The part of the router's core that a decision needs."""

    def hits(self, question: Question) -> Sequence[Hit]:
        """Return one hit for each worker of the model.

        Raises:
            UnknownModel: No worker serves the model.
        """
        ...

    async def hash_ahead(self, question: Question) -> None:
        """Hash a long prompt before `hits` is called, in short pieces between which other requests are answered.

        Raises:
            UnknownModel: No worker serves the model.
        """

    def url(self, worker: WorkerKey) -> str | None:
        """Return the URL of a worker's engine, or None if it has none or is not registered."""
        ...

    def peer(self, worker: WorkerKey) -> PeerAddress | None:
        """Return where a worker's engine lends blocks, or None if it lends none; the host is never a wildcard."""
        ...

    def sent(self, question: Question, worker: WorkerKey) -> None:
        """Note that the prompt is on its way to the worker."""

    def hash_block_size(self, model: str) -> int:
        """Return the number of tokens of a block of the model, 1 while that is not known."""
        ...

    def writes(self, model: str) -> ModelWrites:
        """Return the blocks that were stored lately in the GPU caches of the model's workers."""
        ...

    def take_pool_sizes(self) -> None:
        """Apply the sizes of GPU caches that engines have stated since the last call."""

    def resume_rule(self, worker: WorkerKey) -> ResumeRule | None:
        """Return where prompts can resume in blocks that others leave there, or None while that is not known."""

    def workers(self) -> Iterable[WorkerKey]:
        """Return all workers of all models."""
        ...


class _ModelTraffic:
    """The prompts of one model that were placed so far."""

    __slots__ = ("busy", "keys", "turns")

    def __init__(self) -> None:
        self.turns = 0
        self.busy = BusyShare()
        self.keys = KeyShares()


class Decider:
    """The decision which worker takes each prompt of a fleet, and which one computes it."""

    def __init__(
        self,
        fleet: HitSource,
        weights: LoadModel,
        *,
        config: Config,
        metrics: PlacementMetrics,
        traffic: TrafficSums,
        rng: random.Random,
        unavailable: Callable[[WorkerKey], str | None],
        prefillers: Callable[[str], frozenset[WorkerKey]],
    ) -> None:
        """Decide for the workers of this fleet.

        Args:
            fleet: Source of hits and of the workers' data.
            weights: The load and the speed of the workers.
            config: The settings of policies and hand-overs.
            metrics: The metrics of choices.
            traffic: The sums of each model's traffic.
            rng: Decides between equals.
            unavailable: Returns why a worker takes no requests now, or None if it does.
            prefillers: Returns the workers of a model that only compute prompts.
        """
        self._fleet = fleet
        self._weights = weights
        self._metrics = metrics
        self._traffic = traffic
        self._rng = rng
        self._unavailable = unavailable
        self._prefillers = prefillers
        self._policy = policy(config.policy, config.temperature)
        self._rules = SplitRules(config.remote_prefill_min_tokens, config.handover_token_cost)
        self._lenders = Lenders(fleet, weights, unavailable)
        self._declared_lenders = Lenders(fleet, weights, unavailable, declared_only=True)
        self._pulls = config.peer_pulls == "on"
        self._sessions = SessionMemory()
        self._tree = PrefixTree()
        self._ahead = PromptsAhead()
        self._shares = ReuseShares()
        self._names_seed = rng.getrandbits(64)
        self._models: defaultdict[str, _ModelTraffic] = defaultdict(_ModelTraffic)

    def apply(self, config: Config) -> None:
        """Apply the settings that can change at run time."""
        self._pulls = config.peer_pulls == "on"

    def decide(self, request: PlacementRequest, now: float, *, anyway: bool = False) -> tuple[Choice, PromptAhead]:
        """Choose a worker; return the choice, and the prompt in the form with which later prompts are compared.

        Args:
            request: The request.
            now: The current time on the clock of the load.
            anyway: Whether to ignore the workers' roles.

        Raises:
            UnknownModel: No worker serves the model.
            UnknownWorker: The request names a worker that does not exist.
            NoWorker: No worker may take the prompt now.
        """
        question, unavailable = request.question, _takes_requests if request.is_owned else self._unavailable
        everybody = self._fleet.hits(question)
        eligible = candidates(everybody, question, request.pinned, unavailable)
        prefillers = NOBODY if anyway else self._prefillers(question.model)
        hits, prefill_hits = split_by_role(eligible.hits, prefillers) if prefillers else (eligible.hits, [])
        if not hits:
            prefill_only = [hit.worker for hit in eligible.wanted if hit.worker in prefillers]
            raise no_worker_error(question.model, eligible, RETRY_AFTER_S, prefill_only)
        prefixes = self._prefixes(question)
        paths = [self._tree.find(names) for names in prefixes.prompts]
        context = self._context(request, prefixes, paths, now)
        if not prefillers:
            choice = choose(hits, context, self._rng)
            if not request.dry_run:
                count_losses(self._metrics, self._traffic, choice, everybody, eligible.wanted)
        else:
            arriving = _under_way(question, prefixes, paths, now, ARRIVING)
            decode_context = (
                msgspec.structs.replace(context, pending=_furthest(context.pending, arriving)) if arriving else context
            )
            choice = choose(hits, decode_context, self._rng)
            if not request.dry_run:
                count_losses(
                    self._metrics,
                    self._traffic,
                    choice,
                    split_by_role(everybody, prefillers)[0],
                    split_by_role(eligible.wanted, prefillers)[0],
                )
            choice = self._with_prefill(
                request,
                choice,
                prefill_hits,
                context,
                arriving,
                any(hit.worker in prefillers for hit in eligible.wanted),
            )
        if context.key_share is not None and not request.dry_run:
            self._metrics.over_share(question.model).inc()
        prompt = PromptAhead(question, prefixes, self._fleet.hash_block_size(question.model))
        computing = choice if choice.prefill is None else choice.prefill
        prompt.new_tokens -= max(computing.hit.on_gpu, context.pending.get(computing.hit.worker, 0))
        return msgspec.structs.replace(choice, url=self._fleet.url(choice.hit.worker)), prompt

    def takers(self, model: str) -> list[WorkerKey]:
        """Return the workers that may take a prompt of this model now.

        Raises:
            UnknownModel: No worker serves the model.
            NoWorker: No worker may take a prompt; the error has the reasons.
        """
        question = Question(model, 1, block_hashes=np.empty(0, np.uint64))
        eligible = candidates(self._fleet.hits(question), question, None, self._unavailable)
        hits, prefill_hits = split_by_role(eligible.hits, self._prefillers(model))
        if not hits:
            raise no_worker_error(model, eligible, RETRY_AFTER_S, [hit.worker for hit in prefill_hits])
        return [hit.worker for hit in hits]

    def _prefixes(self, question: Question) -> PromptPrefixes:
        """Return the prefixes of the prompt, or of each prompt of a list."""
        block_size = self._fleet.hash_block_size(question.model)
        parts = question.parts or (question,)
        prompts = [names_of(part, block_size, self._names_seed) for part in parts]
        return PromptPrefixes(prompts, step_of(parts[0], block_size))

    def _context(
        self, request: PlacementRequest, prefixes: PromptPrefixes, paths: Sequence[Path], now: float
    ) -> ChoiceContext:
        """Return the context of a choice for the request.

        Args:
            request: The request.
            prefixes: The prefixes of its prompts.
            paths: For each prompt, the path of its beginning in the tree.
            now: The current time.
        """
        question = request.question
        writes, traffic = self._fleet.writes(question.model), self._models[question.model]
        # The prompts of a list have no common beginning of which a copy would be worth anything.
        counts = [] if question.parts else counts_of(paths[0])
        copies = copies_of(counts, prefixes.step_tokens, len(writes.workers))
        return ChoiceContext(
            num_tokens=question.num_tokens,
            num_prompts=question.num_prompts,
            weights=self._weights,
            pending=_under_way(question, prefixes, paths, now),
            session=self._sessions.find(question.model, session, now) if (session := request.session_name) else None,
            policy=self._policy,
            turn=traffic.turns,
            blind=question.is_blind,
            now=now,
            writes=writes,
            copies=copies,
            key_share=traffic.keys.share(request.fair_key),
            busy=traffic.busy.at_least(self._busy_now(question.model, len(writes.workers))),
            lenders=self._lenders_for(request),
            failed=question.exclude_workers,
        )

    def _lenders_for(self, request: PlacementRequest) -> Lenders | None:
        """Return the workers as lenders for the request, or None if nothing may be fetched for it."""
        if not self._pulls or not _may_fetch(request):
            return None
        return self._declared_lenders if request.pulls_declared else self._lenders

    def _busy_now(self, model: str, workers: int) -> float:
        """Return the share of the model's workers that compute a prompt now."""
        loads = self._weights.table.loads
        busy = sum(1 for worker, load in loads.items() if load.prefill_tokens and worker.model == model)
        return min(1.0, busy / max(1, workers))

    def _with_prefill(
        self,
        request: PlacementRequest,
        choice: Choice,
        prefill_hits: list[Hit],
        context: ChoiceContext,
        arriving: Mapping[WorkerKey, int],
        wants_any: bool,
    ) -> Choice:
        """Add a prefill worker to the choice where that is worth it, and count the outcome.

        Args:
            request: The request.
            choice: The choice of the worker that decodes.
            prefill_hits: Hits of the prefill workers that take requests now.
            context: The context of the choice.
            arriving: Tokens of the prompt on their way to each worker by a hand-over.
            wants_any: Whether the client left any prefill worker in.
        """
        if not request.may_hand_over or request.pinned is not None or request.sequences > 1:
            outcome = PrefillOutcome.REQUEST
        elif prefill_hits:
            choice, outcome = with_prefill(choice, prefill_hits, context, self._rules, self._rng, arriving=arriving)
        else:
            outcome = PrefillOutcome.UNAVAILABLE if wants_any else PrefillOutcome.EXCLUDED
        if not request.dry_run:
            self._metrics.prefill_decisions[outcome].inc()
        if choice.prefill is None:
            return choice
        url = self._fleet.url(choice.prefill.hit.worker)
        return msgspec.structs.replace(choice, prefill=msgspec.structs.replace(choice.prefill, url=url))

    def another_prefill(self, request: PlacementRequest, choice: Choice, now: float) -> Choice | None:
        """Return another worker to compute the prompt for the chosen one, or None if none is worth it."""
        question = request.question
        try:
            eligible = candidates(self._fleet.hits(question), question, request.pinned, self._unavailable)
        except RouterError:
            # All workers of the model, or the pinned one, may have been removed since the choice.
            return None
        _, prefill_hits = split_by_role(eligible.hits, self._prefillers(question.model))
        if not prefill_hits:
            return None
        prefixes = self._prefixes(question)
        paths = [self._tree.find(names) for names in prefixes.prompts]
        arriving = _under_way(question, prefixes, paths, now, ARRIVING)
        alone = msgspec.structs.replace(choice, prefill=None)
        context = self._context(request, prefixes, paths, now)
        combined, _ = with_prefill(alone, prefill_hits, context, self._rules, self._rng, arriving=arriving)
        prefill = combined.prefill
        return prefill and msgspec.structs.replace(prefill, url=self._fleet.url(prefill.hit.worker))

    def record_choice(
        self, request: PlacementRequest, choice: Choice, prompt: PromptAhead, now: float, *, reserved: bool
    ) -> None:
        """Remember that a prompt goes to the chosen worker now.

        Args:
            request: The request.
            choice: The chosen worker.
            prompt: The prompt, as `decide` returned it.
            now: The current time.
            reserved: Whether the outcome of the request will be reported.
        """
        worker, prefixes = choice.hit.worker, prompt.prefixes
        ttl_s = PENDING_TTL_S if reserved else SELECTED_TTL_S
        self._fleet.sent(request.question, worker)
        writes, traffic = self._fleet.writes(worker.model), self._models[worker.model]
        traffic.turns += 1
        computing = choice if choice.prefill is None else choice.prefill
        key = request.fair_key
        traffic.keys.wrote(key, computing.hit.worker, prompt.new_tokens, writes.writings)
        traffic.busy.observe(self._busy_now(worker.model, len(writes.workers)), now)
        if choice.prefill is None:
            self._tree.sent(prefixes, worker, now, ttl_s)
        else:
            prefill_worker = choice.prefill.hit.worker
            traffic.keys.wrote(key, worker, request.question.num_tokens - choice.hit.on_gpu, writes.writings)
            self._fleet.sent(request.question, prefill_worker)
            self._tree.sent(prefixes, prefill_worker, now, ttl_s)
            self._tree.sent(prefixes, worker, now, ttl_s, ARRIVING)
        if not request.question.parts:
            self._tree.count(prefixes, prompt.tail)
        if choice.expected is not None:
            prompt.checkpoints = choice.expected.checkpoints
        self._ahead.add(computing.hit.worker, prompt, now + (AHEAD_TTL_S if reserved else SELECTED_TTL_S))
        if session := request.session_name:
            self._sessions.record_choice(session, worker, request.question.num_tokens, now)

    # -- expected reuse beside the hit

    def with_expectation(self, question: Question, choice: Choice, prompt: PromptAhead, now: float) -> Choice:
        """Return the choice with the reuse that is expected at its worker, before the choice is recorded."""
        expected = self._expected(question, choice, prompt, now)
        return choice if expected is None else msgspec.structs.replace(choice, expected=expected)

    def _expected(self, question: Question, choice: Choice, prompt: PromptAhead, now: float) -> ExpectedReuse | None:
        """Return the reuse expected at the chosen worker, or None if nothing is known besides its hit."""
        hit = choice.hit
        # An approximate hit already counts the prompts that were sent to the worker.
        if hit.approximate or question.without_cache or question.parts or choice.prefill is not None:
            return None
        rule = self._fleet.resume_rule(hit.worker)
        if rule is None:
            return None
        coming = self._ahead.coming(hit.worker, prompt, rule, now)
        return self._shares.expect(question.model, question.num_tokens, hit.tokens, hit.full_attention, coming)

    def reused(self, choice: Choice, reused_tokens: int) -> None:
        """Learn from the reuse that an engine reported for a placed prompt."""
        if choice.expected is not None:
            self._shares.learn(choice.hit.worker.model, choice.expected, reused_tokens)

    def fetched(self, choice: Choice, num_tokens: int, reused_tokens: int, seconds: float | None, now: float) -> None:
        """Learn from the reuse that an engine reported for a prompt with a pull.

        Args:
            choice: The choice with the pull.
            num_tokens: The length of the prompt.
            reused_tokens: The tokens that the engine did not compute.
            seconds: The time to the first token, None if it is not known.
            now: The current time.
        """
        hit, pull = choice.hit, choice.pull
        if pull is None:
            return
        transfer_s = self._lenders.learn(hit, pull, num_tokens, choice.queued_tokens, reused_tokens, seconds, now)
        if transfer_s is not None:
            self._metrics.pull_seconds(hit.worker.model).observe(transfer_s)

    # -- prompts under way

    def mark_pending(self, worker: WorkerKey, prefixes: PromptPrefixes, now: float) -> None:
        """Note that a worker computes or receives the prompt with these prefixes from now on."""
        self._tree.sent(prefixes, worker, now, PENDING_TTL_S)
        settle(prefixes, worker, now, ARRIVING)
        self._ahead.move(worker, prefixes, now + AHEAD_TTL_S)

    def computed(self, worker: WorkerKey, prefixes: PromptPrefixes, now: float) -> None:
        """Note that a worker has computed the prompt.

        From now on the engine's events say what it holds, and the assumptions about the prompt under way end soon.
        """
        settle(prefixes, worker, now + SETTLE_S)
        settle(prefixes, worker, now, ARRIVING)
        self._ahead.settle(worker, prefixes, now + ARRIVAL_S)

    def failed(self, worker: WorkerKey, prefixes: PromptPrefixes, now: float) -> None:
        """Forget a prompt that may never have reached the worker."""
        settle(prefixes, worker, now)
        settle(prefixes, worker, now, ARRIVING)
        self._ahead.settle(worker, prefixes, now)

    def expire(self, now: float) -> None:
        """Drop entries that are too old, and the traffic of models and workers that are gone."""
        self._lenders.tick()
        self._declared_lenders.tick()
        self._sessions.expire(now)
        self._ahead.expire(now)
        workers = set(self._fleet.workers())
        models = {worker.model for worker in workers}
        for model in [model for model in self._models if model not in models]:
            del self._models[model]
        for traffic in self._models.values():
            traffic.keys.keep(workers)


def _under_way(
    question: Question, prefixes: PromptPrefixes, paths: Sequence[Path], now: float, kind: int = COMPUTING
) -> Mapping[WorkerKey, int]:
    """Return how many tokens of the prompts' beginnings each worker is computing, or receives by a hand-over."""
    if not question.parts:
        return tokens_at(paths[0], prefixes.step_tokens, question.num_tokens, now, kind)
    tokens: Counter[WorkerKey] = Counter()
    for part, path in zip(question.parts, paths, strict=True):
        tokens.update(tokens_at(path, prefixes.step_tokens, part.num_tokens, now, kind))
    return tokens


def _takes_requests(worker: WorkerKey) -> None:
    """Return None, because the worker takes this request: no other worker can answer it."""


def _may_fetch(request: PlacementRequest) -> bool:
    """Return whether a worker may fetch blocks for the request.

    Sequences that fetch at once would need a name of the fetch each, and none of their reports could be judged. The prompt
    of a request with an owner is not known here as a whole.
    """
    return request.may_pull and not request.is_owned and request.sequences == 1


def _furthest(first: Mapping[WorkerKey, int], second: Mapping[WorkerKey, int]) -> Mapping[WorkerKey, int]:
    """Return the larger of both values for each worker."""
    return {**first, **{worker: max(tokens, first.get(worker, 0)) for worker, tokens in second.items()}}
