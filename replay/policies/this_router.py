# SPDX-License-Identifier: Apache-2.0
"""This router in virtual time: its own cost, load and placing, under any of its policies.

Source: router/route/placement/, this version. `kv` is the default of `kvrouter serve`; `round_robin`, `random`,
`least_load`, `prefix_only` and `full_attention_only` see the same workers, hits and load
(docs/explanation/choosing.md).
"""

from __future__ import annotations

import itertools
import random

from kvrouter.replay.fleet.virtual_fleet import MODEL, VirtualFleet
from kvrouter.replay.policies.routing import Arrival, EngineLoads
from kvrouter.router.base.telemetry.metric_registry import MetricRegistry
from kvrouter.router.index.matching.question import Question
from kvrouter.router.model.config.settings import Config
from kvrouter.router.route.placement.candidates import Pin
from kvrouter.router.route.placement.placement_metrics import PlacementMetrics
from kvrouter.router.route.placement.placement_request import Placement, PlacementRequest
from kvrouter.router.route.placement.placer import Placer
from kvrouter.router.route.placement.policies import KV, OTHERS

# How often the router reads each engine's load.
GAUGE_EVERY_S = 2.0
NAMES = (KV, *OTHERS)


class OwnPlaced:
    """A request placed by this router."""

    __slots__ = ("_placement", "number")

    def __init__(self, placement: Placement, number: int) -> None:
        self._placement = placement
        self.number = number

    @property
    def achievable_tokens(self) -> int:
        """Longest hit of any worker when the request came."""
        return self._placement.choice.best_hit_tokens

    @property
    def predicted_tokens(self) -> int:
        """Hit of the request's own worker, over every group and tier."""
        return self._placement.choice.hit.tokens

    @property
    def expected_tokens(self) -> int:
        """Tokens that the router expects to be reused when the request gets its turn."""
        return self._placement.expected_tokens

    def reused(self, tokens: int) -> None:
        """Report the tokens that the replica reused."""
        self._placement.reused(tokens)

    def first_token(self) -> None:
        """Report the first token."""
        self._placement.first_token()

    def done(self, output_tokens: int | None) -> None:
        """End the reservation."""
        self._placement.done(output_tokens)


class ThisRouter:
    """This router's `Placer` on the clock of a virtual fleet."""

    def __init__(self, fleet: VirtualFleet, policy: str, seed: int) -> None:
        self._fleet = fleet
        self._numbers = {key: number for number, key in enumerate(fleet.keys)}
        self.metrics = MetricRegistry()
        ids = itertools.count()
        self._placer = Placer(
            fleet,
            config=Config(policy=policy),  # type: ignore[arg-type]
            metrics=PlacementMetrics(self.metrics),
            clock=lambda: fleet.now_s,
            rng=random.Random(seed),
            new_id=lambda: str(next(ids)),
        )
        self._tick_s = 0.0
        self._gauge_s = 0.0

    def place(self, arrival: Arrival, pinned: int | None = None) -> OwnPlaced:
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
        return OwnPlaced(placement, self._numbers[placement.worker])

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
