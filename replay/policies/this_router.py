# SPDX-License-Identifier: Apache-2.0
"""This router in virtual time: its own cost, load and placing, under any of its policies.

Source: router/route/placement/, this version. `kv` is the default of `kvrouter serve`; `round_robin`, `random`,
`least_load`, `prefix_only` and `full_attention_only` see the same workers, hits and load
(docs/explanation/choosing.md). `kv+pull` is `kv` where workers fetch blocks from each other.
"""

from __future__ import annotations

import itertools
import random

from kvrouter.replay.fleet.virtual_fleet import MODEL, VirtualFleet
from kvrouter.replay.policies.routing import Arrival, EngineLoads, Placed, PlacedPull
from kvrouter.router.base.telemetry.metric_registry import MetricRegistry
from kvrouter.router.index.matching.question import Question
from kvrouter.router.model.config.settings import Config
from kvrouter.router.route.placement.candidates import Pin
from kvrouter.router.route.placement.placement_metrics import PlacementMetrics
from kvrouter.router.route.placement.placement_request import PlacementRequest
from kvrouter.router.route.placement.placer import Placer
from kvrouter.router.route.placement.policies import KV, OTHERS

# How often the router reads each engine's load.
GAUGE_EVERY_S = 2.0
# `kv` in a fleet whose workers fetch from each other.
PULLING = f"{KV}+pull"
NAMES = (KV, *OTHERS, PULLING)


class ThisRouter:
    """This router's `Placer` on the clock of a virtual fleet."""

    def __init__(self, fleet: VirtualFleet, policy: str, seed: int) -> None:
        self._fleet = fleet
        self._numbers = {key: number for number, key in enumerate(fleet.keys)}
        self.metrics = MetricRegistry()
        ids = itertools.count()
        self._placer = Placer(
            fleet,
            config=Config(policy=KV if policy == PULLING else policy),  # type: ignore[arg-type]
            metrics=PlacementMetrics(self.metrics),
            clock=lambda: fleet.now_s,
            rng=random.Random(seed),
            new_id=lambda: str(next(ids)),
        )
        self._tick_s = 0.0
        self._gauge_s = 0.0

    def place(self, arrival: Arrival, pinned: int | None = None) -> Placed:
        """Place a request by the policy, or at `pinned`.

        No request waits: if all workers are saturated, the cheapest one gets it.
        """
        self._fleet.catch_up()
        question = Question(MODEL, arrival.num_tokens, block_hashes=arrival.hashes)
        request = PlacementRequest(
            question,
            max_tokens=arrival.max_tokens,
            pinned=None if pinned is None else Pin(self._fleet.keys[pinned].worker_id),
            key_name=arrival.key,
        )
        placement = self._placer.reserve(request, anyway=True)
        choice, pull = placement.choice, placement.choice.pull
        return Placed(
            self._numbers[placement.worker],
            choice.best_hit_tokens,
            choice.hit.tokens,
            placement.expected_tokens,
            placement.reused,
            placement.first_token,
            placement.done,
            None
            if pull is None
            else PlacedPull(
                self._numbers[pull.source], pull.tokens, pull.fetched_tokens, pull.timeout_s, choice.hit.on_gpu
            ),
        )

    def tend(self, loads: EngineLoads) -> None:
        """Update the placer's gauges and timers when they are due."""
        now_s = self._fleet.now_s
        if now_s >= self._gauge_s:
            self._gauge_s = now_s + GAUGE_EVERY_S
            for key, load in zip(self._fleet.keys, loads(), strict=True):
                self._placer.take_engine_load(key, load)
        if now_s >= self._tick_s:
            self._tick_s = now_s + 1.0
            self._placer.tick()
