# SPDX-License-Identifier: Apache-2.0
"""Claim: on a request trace over hybrid models, the router's cost reuses more and answers sooner than what else is
done.

    python benchmarks/fleet_trace.py TRACE [--shape gpt-oss]... [--policy kv]... [--seed 1]... [--cache-tokens 400000]
        [--speedup 1] [--requests N] [--count-from N] [--results FILE]

Simulated replicas in virtual time (simulator/engine/virtual_time.py), whose decisions and events are those of vLLM's
scheduler; the router's own ingest, mirror, matcher, cost and load (virtual_router.py). TRACE has a JSON object a line:
timestamp (ms), input_length, output_length, hash_ids (one for each 512 tokens), as the Mooncake project publishes them.

Achievable: over all requests, the hit of the best replica at the moment of choice: it depends on what the run itself
has placed where. Endless: what a single replica of the shape would reuse whose cache is endless and which serves one
request after another; nothing that keeps checkpoints as vLLM does can reuse more. Prefill: the share of the replicas'
time that computing prompts takes. A run that --results already has is not made again. Prints a table, the command and
the machine."""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, product
from pathlib import Path

import msgspec
from report import machine
from virtual_router import VirtualFleet, VirtualRouter

from kvrouter.router.load.engine_metrics import EngineLoad
from kvrouter.router.placement.placement_request import Placement
from kvrouter.router.placement.policies import KV, OTHERS
from kvrouter.simulator.cache.cpu_tier import CacheEvent
from kvrouter.simulator.cache.job import Job
from kvrouter.simulator.cache.shapes import SHAPES, Geometry, make_geometry
from kvrouter.simulator.cache.text import PieceText
from kvrouter.simulator.engine.replica import Replica
from kvrouter.simulator.engine.timing import Timing
from kvrouter.simulator.engine.virtual_time import ReplicaFleet, VirtualReplica

PIECE_TOKENS = 512
REPLICAS = 8
# Longer than any prompt of a trace: none is refused.
CONTEXT_TOKENS = 2**20
# A trace distinguishes prompts in whole pieces, so a next turn leaves the prompt before it at a piece's end. With
# smaller blocks the checkpoint at a prompt's end would lie in its last, partial piece, where no trace can show that the
# next turn goes on.
BLOCK_TOKENS = PIECE_TOKENS
# What a replica's cache holds, in tokens of all layers: an H100's 80 GB less 16 GB of weights, at 128 KiB a token.
CACHE_TOKENS = 400_000
# A replica that the conversation trace loads to about a half: 12 k tokens a prompt and 0.43 prompts a second for each
# of eight.
TIMING = Timing(prefill_tokens_per_s=10_000.0, step_base_s=0.015, decode_sequence_s=0.0004)
# Chance decides between equal costs, and a trace's way forks at each: more than one way is needed to tell a difference.
SEEDS = (1, 2, 3)
ENDLESS = "endless"
CHOICES = (ENDLESS, KV, *OTHERS)


class Request(msgspec.Struct):
    """One line of the trace."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


class Setting(msgspec.Struct, frozen=True):
    """What one run is made with. first, requests: which of the trace; speedup: how many times sooner they come than it
    says."""

    trace: str
    shape: str
    policy: str
    seed: int
    cache_tokens: int = CACHE_TOKENS
    speedup: float = 1.0
    requests: int = 0


class Outcome(msgspec.Struct):
    """What became of one request. Tokens, seconds of virtual time."""

    prompt: int
    achievable: int
    predicted: int
    reused: int = 0
    ttft_s: float = 0.0


class Run(msgspec.Struct):
    """A setting and what came of it, a list for each number, in the order of the trace."""

    setting: Setting
    prompt: list[int]
    achievable: list[int]
    predicted: list[int]
    reused: list[int]
    ttft_ms: list[int]
    span_s: float
    wall_s: float


class Summary(msgspec.Struct):
    """Some of a run's requests together: tokens, seconds, shares."""

    prompt: int
    reused: int
    achieved: float
    ttft_s: float
    p50_s: float
    p95_s: float
    p99_s: float
    prefill: float


def read(path: Path, count: int) -> Iterator[Request]:
    decode = msgspec.json.Decoder(Request).decode
    with path.open("rb") as lines:
        for number, line in enumerate(lines):
            if number == count:
                return
            yield decode(line)


