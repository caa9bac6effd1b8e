# SPDX-License-Identifier: Apache-2.0
"""Claim: on a request trace over hybrid models, the router's cost reuses more and answers sooner than other policies.

    python -m benchmarks.fleet_trace TRACE [--shape gpt-oss]... [--policy kv]... [--seed 1]... [--cache-tokens 400000]
        [--speedup 1] [--requests N] [--count-from N] [--results FILE]

Simulated replicas in virtual time make the decisions and events of vLLM's scheduler. They are followed by the router's
own ingest, mirror, matcher, cost and load, all as in `kvrouter replay` (replay/runs/simulate.py). TRACE has a JSON
object a line: timestamp (ms), input_length, output_length, hash_ids (one for each 512 tokens), as the Mooncake project
publishes them.

- Achievable: the hit of the best replica at the moment of choice, summed over all requests. It depends on where the run
  itself has placed earlier requests.
- Endless: the reuse of a single replica of the shape whose cache is endless and which serves one request after another.
  No engine that keeps checkpoints as vLLM does can reuse more.
- Prefill: the share of the replicas' time that computing prompts takes.

A run that the --results file already has is not repeated. The script prints a table, the command and the machine.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from itertools import groupby, product
from pathlib import Path

import msgspec

from benchmarks.report import machine, parser_of
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

# The size of the trace's pieces, as the trace has no finer resolution.
BLOCK_TOKENS = PIECE_TOKENS
# Random numbers decide between equal costs, and a run takes another course after each such decision, so several seeds
# are needed to tell a difference between policies.
SEEDS = (1, 2, 3)
ENDLESS = "endless"
CHOICES = (ENDLESS, KV, *OTHERS)


class Setting(msgspec.Struct, frozen=True):
    """The parameters of one run."""

    trace: str
    shape: str
    policy: str
    seed: int
    cache_tokens: int = CACHE_TOKENS
    # The factor by which requests come sooner than in the trace.
    speedup: float = 1.0
    # The number of requests, from the first one of the trace on.
    requests: int = 0


class Run(msgspec.Struct):
    """A setting and its results; each list has a number for each request, in the order of the trace."""

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
    # The reused tokens by the achievable ones.
    achieved: float
    # The mean time to the first token.
    ttft_s: float
    p50_s: float
    p95_s: float
    p99_s: float
    # The share of the replicas' time that computing prompts takes, over all requests of the run.
    prefill: float


def endless(setting: Setting, trace: Trace) -> Run:
    """Run the trace on one replica whose blocks never run out, one request at a time."""
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
    """Summarize the requests from number `count_from` on; `prefill` covers all requests."""
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
    """Format the mean of the values, followed by the largest deviation from it if there are several values."""
    kept = list(values)
    mean = statistics.fmean(kept)
    if len(kept) == 1:
        return format(mean, form)
    return f"{mean:{form}} ± {max(abs(value - mean) for value in kept):{form}}"


HEADER = (
    "| shape | policy | reused, M tokens | of the prompts | of the achievable | TTFT mean, s | p50 | p95 | p99 | prefill |\n"
    + "|---" * 10
    + "|"
)


def rows(runs: Iterable[Run], count_from: int) -> Iterator[str]:
    """Yield one row of the table for all seeds of each shape and policy, in the order in which they come."""
    for (shape, policy), same_kind in groupby(runs, lambda run: (run.setting.shape, run.setting.policy)):
        by_seed = [summary(run, count_from) for run in same_kind]
        reused = spread((each.reused / 1e6 for each in by_seed), ".2f")
        share = f"{statistics.fmean(each.reused / each.prompt for each in by_seed):.1%}"
        if policy == ENDLESS:
            yield f"| {shape} | {policy} | {reused} | {share} | | | | | | |"
            continue
        yield (
            f"| {shape} | {policy} | {reused} | {share} | {statistics.fmean(each.achieved for each in by_seed):.1%} | "
            f"{spread((each.ttft_s for each in by_seed), '.3f')} | "
            f"{statistics.fmean(each.p50_s for each in by_seed):.2f} | {spread((each.p95_s for each in by_seed), '.2f')} | "
            f"{statistics.fmean(each.p99_s for each in by_seed):.2f} | {statistics.fmean(each.prefill for each in by_seed):.0%} |"
        )


def main() -> None:
    parser = parser_of(__doc__)
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
    arguments = parser.parse_args()
    trace = read_trace(arguments.trace, "mooncake", requests=arguments.requests)
    print(f"{' '.join(['python', *sys.argv])}\n{json.dumps(machine())}\n{HEADER}", flush=True)
    stored_runs: dict[Setting, Run] = {}
    if arguments.results is not None and arguments.results.exists():
        stored_runs = {
            (stored_run := msgspec.json.decode(line, type=Run)).setting: stored_run
            for line in arguments.results.open("rb")
        }
    for shape, policy in product(arguments.shape or SHAPES, arguments.policy or CHOICES):
        runs = []
        # One seed is enough for policies whose runs do not depend on random numbers.
        for seed in (arguments.seed or SEEDS)[: 1 if policy in (ENDLESS, "round_robin") else None]:
            setting = Setting(
                arguments.trace.name,
                shape,
                policy,
                seed,
                arguments.cache_tokens,
                arguments.speedup,
                len(trace.requests),
            )
            run = stored_runs.get(setting)
            if run is None:
                run = endless(setting, trace) if policy == ENDLESS else simulated(setting, trace)
                if arguments.results is not None:
                    with arguments.results.open("ab") as lines:
                        lines.write(msgspec.json.encode(run) + b"\n")
            runs.append(run)
        for row in rows(runs, arguments.count_from):
            print(row, flush=True)


if __name__ == "__main__":
    main()
