# SPDX-License-Identifier: Apache-2.0
"""Claim: another router process counts a placement well within a tenth of a second, and placing waits for no process.

    python -m benchmarks.load_share [--placements 1000] [--per-second 100]

Two processes share a real Valkey. One places prompts (`Placer.reserve`, 8 workers, no hits) at random moments; the
other records when it hears of how many placements. Both read one clock, so the time from a placement until the other
process counts it is measured directly. A burst is published in one message, so its first placement waits longest. The
table also has the time that the placing itself took.
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import random
import statistics
import time
from bisect import bisect_left
from multiprocessing.connection import Connection

import numpy as np

from benchmarks.report import parser_of, print_setting, scratch
from kvrouter.router.base.redis_client.servers import Servers
from kvrouter.router.base.telemetry.metric_registry import MetricRegistry
from kvrouter.router.index.matching.question import Question
from kvrouter.router.model.config.settings import Config
from kvrouter.router.route.load.load_sync import LoadSync
from kvrouter.router.route.load.load_table import LoadTable
from kvrouter.router.route.load.worker_load import LoadModel
from kvrouter.router.route.placement.placement_metrics import PlacementMetrics
from kvrouter.router.route.placement.placement_request import PlacementRequest
from kvrouter.router.route.placement.placer import Placer
from tests.support.placing_stage import Fleet, hit
from tests.support.store_server import StoreServer

WORKERS = 8
NUM_TOKENS = 4_096
BLOCK_TOKENS = 16
# The longest wait until both processes know each other, and the wait for the last message.
MEET_S = 30.0
SETTLE_S = 1.0


async def hear(url: str, pipe: Connection) -> None:
    """Record, as the other process, when it knew of how many requests at all workers together, and send the record."""
    servers = await Servers.open(url)
    weights = LoadModel(LoadTable(), 1 << 40)
    heard: list[tuple[float, int]] = []

    def changed() -> None:
        requests = sum(load.requests for load in weights.table.loads.values())
        if not heard or requests > heard[-1][1]:
            heard.append((time.monotonic(), requests))

    share = LoadSync(
        weights,
        servers,
        process="b",
        clock=time.monotonic,
        rng=random.Random(2),
        end_here=lambda *_: False,
        changed=changed,
    )
    share.start()
    await asyncio.to_thread(pipe.recv)
    await share.stop()
    await servers.close()
    pipe.send(heard)


def hear_process(url: str, pipe: Connection) -> None:
    asyncio.run(hear(url, pipe))


async def place(url: str, placements: int, per_second: float) -> tuple[list[float], list[float]]:
    """Return when each prompt was placed, and how long the placing took, in seconds."""
    servers, rng, ids = await Servers.open(url), random.Random(1), itertools.count()
    fleet = Fleet([hit(f"w{number}") for number in range(WORKERS)])
    placer = Placer(
        fleet, config=Config(), metrics=PlacementMetrics(MetricRegistry()), clock=time.monotonic, rng=rng,
        new_id=lambda: str(next(ids)), servers=servers, process="a",
    )  # fmt: skip
    placer.start()
    async with asyncio.timeout(MEET_S):
        while not placer.weights.table.others:
            await asyncio.sleep(0.05)
    placed_s, took_s = [], []
    for number in range(placements):
        ask = PlacementRequest(
            Question("m", NUM_TOKENS, block_hashes=np.full(NUM_TOKENS // BLOCK_TOKENS, number, np.uint64))
        )
        began_s = time.monotonic()
        placer.reserve(ask, anyway=True)
        took_s.append(time.monotonic() - began_s)
        placed_s.append(began_s)
        await asyncio.sleep(rng.expovariate(per_second))
    await asyncio.sleep(SETTLE_S)
    await placer.stop()
    await servers.close()
    return placed_s, took_s


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--placements", type=int, default=1_000)
    parser.add_argument("--per-second", type=float, default=100.0)
    arguments = parser.parse_args()
    print_setting()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with scratch() as folder, StoreServer(folder) as server:
        other = context.Process(target=hear_process, args=(server.url, theirs))
        other.start()
        placed_s, took_s = asyncio.run(place(server.url, arguments.placements, arguments.per_second))
        ours.send("stop")
        heard: list[tuple[float, int]] = ours.recv()
        other.join()
    counts = [requests for _, requests in heard]
    if not counts or counts[-1] < arguments.placements:
        raise SystemExit(
            f"the other process heard of {counts[-1] if counts else 0} of {arguments.placements} placements"
        )
    seen_s = [heard[bisect_left(counts, n + 1)][0] - then for n, then in enumerate(placed_s)]
    print("| | p50 | p99 | longest |\n|---|---|---|---|")
    for measured, values, unit, form in (
        ("counted at the other, ms", seen_s, 1e3, ".1f"),
        ("reserve, us", took_s, 1e6, ".0f"),
    ):
        cuts = statistics.quantiles(values, n=100)
        print(f"| {measured} | {cuts[49] * unit:{form}} | {cuts[98] * unit:{form}} | {max(values) * unit:{form}} |")


if __name__ == "__main__":
    main()