def geometry_of(shape: str) -> Geometry:
    return make_geometry(shape, block_size=BLOCK_TOKENS)


def blocks_of(geometry: Geometry, cache_tokens: int) -> int:
    """A block holds its tokens for the layers of one group; so memory for as many tokens has as many more blocks."""
    return len(geometry.groups) * cache_tokens // max(group.block_size for group in geometry.groups)


def text_of(request: Request, geometry: Geometry, number: int) -> PieceText:
    size = geometry.hash_block_size
    return PieceText(
        request.hash_ids, request.input_length, piece_tokens=PIECE_TOKENS, hash_block_size=size, number=number
    )


def endless(setting: Setting, requests: Sequence[Request]) -> Run:
    """One replica for all, whose blocks never run out, one request at a time."""
    geometry, began_s = geometry_of(setting.shape), time.perf_counter()
    a_block = min(group.block_size for group in geometry.groups)
    # Full attention keeps each token once, the others less.
    blocks = 2 * sum(request.input_length for request in requests) // a_block
    replica = Replica(geometry, blocks, on_step=lambda events: None, max_text_tokens=CONTEXT_TOKENS)
    reused = []
    for number, request in enumerate(requests):
        job = replica.submit(text_of(request, geometry, number), 1)
        while not job.finished:
            replica.end_step(replica.begin_step())
        reused.append(job.cached)
    lengths = [request.input_length for request in requests]
    return Run(setting, lengths, reused, reused, reused, [], 0.0, time.perf_counter() - began_s)


def simulate(setting: Setting, requests: Sequence[Request]) -> Run:
    geometry = geometry_of(setting.shape)
    router_fleet = VirtualFleet(geometry, REPLICAS)
    router = VirtualRouter(router_fleet, setting.policy, setting.seed)
    numbers = {key: number for number, key in enumerate(router_fleet.keys)}

    def published(number: int, events: list[CacheEvent]) -> None:
        # Within a step that ends: the clock must show that already.
        ends_s = fleet.replicas[number].next_s
        assert ends_s is not None
        router_fleet.now_s = ends_s
        router_fleet.published(number, events)

    def replica(number: int) -> VirtualReplica:
        blocks = blocks_of(geometry, setting.cache_tokens)
        made = Replica(
            geometry, blocks, on_step=lambda events: published(number, events), max_text_tokens=CONTEXT_TOKENS
        )
        return VirtualReplica(made, TIMING)

    fleet = ReplicaFleet([replica(number) for number in range(REPLICAS)])
    began_s = time.perf_counter()
    placed: dict[Job, tuple[Placement, Outcome, float]] = {}
    outcomes: list[Outcome] = []
    end_s = 0.0

    def advance(until_s: float) -> None:
        nonlocal end_s
        for moment in fleet.advance(until_s):
            router_fleet.now_s = end_s = moment.time_s
            placement, outcome, arrived_s = placed[moment.job]
            if moment.kind == "first_token":
                placement.first_token()
                outcome.ttft_s = moment.time_s - arrived_s
                outcome.reused = moment.job.cached
            else:
                placement.done(moment.job.sampled)
                del placed[moment.job]

    for number, request in enumerate(requests):
        now_s = request.timestamp / 1000 / setting.speedup
        advance(now_s)
        router_fleet.now_s = now_s
        router.tend([
            EngineLoad(len(one.replica.scheduler.waiting), len(one.replica.scheduler.running), one.replica.cache.usage)
            for one in fleet.replicas
        ])  # fmt: skip
        size = geometry.hash_block_size
        hashes = PieceText.hash_numbers(request.hash_ids, request.input_length, PIECE_TOKENS, size)
        placement = router.place(hashes, request.input_length, request.output_length)
        outcome = Outcome(request.input_length, placement.choice.best_hit_tokens, placement.choice.hit.disk)
        outcomes.append(outcome)
        job = fleet.submit(
            numbers[placement.worker], text_of(request, geometry, number), max(1, request.output_length), now_s
        )
        placed[job] = (placement, outcome, now_s)
    advance(float("inf"))
    return Run(
        setting,
        [one.prompt for one in outcomes],
        [one.achievable for one in outcomes],
        [one.predicted for one in outcomes],
        [one.reused for one in outcomes],
        [round(one.ttft_s * 1000) for one in outcomes],
        end_s,
        time.perf_counter() - began_s,
    )


