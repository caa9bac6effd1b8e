# SPDX-License-Identifier: Apache-2.0
"""A `Placer` with a clock and a fleet that the test controls."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvrouter.contract.tiers import all_on_gpu
from kvrouter.events.patch.messages import PeerAddress
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.base.telemetry.metric_registry import MetricRegistry
from kvrouter.router.index.matching.cache_writes import CacheWrites, ModelWrites
from kvrouter.router.index.matching.question import Hit, Question
from kvrouter.router.model.config.settings import Config
from kvrouter.router.model.kvcache.resume_rule import ResumeRule
from kvrouter.router.route.load.prefix_tree import PIECE_TOKENS
from kvrouter.router.route.placement.placement_metrics import PlacementMetrics
from kvrouter.router.route.placement.placement_request import PlacementRequest
from kvrouter.router.route.placement.placer import Placer

TOKENS = 8 * PIECE_TOKENS
OF_QUESTION = ("worker_ids", "exclude_worker_ids", "exclude_workers")


def hit(name: str, tokens: int = 0, state: str = "live", rank: int = 0) -> Hit:
    return Hit(WorkerKey("m", name, rank), all_on_gpu(tokens), state)


class Fleet:
    """A fleet whose workers have the hits that the test sets."""

    def __init__(self, hits: Sequence[Hit]) -> None:
        self.known = list(hits)
        self.went: list[WorkerKey] = []
        self.caches = CacheWrites()
        self.rule: ResumeRule | None = ResumeRule(16, None)
        # Where engines lend blocks, by the worker's id.
        self.peers: dict[str, PeerAddress] = {}

    async def hash_ahead(self, question: Question) -> None:
        pass

    def hits(self, question: Question) -> Sequence[Hit]:
        return self.known

    def url(self, worker: WorkerKey) -> str | None:
        return f"http://{worker.worker_id}"

    def sent(self, question: Question, worker: WorkerKey) -> None:
        self.went.append(worker)

    def writes(self, model: str) -> ModelWrites:
        return self.caches.of(model)

    def take_pool_sizes(self) -> None:
        pass

    def hash_block_size(self, model: str) -> int:
        return 16

    def peer(self, worker: WorkerKey) -> PeerAddress | None:
        return self.peers.get(worker.worker_id)

    def resume_rule(self, worker: WorkerKey) -> ResumeRule | None:
        return self.rule

    def workers(self) -> list[WorkerKey]:
        return [known_hit.worker for known_hit in self.known]


class Stage:
    """A placer with its fleet and its clock; workers whose names begin with p only compute prompts."""

    def __init__(
        self, *hits: Hit, unavailable: dict[str, str] | None = None, record: Any = None, **settings: Any
    ) -> None:
        self.now = 0.0
        self.fleet = Fleet(hits or (hit("a"), hit("b")))
        self.metrics = MetricRegistry()
        self.out = unavailable or {}
        ids = itertools.count()
        self.placer = Placer(
            self.fleet,
            config=Config(**settings),
            metrics=PlacementMetrics(self.metrics),
            clock=lambda: self.now,
            rng=random.Random(4),
            new_id=lambda: f"s{next(ids)}",
            unavailable=lambda worker: self.out.get(worker.worker_id),
            prefillers=self._prefillers,
            **({} if record is None else {"record": record}),
        )

    def _prefillers(self, model: str) -> frozenset[WorkerKey]:
        return frozenset(worker for worker in self.fleet.workers() if worker.worker_id.startswith("p"))

    def load(self, name: str) -> tuple[int, int, int]:
        burden = self.placer.weights.burden(WorkerKey("m", name))
        return burden.queued_tokens, burden.decode_tokens, burden.requests

    def counted(self, name: str, **labels: str) -> float:
        """Return the sum of a metric's samples that have these labels."""
        samples = (sample for family in self.metrics.collect() for sample in family.samples)
        wanted = labels.items()
        return sum(
            sample.value for sample in samples if sample.name == f"kvrouter_{name}" and wanted <= sample.labels.items()
        )


def ask(seed: int = 0, tokens: int = TOKENS, **fields: Any) -> PlacementRequest:
    ids = np.random.default_rng(seed).integers(0, 50_000, tokens)
    question = {name: fields.pop(name) for name in OF_QUESTION if name in fields}
    return PlacementRequest(Question("m", tokens, token_ids=ids, **question), **fields)
