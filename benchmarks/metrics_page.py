# SPDX-License-Identifier: Apache-2.0
"""The cost of a page of metrics to a router with many workers.

Measured are the page's size, its time, the longest time for which it holds up the event loop, and the part of
`kvrouter_resident_blocks` in them.

    python -m benchmarks.metrics_page [--workers 1000] [--rounds 5]
"""

from __future__ import annotations

import asyncio
import statistics
import time

from benchmarks.report import machine, parser_of
from kvrouter.contract.tiers import MEDIA
from kvrouter.router.app.server.router_metrics import RouterMetrics
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.base.telemetry.metric_registry import MetricRegistry
from kvrouter.router.model.workers.stream_state import StreamState

GROUPS = 6
BLOCKS = 5_000
MS = 1_000


def counted(workers: int) -> tuple[MetricRegistry, RouterMetrics, list[WorkerKey]]:
    """Return the metrics of a router whose workers have all got requests, their registry and the workers."""
    registry = MetricRegistry()
    metrics = RouterMetrics(registry)
    keys = [WorkerKey("model", f"worker-{number}") for number in range(workers)]
    streams, load = metrics.core.streams, metrics.placement.load
    for worker in keys:
        for counter in streams.tallied.values():
            counter(worker).inc()
        for state in StreamState:
            streams.state(worker)(state).set(state is StreamState.LIVE)
        for gauge in (
            *(streams.commit_lag_seconds, streams.backlog_blocks, streams.log_tail_blocks),
            *(load.queued_tokens, load.decode_tokens, load.requests, load.saturated),
        ):
            gauge(worker).set(1)
        metrics.quality.of_worker(worker)
    return registry, metrics, keys


async def measured(registry: MetricRegistry, rounds: int) -> tuple[float, float, bytes]:
    """Return the seconds of a page and of its longest turn of the event loop (medians of the rounds), and the page."""
    pages, turns = [], []
    for _ in range(rounds):
        longest = 0.0
        writing = asyncio.create_task(registry.own_page())
        began = before = time.perf_counter()
        while not writing.done():
            await asyncio.sleep(0)
            now = time.perf_counter()
            longest, before = max(longest, now - before), now
        pages.append(before - began)
        turns.append(longest)
    return statistics.median(pages), statistics.median(turns), writing.result()


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--workers", type=int, default=1_000)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    registry, metrics, keys = counted(arguments.workers)
    places = {f"g{group}:{medium}": BLOCKS for group in range(GROUPS) for medium in MEDIA}
    for what, held in (("without resident blocks", ()), (f"with {len(places)} places a worker", keys)):
        metrics.core.resident_blocks.counts = lambda held=held: ((worker, places) for worker in held)  # type: ignore[misc]
        page_s, turn_s, page = asyncio.run(measured(registry, arguments.rounds))
        samples = sum(not line.startswith(b"#") for line in page.splitlines())
        print(
            f"{arguments.workers} workers, {what}: {samples} samples, {len(page) / 2**20:.1f} MiB, "
            f"{page_s * MS:.0f} ms, the longest turn {turn_s * MS:.0f} ms"
        )
    print("Machine: " + "; ".join(f"{name}: {value}" for name, value in machine().items()))


if __name__ == "__main__":
    main()