def summary(run: Run, count_from: int) -> Summary:
    """Of the requests from this one on; `prefill` is of all."""
    prompt, reused = sum(run.prompt[count_from:]), sum(run.reused[count_from:])
    cuts = statistics.quantiles(run.ttft_ms[count_from:] or [0, 0], n=100)
    rate = TIMING.prefill_tokens_per_s * REPLICAS * run.span_s
    return Summary(
        prompt,
        reused,
        reused / max(1, sum(run.achievable[count_from:])),
        statistics.fmean(run.ttft_ms[count_from:] or [0]) / 1000,
        cuts[49] / 1000,
        cuts[94] / 1000,
        cuts[98] / 1000,
        (sum(run.prompt) - sum(run.reused)) / rate if rate else 0.0,
    )


def spread(values: Iterable[float], form: str) -> str:
    """The mean, and how far the furthest is from it where there are several."""
    found = list(values)
    mean = statistics.fmean(found)
    if len(found) == 1:
        return format(mean, form)
    return f"{mean:{form}} ± {max(abs(value - mean) for value in found):{form}}"


HEADER = (
    "| shape | policy | reused, M tokens | of the prompts | of the achievable | TTFT mean, s | p50 | p95 | p99 | prefill |\n"
    + "|---" * 10
    + "|"
)


def rows(runs: Iterable[Run], count_from: int) -> Iterator[str]:
    """One for all seeds of one shape and policy, in the order in which they come."""
    for (shape, policy), found in groupby(runs, lambda run: (run.setting.shape, run.setting.policy)):
        made = [summary(run, count_from) for run in found]
        reused = spread((one.reused / 1e6 for one in made), ".2f")
        share = f"{statistics.fmean(one.reused / one.prompt for one in made):.1%}"
        if policy == ENDLESS:
            yield f"| {shape} | {policy} | {reused} | {share} | | | | | | |"
            continue
        yield (
            f"| {shape} | {policy} | {reused} | {share} | {statistics.fmean(one.achieved for one in made):.1%} | "
            f"{spread((one.ttft_s for one in made), '.3f')} | "
            f"{statistics.fmean(one.p50_s for one in made):.2f} | {spread((one.p95_s for one in made), '.2f')} | "
            f"{statistics.fmean(one.p99_s for one in made):.2f} | {statistics.fmean(one.prefill for one in made):.0%} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--shape", action="append", choices=SHAPES)
    parser.add_argument("--policy", action="append", choices=CHOICES)
    parser.add_argument("--seed", action="append", type=int)
    parser.add_argument("--requests", type=int, default=0, help="only the first N")
    parser.add_argument("--count-from", type=int, default=0, help="the table counts the requests from this one on")
    parser.add_argument("--speedup", type=float, default=1.0, help="factor by which requests come faster")
    parser.add_argument("--cache-tokens", type=int, default=CACHE_TOKENS, help="what a replica's cache holds")
    parser.add_argument(
        "--results", type=Path, help="JSON lines: runs that are there are not made again, others are added"
    )
    given = parser.parse_args()
    # Blocks and jobs are some millions of objects, and nearly none of them is garbage in a cycle.
    gc.disable()
    requests = list(read(given.trace, given.requests or -1))
    print(f"{' '.join(['python', *sys.argv])}\n{json.dumps(machine())}\n{HEADER}", flush=True)
    known: dict[Setting, Run] = {}
    if given.results is not None and given.results.exists():
        known = {(one := msgspec.json.decode(line, type=Run)).setting: one for line in given.results.open("rb")}
    for shape, policy in product(given.shape or SHAPES, given.policy or CHOICES):
        runs = []
        # Nothing is equal to itself in another order: the first seed is enough where chance has no part.
        for seed in (given.seed or SEEDS)[: 1 if policy in (ENDLESS, "round_robin") else None]:
            setting = Setting(given.trace.name, shape, policy, seed, given.cache_tokens, given.speedup, len(requests))
            run = known.get(setting)
            if run is None:
                run = endless(setting, requests) if policy == ENDLESS else simulate(setting, requests)
                if given.results is not None:
                    with given.results.open("ab") as lines:
                        lines.write(msgspec.json.encode(run) + b"\n")
            runs.append(run)
        for row in rows(runs, given.count_from):
            print(row, flush=True)


if __name__ == "__main__":
    main()
