# SPDX-License-Identifier: Apache-2.0
"""The router under test without its HTTP: the real `Core` over real sockets and a real store.

The harness inspects its state between two turns of the event loop.
"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass

import numpy as np
import zmq

from kvrouter.router.app.core.core_metrics import CoreMetrics
from kvrouter.router.app.core.router_core import Core
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.base.telemetry.metric_registry import MetricRegistry
from kvrouter.router.index.matching.question import Question
from kvrouter.router.index.store.store import IndexStore
from kvrouter.router.model.config.settings import Config
from kvrouter.router.model.upstream.engine_client import EngineClient
from kvrouter.router.model.workers.allow_list import AllowList
from kvrouter.router.model.workers.engine_key import EngineKey
from kvrouter.router.model.workers.registration import NO_PATCH, CatalogSpec, Registration
from tests.chaos.harness.engines import MODEL, Engine
from tests.chaos.harness.history import Place
from tests.chaos.harness.shape import Kind

LEASE_S = 2.0
# Shorter than the default, so that a schedule does not wait long for a missing replay, and longer than any stall of the
# harness's own event loop.
REPLAY_TIMEOUT_S = 2.0
MIRROR_BYTES = 16 << 20
# Shorter than the default, because a schedule lasts only seconds.
HEALTH_INTERVAL_S = 0.3


class JumpingClock:
    """A monotonic clock in seconds, apart from the jumps that a fault makes."""

    def __init__(self) -> None:
        self.offset_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.offset_s


@dataclass(frozen=True, slots=True)
class Sample:
    """The state of one worker in a router at one moment."""

    worker: str
    state: str
    reason: str
    epoch: str | None
    seq: int | None
    # Hashes of the blocks that the router credits to the worker, by place.
    credited: dict[Place, frozenset[int]]
    # Number of heartbeats received.
    proofs: int


class CoreRouter:
    """One router in this process."""

    def __init__(self, url: str, rng: random.Random) -> None:
        self.clock = JumpingClock()
        self._url, self._rng = url, rng

    async def open(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._client = EngineClient(asyncio.get_running_loop(), EngineKey(None, AllowList()))
        self._store = await IndexStore.open(self._url)
        self.core = Core(
            store=self._store,
            config=Config(
                lease_ttl_s=LEASE_S,
                replay_timeout_s=REPLAY_TIMEOUT_S,
                mirror_budget_bytes=MIRROR_BYTES,
                segment_memory_bytes=0,
                health_interval_s=HEALTH_INTERVAL_S,
            ),
            metrics=CoreMetrics(MetricRegistry()),
            zmq_context=self._context,
            clock=self.clock,
            rng=self._rng,
            engine_client=self._client,
        )
        await self.core.start()

    async def close(self) -> None:
        await self.core.stop()
        await self._store.close()
        self._client.close()
        # It waits for its sockets, so it must not run in the loop's thread.
        await asyncio.to_thread(self._context.destroy, linger=0)

    async def register(self, engine: Engine) -> None:
        await self.core.register(
            Registration(
                WorkerKey(MODEL, engine.name),
                events=engine.events.endpoint,
                url=engine.url,
                replay=engine.replay.endpoint if engine.kind is Kind.STOCK else None,
                patch=engine.requests.endpoint if engine.kind is Kind.PATCHED else NO_PATCH,
                catalog=CatalogSpec(offload_blocks_per_chunk=1),
            )
        )

    def sample(self) -> list[Sample]:
        """Return a sample of each worker, all at one moment of the event loop."""
        core = self.core
        plan = core.finder.plans(MODEL).by_hash
        judged = set() if plan is None else {view.worker for view in plan.views}
        samples = []
        for worker, follower in core.registry.followers.items():
            worker_index = core.mirror_sync.mirror.worker(worker)
            credited: dict[Place, frozenset[int]] = {}
            if worker in judged and worker_index is not None:
                for place in worker_index.places:
                    held = core.mirror_sync.mirror.held(worker, place)
                    if len(held):
                        credited[place.group_idx, place.medium, place.ownership] = frozenset(held.tolist())
            view = follower.state.view
            samples.append(
                Sample(
                    worker.worker_id,
                    view.state.value,
                    view.reason,
                    follower.state.shown.epoch,
                    follower.state.shown.seq,
                    credited,
                    follower.state.ingest.profile.tally.heartbeats,
                )
            )
        return samples

    def gpu_hit(self, engine: Engine, tokens: list[int]) -> int:
        """Return how many tokens of a prompt this engine will reuse from its GPU, as the router predicts."""
        question = Question(MODEL, len(tokens), token_ids=np.array(tokens, np.int64))
        (hit,) = [hit for hit in self.core.ask(question) if hit.worker.worker_id == engine.name]
        return hit.on_gpu
