# SPDX-License-Identifier: Apache-2.0
"""Every worker's hit for a question: from the mirror, and for workers without usable events from what was sent there.

No I/O, and synchronous but for long prompts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping

import msgspec

from kvrouter.router.base.common.errors import UnknownModel
from kvrouter.router.base.common.escaping import printable
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.follow.fleet.worker_registry import WorkerRegistry
from kvrouter.router.index.matching.cache_writes import ModelWrites
from kvrouter.router.index.matching.matcher import HashPlans, HitTable, Matcher, WorkerView
from kvrouter.router.index.matching.mirror import Mirror
from kvrouter.router.index.matching.question import Hit, Question
from kvrouter.router.index.matching.routing_history import RoutingHistory, approximate_hit, pieces_of
from kvrouter.router.model.kvcache.prompt_hasher import SegmentMemory
from kvrouter.router.model.kvcache.resume_rule import ResumeRule, resume_rule

# How long one long prompt is hashed before others have their turn: as much as ingest takes at once (`commit_loop.py`).
TURN_S = 0.002

WHOLE_PROMPT = "log-probabilities of the prompt are wanted, for which the engine computes all of it"


class HitFinder:
    """What `placement` asks of the core (`HitSource`)."""

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
        """adapters: by the URL of an engine, the LoRA adapters that it lists; after a change, `forget_plans`."""
        self._registry = registry
        self._mirror = mirror
        self._matcher = Matcher(mirror, memory)
        self._history = history
        self._adapters = adapters
        self._clock = clock
        # The plans of each model, with the version of the mirror that they were made from; any change of a worker
        # empties it.
        self._plans: dict[str, tuple[int, HashPlans]] = {}
        self._rules: dict[WorkerKey, ResumeRule | None] = {}
        registry.subscribe(members=lambda worker: self.forget_plans(), view=self._on_view)

    def forget_plans(self) -> None:
        self._plans.clear()

    def _on_view(self, worker: WorkerKey, view: WorkerView | None) -> None:
        self._plans.clear()
        self._rules.pop(worker, None)
        if view is None:
            self._history.forget(worker)

    def writes(self, model: str) -> ModelWrites:
        """See HitSource."""
        return self._mirror.writes.of(model)

    def state_pools(self) -> None:
        """See HitSource."""
        for worker, stream in self._registry.streams.items():
            if blocks := stream.cache.blocks:
                self._mirror.writes.of(worker.model).state(worker, blocks)

    def hash_block_size(self, model: str) -> int:
        """Tokens that one block hash covers, 1 while no catalog of the model is whole. Raises UnknownModel."""
        return self.plans(model).hash_block_size or 1

    def resume_rule(self, worker: WorkerKey) -> ResumeRule | None:
        """Return where prompts can resume in what others leave at a worker, None while its groups are not known."""
        if worker not in self._rules:
            stream = self._registry.streams.get(worker)
            if stream is None:
                return None
            self._rules[worker] = resume_rule(stream.view.catalog)
        return self._rules[worker]

    def plans(self, model: str) -> HashPlans:
        """The model's workers as the matcher needs them, rebuilt when any of them changed."""
        version = self._mirror.version
        known = self._plans.get(model)
        if known is None or known[0] != version:
            known = self._plans[model] = (version, HashPlans.build(self._mirror, self._views(model)))
        return known[1]

    def _views(self, model: str) -> list[WorkerView]:
        views = [stream.view for worker, stream in self._registry.streams.items() if worker.model == model]
        if not views:
            known = ", ".join(map(printable, self._registry.models())) or "none yet"
            raise UnknownModel(f"no worker is registered for model {model!r}; registered models: {known}")
        listed = self._adapters()
        return [_with_adapters(view, listed.get(view.url or "", {})) for view in views]

    async def hash_ahead(self, question: Question) -> None:
        """Hashes a long prompt in turns, for the hits that are wanted next; others are answered between them. Raises
        UnknownModel."""
        if not question.is_long:
            return
        until_s = self._clock() + TURN_S
        for _ in self._matcher.hash_steps(question, self.plans(question.model)):
            if self._clock() >= until_s:
                await asyncio.sleep(0)
                until_s = self._clock() + TURN_S
        # The match is a turn of its own.
        await asyncio.sleep(0)

    def hits(self, question: Question) -> list[Hit]:
        """One hit for each worker of the model, in no particular order. Raises UnknownModel."""
        plans = self.plans(question.model)
        hits = self._matcher.match(question, plans)
        if plans.has_approximate and question.token_ids is not None:
            hits = self._guessed(question, hits)
        if question.without_cache:
            hits = [self._without_cache(question, hit) for hit in hits]
        return hits

    def _without_cache(self, question: Question, hit: Hit) -> Hit:
        """The hit, none where the engine computes the whole prompt for this request."""
        if self._registry.streams[hit.worker].profile.engine.name not in question.without_cache:
            return hit
        return msgspec.structs.replace(hit, gpu=0, cpu=0, disk=0, full_attention=0, limiter=None, reason=WHOLE_PROMPT)

    def hit_table(self, question: Question) -> HitTable | None:
        """The same without an explanation, None where it takes `hits` to answer. Raises UnknownModel."""
        if question.without_cache:
            return None
        return self._matcher.table(question, self.plans(question.model))

    def _guessed(self, question: Question, hits: list[Hit]) -> list[Hit]:
        """The hits, those of workers without usable events guessed from what was sent there."""
        pieces: dict[int | None, list[int]] = {}
        now = self._clock()
        guessed = []
        for hit in hits:
            stream = self._registry.streams[hit.worker]
            if stream.view.approximate:
                block_size = stream.block_size
                if block_size not in pieces:
                    pieces[block_size] = pieces_of(question, block_size)
                tokens = self._history.hit_tokens(stream.life, pieces[block_size], question.num_tokens, now, block_size)
                hit = approximate_hit(hit, tokens)
            guessed.append(hit)
        return guessed

    def sent(self, question: Question, worker: WorkerKey) -> None:
        """The prompt is on its way there: all that is known of a worker without usable events."""
        stream = self._registry.streams.get(worker)
        if stream is not None and stream.view.approximate:
            self._history.sent(stream.life, pieces_of(question, stream.block_size), self._clock())

    def url(self, worker: WorkerKey) -> str | None:
        stream = self._registry.streams.get(worker)
        return None if stream is None else stream.registration.url

    def workers(self) -> Iterable[WorkerKey]:
        return self._registry.streams


def _with_adapters(view: WorkerView, listed: Mapping[str, str]) -> WorkerView:
    """The view with the paths that its engine lists; what was declared or registered wins."""
    return msgspec.structs.replace(view, lora_paths={**listed, **view.lora_paths}) if listed else view
