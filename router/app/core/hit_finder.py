# SPDX-License-Identifier: Apache-2.0
"""Every worker's hit for a question, from the mirror or from routing history.

The history predicts the hits of workers without usable events from the prompts that were sent to them. No I/O, and
synchronous but for long prompts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping

import msgspec

from kvrouter.contract.tiers import all_on_gpu
from kvrouter.events.patch.messages import PeerAddress
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.follow.fleet.worker_registry import WorkerRegistry
from kvrouter.router.follow.streams.worker_state import WorkerState
from kvrouter.router.index.matching.cache_writes import ModelWrites
from kvrouter.router.index.matching.matcher import HashPlans, HitTable, Matcher, WorkerView, sum_of
from kvrouter.router.index.matching.mirror import Mirror
from kvrouter.router.index.matching.question import Hit, Question
from kvrouter.router.index.matching.routing_history import RoutingHistory, approximate_hit, pieces_of
from kvrouter.router.model.kvcache.prompt_hasher import SegmentMemory
from kvrouter.router.model.kvcache.resume_rule import ResumeRule, resume_rule
from kvrouter.router.model.workers.model_names import unknown_model

# How long a long prompt is hashed before other requests get a turn: as long as one turn of ingest (`commits.py`).
TURN_S = 0.002

# The most hits of a list's prompts that are added up one by one, which takes 1 ms. That is needed only where hits depend
# on more than hashes; usually they are added up as arrays (`Matcher.match_list`).
MAX_ADDED_HITS = 1_024

WHOLE_PROMPT = "log-probabilities of the prompt are wanted, for which the engine computes all of it"


class HitFinder:
    """The part of the core that finds hits; it implements `HitSource` of the room `placement`."""

    def __init__(
        self,
        registry: WorkerRegistry,
        mirror: Mirror,
        memory: SegmentMemory,
        history: RoutingHistory,
        *,
        adapters: Callable[[], Mapping[str, Mapping[str, str]]],
        clock: Callable[[], float],
    ) -> None:
        """Start with empty plans.

        Args:
            registry: The workers and their followers.
            mirror: The blocks of all workers.
            memory: Remembers the hashes of prompt segments.
            history: Remembers the prompts that were sent to workers without usable events.
            adapters: Returns the LoRA adapters that each engine lists, by the engine's URL. Call `apply_adapters` after a
                change.
            clock: Returns the current time in seconds.
        """
        self._registry = registry
        self._mirror = mirror
        self._matcher = Matcher(mirror, memory)
        self._history = history
        self._adapters = adapters
        self._clock = clock
        # The plans of each model, with the version of the mirror for which they were built. Any change of a worker
        # empties them.
        self._plans: dict[str, tuple[int, HashPlans]] = {}
        self._rules: dict[WorkerKey, ResumeRule | None] = {}
        # The adapters that engines listed last, as `adapters` returns them.
        self._listed: dict[str, dict[str, str]] = {}
        registry.subscribe(members=lambda worker: self.forget_plans(), view=self._on_view)

    def forget_plans(self) -> None:
        """Forget the plans, so that the next question builds new ones."""
        self._plans.clear()

    def apply_adapters(self) -> None:
        """Apply a change of the adapters that engines list.

        If an engine has loaded an adapter again from another path, forget the prompts by which hits of its workers are
        guessed, because a guess names an adapter without its path.
        """
        self.forget_plans()
        adapters = {url: dict(paths) for url, paths in self._adapters().items()}
        reloaded = {
            url
            for url, paths in adapters.items()
            if any(paths.get(name, path) != path for name, path in self._listed.get(url, {}).items())
        }
        self._listed = adapters
        for worker, follower in self._registry.followers.items():
            if follower.state.view.url in reloaded:
                self._history.forget(worker)

    def _on_view(self, worker: WorkerKey, view: WorkerView | None) -> None:
        self._plans.clear()
        self._rules.pop(worker, None)
        if view is None:
            self._history.forget(worker)

    def writes(self, model: str) -> ModelWrites:
        """Return what was stored lately in the GPU caches of the model's workers."""
        return self._mirror.writes.of(model)

    def take_pool_sizes(self) -> None:
        """Record the sizes of the GPU caches that engines have stated since the last call."""
        for worker, follower in self._registry.followers.items():
            if blocks := follower.state.cache.blocks:
                self._mirror.writes.of(worker.model).state(worker, blocks)

    def hash_block_size(self, model: str) -> int:
        """Return the tokens that one block hash covers; 1 while no catalog of the model is whole.

        Raises UnknownModel.
        """
        return self.plans(model).hash_block_size or 1

    def resume_rule(self, worker: WorkerKey) -> ResumeRule | None:
        """Return where prompts can resume in blocks that others leave at a worker; None if its groups are unknown."""
        if worker not in self._rules:
            follower = self._registry.followers.get(worker)
            if follower is None:
                return None
            self._rules[worker] = resume_rule(follower.state.view.catalog)
        return self._rules[worker]

    def plans(self, model: str) -> HashPlans:
        """Return the model's workers in the form that the matcher needs, rebuilt when any of them changed.

        Raises UnknownModel.
        """
        version = self._mirror.version
        cached = self._plans.get(model)
        if cached is None or cached[0] != version:
            cached = self._plans[model] = (version, HashPlans.build(self._mirror, self._views(model)))
        return cached[1]

    def _views(self, model: str) -> list[WorkerView]:
        states = [follower.state for worker, follower in self._registry.followers.items() if worker.model == model]
        if not states:
            raise unknown_model(model, self._registry.models())
        adapters = self._adapters()
        return [_with_adapters(state, adapters.get(state.view.url or "", {})) for state in states]

    async def hash_ahead(self, question: Question) -> None:
        """Hash a long prompt in turns before `hits` needs its hashes, so that other requests are answered in between.

        Raises UnknownModel.
        """
        if not question.is_long:
            return
        until_s = self._clock() + TURN_S
        plans = self.plans(question.model)
        for part in question.parts or (question,):
            for _ in () if part.token_ids is None else self._matcher.hash_steps(part, plans):
                if self._clock() >= until_s:
                    await asyncio.sleep(0)
                    until_s = self._clock() + TURN_S
        # The match that follows is a separate turn.
        await asyncio.sleep(0)

    def hits(self, question: Question) -> list[Hit]:
        """Return one hit for each worker of the model, in no particular order. Raises UnknownModel."""
        if question.parts and not question.is_blind:
            return self._list_hits(question)
        plans = self.plans(question.model)
        hits = self._matcher.match(question, plans)
        if plans.has_approximate and question.token_ids is not None:
            hits = self._guessed(question, hits)
        if question.without_cache:
            hits = [self._without_cache(question, hit) for hit in hits]
        return hits

    def _list_hits(self, question: Question) -> list[Hit]:
        """Return for each worker the sum of its hits for the prompts of a list.

        The prompts run at the same time, so no prompt counts as cached for another one of the list.
        """
        known = [part for part in question.parts if not part.is_blind]
        is_last_known = not question.parts[-1].is_blind
        plans = self.plans(question.model)
        if not question.without_cache:
            summed = self._matcher.match_list(known, plans, is_last_known=is_last_known)
            if summed is not None:
                return summed
        first_hits = self.hits(known[0])
        # Keep the last prompts, because an engine's report may be about the last one.
        others = known[1:][-max(1, MAX_ADDED_HITS // len(first_hits)) :]
        return sum_of([first_hits, *map(self.hits, others)], is_last_known=is_last_known)

    def _without_cache(self, question: Question, hit: Hit) -> Hit:
        """Return the hit, or an empty one if the worker's engine computes the whole prompt for this request."""
        if self._registry.followers[hit.worker].state.profile.engine.name not in question.without_cache:
            return hit
        nothing = all_on_gpu(0)
        return msgspec.structs.replace(
            hit, by_tier=nothing, full_attention=0, limiter=None, reason=WHOLE_PROMPT, pulls=()
        )

    def hit_table(self, question: Question) -> HitTable | None:
        """Return all hits as numbers without explanations, or None if only `hits` can answer. Raises UnknownModel."""
        if question.without_cache:
            return None
        return self._matcher.table(question, self.plans(question.model))

    def _guessed(self, question: Question, hits: list[Hit]) -> list[Hit]:
        """Return the hits, with those of workers without usable events guessed from the prompts sent there."""
        pieces: dict[int | None, list[int]] = {}
        now = self._clock()
        results = []
        for hit in hits:
            state = self._registry.followers[hit.worker].state
            if state.view.approximate:
                block_size = state.block_size
                if block_size not in pieces:
                    pieces[block_size] = pieces_of(question, block_size)
                tokens = self._history.hit_tokens(state.life, pieces[block_size], question.num_tokens, now, block_size)
                hit = approximate_hit(hit, tokens)
            results.append(hit)
        return results

    def sent(self, question: Question, worker: WorkerKey) -> None:
        """Remember a prompt that is on its way to a worker without usable events; its hits are guessed from those."""
        follower = self._registry.followers.get(worker)
        if follower is not None and follower.state.view.approximate:
            for prompt in question.parts or (question,):
                self._history.sent(follower.state.life, pieces_of(prompt, follower.state.block_size), self._clock())

    def url(self, worker: WorkerKey) -> str | None:
        """Return the worker's URL; None if it has none or is not registered."""
        follower = self._registry.followers.get(worker)
        return None if follower is None else follower.state.registration.url

    def peer(self, worker: WorkerKey) -> PeerAddress | None:
        """Return where the worker's engine lends blocks, or None if it lends none; the host is never a wildcard."""
        follower = self._registry.followers.get(worker)
        return None if follower is None else follower.state.view.peer

    def workers(self) -> Iterable[WorkerKey]:
        """Return all workers that are followed here."""
        return self._registry.followers


def _with_adapters(state: WorkerState, adapters: Mapping[str, str]) -> WorkerView:
    """Return the worker's view with the adapter paths that the engine lists.

    If the engine lists the paths that it hashes, they take precedence over declared and registered paths, because an
    adapter may have been loaded again from another path since.
    """
    view = state.view
    if not adapters:
        return view
    stated, listed = view.lora_paths, adapters
    paths = {**stated, **listed} if state.profile.engine.lists_hashed_paths else {**listed, **stated}
    return msgspec.structs.replace(view, lora_paths=paths)
