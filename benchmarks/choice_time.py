# SPDX-License-Identifier: Apache-2.0
"""Claim: choosing costs little beside matching, with few workers and with hundreds.

    python -m benchmarks.choice_time [--rounds N]

The hits of every worker are given, so the times are of the steps after the matching: `choose` alone (load, cost,
policy, reason), and a whole `reserve` (the names of the prompt's beginnings, pending credit, choice, reservation),
where each reservation is released at once. Half of the workers have load, as they would in service. The result is the
fastest of some rounds, in us, as other processes use the machine too. Beside it stands the time to match the same
prompt of 512 blocks.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Sequence

import numpy as np

from benchmarks.report import parser_of, print_setting
from kvrouter.router.base.common.ids import GPU, Place, WorkerKey
from kvrouter.router.base.telemetry.metric_registry import MetricRegistry
from kvrouter.router.index.matching.matcher import HashPlans, Matcher, WorkerView
from kvrouter.router.index.matching.mirror import Mirror
from kvrouter.router.index.matching.question import Question
from kvrouter.router.model.config.settings import Config
from kvrouter.router.model.engines.engine_metrics import EngineLoad
from kvrouter.router.model.kvcache.block_hash import HashScheme
from kvrouter.router.model.kvcache.catalog import Group, build_catalog
from kvrouter.router.model.kvcache.prompt_hasher import SegmentMemory
from kvrouter.router.model.workers.registration import CatalogSpec
from kvrouter.router.model.workers.stream_state import StreamState
from kvrouter.router.route.placement.choose import choose
from kvrouter.router.route.placement.copies import Copies
from kvrouter.router.route.placement.cost import ChoiceContext
from kvrouter.router.route.placement.decider import HitSource
from kvrouter.router.route.placement.placement_metrics import PlacementMetrics
from kvrouter.router.route.placement.placement_request import PlacementRequest
from kvrouter.router.route.placement.placer import Placer
from tests.support.placing_stage import Fleet

WORKERS = (8, 64, 512)
BLOCKS, BLOCK_TOKENS = 512, 16
NUM_TOKENS = BLOCKS * BLOCK_TOKENS + 1
CALLS = 50


class PartlyFilledFleet(Fleet):
    """A model's workers, of which every fourth holds a part of the prompt."""

    def __init__(self, workers: int) -> None:
        self.keys = [WorkerKey("m", f"w{number}") for number in range(workers)]
        mirror = Mirror(1 << 28)
        catalog = build_catalog((Group(0, "full_attention", BLOCK_TOKENS),), "learned", CatalogSpec())
        self.hashes = np.arange(1, BLOCKS + 1, dtype=np.uint64)
        for number, key in enumerate(self.keys):
            mirror.begin_epoch(key, "e")
            mirror.writes.of("m").state(key, BLOCKS)
            if number % 4 == 0:
                mirror.add(key, Place(0, GPU), self.hashes[: BLOCKS * (number + 1) // workers])
        scheme = HashScheme.default()
        views = [WorkerView(key, None, StreamState.LIVE, True, "", "e", catalog, scheme, {}) for key in self.keys]
        self.plans = HashPlans.build(mirror, views)
        self.matcher = Matcher(mirror, SegmentMemory(0))
        self.question = Question("m", NUM_TOKENS, block_hashes=self.hashes)
        super().__init__(self.matcher.match(self.question, self.plans))
        self.caches = mirror.writes


def fastest_us(call: Callable[[], object], rounds: int) -> float:
    """Return the time of one call in the fastest round, in us; a round has CALLS calls."""
    rounds_us = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        rounds_us.append((time.perf_counter() - start) / CALLS * 1e6)
    return min(rounds_us)


def loaded_placer(fleet: HitSource, keys: Sequence[WorkerKey]) -> Placer:
    """Return a placer whose engines report load, half of them with a reservation, too."""
    placer = Placer(
        fleet,
        config=Config(),
        metrics=PlacementMetrics(MetricRegistry()),
        clock=time.monotonic,
        rng=random.Random(1),
        new_id=lambda: "one",
    )
    for number, key in enumerate(keys):
        placer.take_engine_load(key, EngineLoad(1, 4, 0.5))
        if number % 2:
            placer.weights.table.reserve(f"r{number}", key, 1_000 + number, 2_000, time.monotonic())
    return placer


def measure(workers: int, rounds: int) -> tuple[float, float, float]:
    fleet = PartlyFilledFleet(workers)
    placer = loaded_placer(fleet, fleet.keys)
    copies = Copies([128.0 * piece for piece in range(NUM_TOKENS // 256)], 256)
    context = ChoiceContext(NUM_TOKENS, placer.weights, writes=fleet.writes("m"), copies=copies)
    rng, ask = random.Random(2), PlacementRequest(fleet.question)
    return (
        fastest_us(lambda: fleet.matcher.match(fleet.question, fleet.plans), rounds),
        fastest_us(lambda: choose(fleet.known, context, rng), rounds),
        fastest_us(lambda: placer.reserve(ask).done(), rounds),
    )


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    arguments = parser.parse_args()
    # Disable collections, as in service the router freezes its long-lived objects, so that they are not walked again
    # and again.
    gc.disable()
    print_setting()
    print("| workers | match, us | choose, us | reserve and release, us |\n|---|---|---|---|")
    for workers in WORKERS:
        match_us, choose_us, reserve_us = measure(workers, arguments.rounds)
        print(f"| {workers} | {match_us:.0f} | {choose_us:.0f} | {reserve_us:.0f} |", flush=True)


if __name__ == "__main__":
    main()
