# SPDX-License-Identifier: Apache-2.0
"""Claim: a choice among workers that lend each other chunks takes at most 1.3 times as long as one among workers that do not.

    python -m benchmarks.lent_hits [--rounds N]

16 workers with an offload tier on the CPU; prompts of 64 and 512 blocks. `match` finds the hits and pulls, `reserve` is
a whole choice. Both times are the fastest of some rounds, in us, without and with peers, which take turns.

- one: one worker holds the prompt, all others nothing.
- prefix: one worker holds the prompt, all others its first quarter, on GPU and CPU.
- four: four workers hold the prompt, all others half of it, on GPU and CPU.
- all: every worker holds the prompt.
- random: each worker holds the beginning of the prompt, up to a point that is drawn for each.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Sequence

import numpy as np

from benchmarks.choice_time import fastest_us
from benchmarks.report import parser_of, print_setting
from kvrouter.events.patch.messages import PeerAddress
from kvrouter.router.base.common.ids import CPU, GPU, Place, WorkerKey
from kvrouter.router.base.telemetry.metric_registry import MetricRegistry
from kvrouter.router.index.matching.matcher import HashPlans, Matcher, WorkerView
from kvrouter.router.index.matching.mirror import Mirror
from kvrouter.router.index.matching.question import Hit, Question
from kvrouter.router.model.config.settings import Config
from kvrouter.router.model.engines.engine_metrics import EngineLoad
from kvrouter.router.model.kvcache.block_hash import HashScheme
from kvrouter.router.model.kvcache.catalog import Catalog, Group, build_catalog
from kvrouter.router.model.kvcache.offload_connectors import OFFLOADING
from kvrouter.router.model.kvcache.prompt_hasher import SegmentMemory
from kvrouter.router.model.workers.registration import CatalogSpec
from kvrouter.router.model.workers.stream_state import StreamState
from kvrouter.router.route.placement.placement_metrics import PlacementMetrics
from kvrouter.router.route.placement.placement_request import PlacementRequest
from kvrouter.router.route.placement.placer import Placer
from tests.support.placing_stage import Fleet

WORKERS, BLOCK_TOKENS, WINDOW = 16, 16, 1_024
LENGTHS = (64, 512)
ADDRESS = PeerAddress("10.0.0.1", 6000, "e7c4")
CATALOGS = {
    "full attention": ("full_attention",),
    "six groups": ("full_attention", *("sliding_window",) * 5),
}
# For each scenario, the workers' shares of the prompt.
HELD = {
    "one": [1.0] + [0.0] * (WORKERS - 1),
    "prefix": [1.0] + [0.25] * (WORKERS - 1),
    "four": [1.0] * 4 + [0.5] * (WORKERS - 4),
    "all": [1.0] * WORKERS,
    "random": [random.Random(worker).random() for worker in range(WORKERS)],
}


def catalog_of(kinds: tuple[str, ...]) -> Catalog:
    groups = [
        Group(index, kind, BLOCK_TOKENS, WINDOW if kind == "sliding_window" else None)
        for index, kind in enumerate(kinds)
    ]
    return build_catalog(groups, "declared", CatalogSpec(offload_connector=OFFLOADING, offload_blocks_per_chunk=1))


class LendingFleet(Fleet):
    """Workers that hold shares of one prompt, with or without addresses at which they lend."""

    def __init__(self, catalog: Catalog, shares: list[float], blocks: int, peer: PeerAddress | None) -> None:
        self.keys = [WorkerKey("m", f"w{number}") for number in range(len(shares))]
        mirror = Mirror(1 << 28)
        hashes = np.random.default_rng(1).integers(1, 1 << 63, blocks, np.uint64)
        for key, share in zip(self.keys, shares, strict=True):
            mirror.begin_epoch(key, "e")
            mirror.writes.of("m").state(key, blocks)
            for group in catalog.groups:
                for medium in (GPU, CPU):
                    mirror.add(key, Place(group.group_idx, medium), hashes[: round(share * blocks)])
        scheme = HashScheme.default()
        views = [
            WorkerView(key, None, StreamState.LIVE, True, "", "e", catalog, scheme, {}, peer=peer) for key in self.keys
        ]
        self.plans = HashPlans.build(mirror, views)
        self.matcher = Matcher(mirror, SegmentMemory(0))
        self.question = Question("m", blocks * BLOCK_TOKENS + 1, block_hashes=hashes)
        super().__init__(self.match())
        self.caches = mirror.writes
        self.address = peer
        self.placer = Placer(
            self,
            config=Config(),
            metrics=PlacementMetrics(MetricRegistry()),
            clock=time.monotonic,
            rng=random.Random(1),
            new_id=lambda: "one",
        )
        for number, key in enumerate(self.keys):
            self.placer.take_engine_load(key, EngineLoad(1, 4, 0.5))
            if number % 2:
                self.placer.weights.table.reserve(f"r{number}", key, 1_000 + number, 2_000, time.monotonic())
        self.ask = PlacementRequest(self.question)

    def match(self) -> list[Hit]:
        return self.matcher.match(self.question, self.plans)

    def hits(self, question: Question) -> Sequence[Hit]:
        return self.match()

    def peer(self, worker: WorkerKey) -> PeerAddress | None:
        return self.address

    def reserve(self) -> None:
        self.placer.reserve(self.ask).done()


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    rounds = parser.parse_args().rounds
    # Disable collections, as in service the router freezes its long-lived objects.
    gc.disable()
    print_setting()
    print("| groups | blocks | held | match, us | with peers | reserve, us | with peers | ratio | pulls |")
    print("|---|---|---|---|---|---|---|---|---|")
    for groups, kinds in CATALOGS.items():
        for blocks in LENGTHS:
            for scenario, shares in HELD.items():
                catalog = catalog_of(kinds)
                fleets = [LendingFleet(catalog, shares, blocks, peer) for peer in (None, ADDRESS)]
                best = [[float("inf")] * 2 for _ in fleets]
                for _ in range(rounds):
                    for fleet, times in zip(fleets, best, strict=True):
                        times[0] = min(times[0], fastest_us(fleet.match, 1))
                        times[1] = min(times[1], fastest_us(fleet.reserve, 1))
                (match, reserve), (lent_match, lent_reserve) = best
                pulls = sum(len(hit.pulls) for hit in fleets[1].known)
                print(
                    f"| {groups} | {blocks} | {scenario} | {match:.0f} | {lent_match:.0f} | {reserve:.0f} | "
                    f"{lent_reserve:.0f} | {lent_reserve / reserve:.2f} | {pulls} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
