# SPDX-License-Identifier: Apache-2.0
"""Claim: replicas that fetch what another one holds reuse nearly as much as one replica with all their memory.

    python -m benchmarks.peer_pulls TRACE... [--shape gemma3]... [--rate 10]... [--load 1]... [--workers 16]
        [--cache-tokens 400000] [--cpu-tokens 1000000] [--requests N] [--without lmetric]... [--seed 1]...
        [--placed-by random] [--offers] [--json FILE]

As in `kvrouter replay`, simulated replicas in virtual time decide as vLLM does, and the router's own ingest, mirror,
matcher, cost and load place the requests. A rate of 10 is a link that transfers a token 10 times as fast as a replica
computes it. At a load of 1, each replica gets as many requests a second as one of eight that share the trace as it is.
Traces are in Mooncake's format.

- Of it: the reused tokens, as a share of those of one replica with the memory of all, GPU and CPU, which serves one request
  after another (pooled).
- Left: the tokens that some worker held when a request came and that its own worker neither held nor was to fetch, as the
  same share. What is missing beyond it, no worker held: another one was computing it, or its checkpoint was never made.
- Lacking: pulls that promise more than the source and the worker held by the events that the router had seen when it
  chose. The script keeps sets of its own from these events, and walks over them with the engine's rule.
- `short` of the JSON: pulls that promise less than was held.

With --placed-by, another policy than `kv` chooses the worker, so that more requests fetch, and nothing runs without pulls.
With --offers, lacking and short count all pulls of all workers among which each choice was made.
"""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from itertools import product
from pathlib import Path
from typing import Protocol

import msgspec

from benchmarks.report import machine, parser_of
from kvrouter.replay.fleet.fleet_shape import (
    CACHE_TOKENS,
    REPLICAS,
    TIMING,
    FleetShape,
    PeerSpeed,
    ReplicaShape,
    blocks_of,
    geometry_of,
)
from kvrouter.replay.fleet.virtual_fleet import EVENT_LAG_S, MODEL
from kvrouter.replay.policies.routing import Placed
from kvrouter.replay.policies.this_router import PULLING, ThisRouter
from kvrouter.replay.runs.policy_run import Summary
from kvrouter.replay.runs.pooled import pooled_reuse
from kvrouter.replay.runs.simulate import FOREVER, Simulation, no_collection
from kvrouter.replay.traces.formats import read_trace
from kvrouter.replay.traces.mooncake import PIECE_TOKENS
from kvrouter.replay.traces.request import Trace
from kvrouter.router.index.matching.question import Question
from kvrouter.router.route.placement.policies import KV
from kvrouter.simulator.cache.cpu_tier import CacheEvent, EvictedChunk, OffloadedChunk
from kvrouter.simulator.cache.job import Job
from kvrouter.simulator.cache.pool import Key
from kvrouter.simulator.cache.text import PieceText
from kvrouter.simulator.engine.timing import TOKEN_BYTES
from kvrouter.simulator.engine.virtual_time import VirtualReplica

# The way of a question to a source and back.
LATENCY_S = 0.001
WORKERS = 16
# 128 GB of a host's memory for each GPU, at 128 KiB a token.
CPU_TOKENS = 1_000_000


class Run(msgspec.Struct):
    """One run and its figures."""

    trace: str
    shape: str
    # The transfer's speed by that of computing; 0 without pulls.
    rate: float
    load: float
    seed: int
    requests: int
    summary: Summary
    pooled_tokens: int
    # Pulls that were checked, those that promise more than was held, and those that promise less.
    checked: int
    lacking: int
    short: int
    left_tokens: int
    wall_s: float


class Options(Protocol):
    """The options of the command line that a run reads."""

    placed_by: str
    offers: bool


class CheckedSimulation(Simulation):
    """A run that checks each pull at the moment of choice against what the events said."""

    def __init__(self, trace: Trace, shape: FleetShape, policy: str, seed: int, load: float, options: Options) -> None:
        # The chunks of each CPU tier by the events that the router has seen.
        self.held: list[set[Key]] = [set() for _ in shape.replicas]
        self.under_way: deque[tuple[float, int, list[CacheEvent]]] = deque()
        self.checked = self.lacking = self.short = self.left_tokens = 0
        super().__init__(trace, shape, policy, seed, load * len(shape.replicas) / REPLICAS)
        self.checks_offers = options.offers
        if options.placed_by != KV:
            self.router = ThisRouter(self.index, options.placed_by, seed)

    def _replica(self, number: int) -> VirtualReplica:
        def published(now_s: float, events: list[CacheEvent]) -> None:
            self.index.published(number, events, now_s)
            chunks: list[CacheEvent] = [event for event in events if isinstance(event, OffloadedChunk | EvictedChunk)]
            self.under_way.append((now_s + EVENT_LAG_S, number, chunks))

        return self._shape.replica(number, published)

    def _submit(self, placed: Placed, number: int, text: PieceText, now_s: float) -> Job:
        pull, promised_tokens = placed.pull, placed.predicted_tokens
        if self.checks_offers:
            self._see_events(now_s)
            question = Question(MODEL, text.num_tokens, block_hashes=self._arrival(number).hashes)
            for worker, hit in enumerate(self.index.hits(question)):
                for offer in hit.pulls:
                    self._check(worker, self.index.keys.index(offer.source), hit.on_gpu, offer.tokens, text)
        elif pull is not None:
            self._see_events(now_s)
            self._check(placed.number, pull.source, pull.on_gpu, pull.tokens, text)
        if pull is not None:
            promised_tokens = pull.tokens
        self.left_tokens += max(0, placed.achievable_tokens - promised_tokens)
        return super()._submit(placed, number, text, now_s)

    def _see_events(self, now_s: float) -> None:
        while self.under_way and self.under_way[0][0] <= now_s:
            _, number, events = self.under_way.popleft()
            for event in events:
                if isinstance(event, OffloadedChunk):
                    self.held[number].add(event.key)
                elif isinstance(event, EvictedChunk):
                    self.held[number] -= {Key(event.group_idx, block) for block in event.hashes}

    def _check(self, worker: int, lender: int, on_gpu: int, tokens: int, text: PieceText) -> None:
        offload = self.fleet.replicas[worker].replica.offload
        assert offload is not None
        own, source = self.held[worker], self.held[lender]
        loaded = offload.reach(text.hashes, text.num_tokens, on_gpu, lambda key: key in own or key in source)
        self.checked += 1
        self.lacking += on_gpu + loaded < tokens
        self.short += on_gpu + loaded > tokens


