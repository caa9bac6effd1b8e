# SPDX-License-Identifier: Apache-2.0
"""Claim: on a request trace over hybrid models, the router's cost reuses more and answers sooner than what else is
done.

    python -m benchmarks.fleet_trace TRACE [--shape gpt-oss]... [--policy kv]... [--seed 1]... [--cache-tokens 400000]
        [--speedup 1] [--requests N] [--count-from N] [--results FILE]

Simulated replicas in virtual time, whose decisions and events are those of vLLM's scheduler; the router's own ingest,
mirror, matcher, cost and load: all as in `kvrouter replay` (replay/runs/simulate.py). TRACE has a JSON object a line:
timestamp (ms), input_length, output_length, hash_ids (one for each 512 tokens), as the Mooncake project publishes them.

Achievable: over all requests, the hit of the best replica at the moment of choice: it depends on what the run itself
has placed where. Endless: what a single replica of the shape would reuse whose cache is endless and which serves one
request after another; nothing that keeps checkpoints as vLLM does can reuse more. Prefill: the share of the replicas'
time that computing prompts takes. A run that --results already has is not made again. Prints a table, the command and
the machine."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from itertools import groupby, product
from pathlib import Path

import msgspec

from benchmarks.report import machine
from kvrouter.replay.fleet.fleet_shape import (
    CACHE_TOKENS,
    REPLICAS,
    TIMING,
    FleetShape,
    ReplicaShape,
    blocks_of,
    geometry_of,
)
from kvrouter.replay.runs.pooled import endless_reuse
from kvrouter.replay.runs.simulate import simulate
from kvrouter.replay.traces.formats import read_trace
from kvrouter.replay.traces.mooncake import PIECE_TOKENS
from kvrouter.replay.traces.request import Trace
from kvrouter.router.route.placement.policies import KV, OTHERS
from kvrouter.simulator.cache.shapes import SHAPES

# The size of the trace's pieces: the trace says nothing finer.
BLOCK_TOKENS = PIECE_TOKENS
# Chance decides between equal costs, and a trace's way forks at each: more than one way is needed to tell a difference.
SEEDS = (1, 2, 3)
ENDLESS = "endless"
CHOICES = (ENDLESS, KV, *OTHERS)


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


def endless(setting: Setting, trace: Trace) -> Run:
    """One replica for all, whose blocks never run out, one request at a time."""
    began_s = time.perf_counter()
    reused = endless_reuse(trace, geometry_of(setting.shape, BLOCK_TOKENS))
    lengths = [request.prompt_tokens for request in trace.requests]
    return Run(setting, lengths, reused, reused, reused, [], 0.0, time.perf_counter() - began_s)


def simulated(setting: Setting, trace: Trace) -> Run:
    geometry = geometry_of(setting.shape, BLOCK_TOKENS)
    shape = FleetShape(geometry, (ReplicaShape(blocks_of(geometry, setting.cache_tokens)),) * REPLICAS)
    run = simulate(trace, shape, setting.policy, setting.seed, speedup=setting.speedup)
    if run.partial:
        raise KeyboardInterrupt
    if run.refused:
        sys.exit(f"{run.refused} requests fit no replica: {run.refusal}")
    return Run(
        setting,
        run.prompt.tolist(),
        run.achievable.tolist(),
        run.predicted.tolist(),
        run.reused.tolist(),
        [round(ttft_s * 1000) for ttft_s in run.ttft_s],
        run.span_s,
        run.wall_s,
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
    trace = read_trace(given.trace, "mooncake", requests=given.requests)
    print(f"{' '.join(['python', *sys.argv])}\n{json.dumps(machine())}\n{HEADER}", flush=True)
    known: dict[Setting, Run] = {}
    if given.results is not None and given.results.exists():
        known = {(one := msgspec.json.decode(line, type=Run)).setting: one for line in given.results.open("rb")}
    for shape, policy in product(given.shape or SHAPES, given.policy or CHOICES):
        runs = []
        # Nothing is equal to itself in another order: the first seed is enough where chance has no part.
        for seed in (given.seed or SEEDS)[: 1 if policy in (ENDLESS, "round_robin") else None]:
            setting = Setting(
                given.trace.name, shape, policy, seed, given.cache_tokens, given.speedup, len(trace.requests)
            )
            run = known.get(setting)
            if run is None:
                run = endless(setting, trace) if policy == ENDLESS else simulated(setting, trace)
                if given.results is not None:
                    with given.results.open("ab") as lines:
                        lines.write(msgspec.json.encode(run) + b"\n")
            runs.append(run)
        for row in rows(runs, given.count_from):
            print(row, flush=True)


if __name__ == "__main__":
    main()