def simulated(
    trace: Trace, shape: FleetShape, name: str, policy: str, rate: float, load: float, seed: int, options: Options
) -> Run:
    simulation = CheckedSimulation(trace, shape, policy, seed, load, options)
    began_s = time.perf_counter()
    with no_collection():
        for number in range(len(trace.requests)):
            simulation.arrive(number)
        simulation.advance(FOREVER)
    wall_s = time.perf_counter() - began_s
    checks = simulation.checked, simulation.lacking, simulation.short, simulation.left_tokens
    return Run(trace.name, name, rate, load, seed, len(trace.requests), simulation.run.summary(), 0, *checks, wall_s)


def shape_of(name: str, workers: int, cache_tokens: int, cpu_tokens: int, rate: float) -> FleetShape:
    geometry = geometry_of(name, PIECE_TOKENS)
    replica = ReplicaShape(blocks_of(geometry, cache_tokens), blocks_of(geometry, cpu_tokens))
    bytes_per_s = rate * TIMING.prefill_tokens_per_s * TOKEN_BYTES
    peer = PeerSpeed(bytes_per_s, LATENCY_S) if rate else None
    return FleetShape(geometry, (replica,) * workers, peer=peer)


HEAD = (
    f"{'trace':<14}{'shape':<12}{'policy':<14}{'rate':>5}{'load':>5}{'seed':>5}{'reused':>9}{'pooled':>8}{'of it':>7}{'left':>7}"
    f"{'TTFT':>8}{'p95':>8}{'pulls':>8}{'fetched':>9}{'short':>7}{'lacking':>8}"
)


def line(run: Run) -> str:
    row = run.summary
    missing = row.late_tokens + row.gone_tokens + row.no_room_tokens + row.evicted_tokens
    return (
        f"{run.trace.removeprefix('mooncake_').removesuffix('.jsonl').removesuffix('_trace'):<14}{run.shape:<12}"
        f"{row.policy:<14}{run.rate or '-':>5}{run.load:>5}{run.seed:>5}{row.reused_tokens / 1e6:>8.2f}M"
        f"{run.pooled_tokens / 1e6:>7.2f}M{row.reused_tokens / max(1, run.pooled_tokens):>7.1%}"
        f"{run.left_tokens / max(1, run.pooled_tokens):>7.2%}"
        f"{row.ttft_mean_s:>8.3f}{row.ttft_p95_s:>8.2f}{row.pulls:>8}{row.pulled_tokens / 1e6:>8.2f}M"
        f"{missing / max(1, missing + row.pulled_tokens):>7.2%}{run.lacking:>8}"
    )


def main() -> None:
    parser = parser_of(__doc__, result=True)
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--shape", action="append")
    parser.add_argument("--rate", action="append", type=float)
    parser.add_argument("--load", action="append", type=float)
    parser.add_argument("--without", action="append")
    parser.add_argument("--workers", type=int, default=WORKERS)
    parser.add_argument("--cache-tokens", type=int, default=CACHE_TOKENS)
    parser.add_argument("--cpu-tokens", type=int, default=CPU_TOKENS)
    parser.add_argument("--requests", type=int, default=0)
    parser.add_argument("--seed", action="append", type=int)
    parser.add_argument("--placed-by", default=KV)
    parser.add_argument("--offers", action="store_true")
    options = parser.parse_args()
    runs: list[Run] = []
    print(HEAD, flush=True)
    for path, name in product(options.traces, options.shape or ["gemma3", "qwen3-next"]):
        trace = read_trace(path, "mooncake", requests=options.requests)
        size = options.workers, options.cache_tokens, options.cpu_tokens
        pooled_tokens = sum(pooled_reuse(trace, shape_of(name, *size, 0)))
        for load, seed in product(options.load or [1.0], options.seed or [1]):
            plain = [(policy, 0.0) for policy in (options.without or [KV]) if options.placed_by == KV]
            for policy, rate in [*plain, *((PULLING, rate) for rate in options.rate or [10.0])]:
                fleet = shape_of(name, *size, rate)
                run = simulated(trace, fleet, name, policy, rate, load, seed, options)
                run.pooled_tokens = pooled_tokens
                runs.append(run)
                print(line(run), flush=True)
    answer = {"command": " ".join(sys.argv[1:]), "machine": machine(), "runs": msgspec.to_builtins(runs)}
    if options.json is not None:
        options.json.write_text(json.dumps(answer, indent=1) + "\n")
    pulls, lacking = sum(run.checked for run in runs), sum(run.lacking for run in runs)
    print(f"{pulls:,} pulls checked, {lacking:,} of which named chunks that their source lacked")


if __name__ == "__main__":
    main()
