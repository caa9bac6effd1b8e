# SPDX-License-Identifier: Apache-2.0
"""Claim: on a request trace over hybrid models, the router's cost reuses more and answers sooner than what else is done.

    python benchmarks/fleet_trace.py TRACE [--shape gpt-oss]... [--policy kv]... [--requests N]

Simulated replicas in virtual time (simulator/virtual.py), whose decisions and events are those of vLLM's scheduler; the
router's own ingest, mirror, matcher, cost and load (virtual_router.py). TRACE has a JSON object a line: timestamp (ms),
input_length, output_length, hash_ids (one for each 512 tokens), as the Mooncake project publishes them. Achievable: over all
requests, the hit of the best replica at the moment of choice. Prints one line a run, and the command and the machine."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
from report import machine
from virtual_router import VirtualFleet, VirtualRouter

from kvrouter.router.load.gauges import EngineLoad
from kvrouter.router.metrics import LOST_REASONS
from kvrouter.router.placement import Placement
from kvrouter.router.policies import NAMES
from kvrouter.router.warm import warm
from kvrouter.simulator.job import Job
from kvrouter.simulator.replica import Replica
from kvrouter.simulator.shapes import SHAPES, Geometry, make_geometry
from kvrouter.simulator.text import PieceText
from kvrouter.simulator.timing import Timing
from kvrouter.simulator.virtual import Fleet, VirtualReplica

PIECE_TOKENS = 512
REPLICAS = 8
# Block sizes that divide a piece, large enough that a run takes minutes; vLLM's hybrid models with linear attention have 500
# and more.
BLOCK_TOKENS = {"qwen3-next": 512}
USUAL_BLOCK_TOKENS = 64
# What a replica's cache holds, in tokens of all layers: an H100's 80 GB less 16 GB of weights, at 128 KiB a token.
CAPACITY_TOKENS = 400_000
# A replica that the trace loads to about a half: 12 k tokens a prompt and 0.43 prompts a second for each of eight.
TIMING = Timing(prefill_tokens_per_s=10_000.0, step_base_s=0.015, decode_sequence_s=0.0004)


class Request(msgspec.Struct):
    """One line of the trace."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


class Run(msgspec.Struct):
    """What came of one policy on one shape. Tokens; seconds of virtual time, but for `wall_s`."""

    shape: str
    policy: str
    requests: int
    prompt_tokens: int
    reused_tokens: int
    predicted_tokens: int
    achievable_tokens: int
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p95_s: float
    ttft_p99_s: float
    lost: dict[str, int]
    wall_s: float


def read(path: Path, count: int) -> Iterator[Request]:
    decode = msgspec.json.Decoder(Request).decode
    with path.open("rb") as lines:
        for number, line in enumerate(lines):
            if number == count:
                return
            yield decode(line)


def blocks_of(geometry: Geometry) -> int:
    """A block holds its tokens for the layers of one group; so memory for as many tokens has as many more blocks."""
    return len(geometry.groups) * CAPACITY_TOKENS // geometry.groups[0].block_size


def simulate(shape: str, policy: str, requests: list[Request], speedup: float) -> Run:
    """speedup: by how much sooner the requests come than the trace says."""
    geometry = make_geometry(shape, block_size=BLOCK_TOKENS.get(shape, USUAL_BLOCK_TOKENS))
    router_fleet = VirtualFleet(geometry, REPLICAS)
    router = VirtualRouter(router_fleet, policy)
    numbers = {key: number for number, key in enumerate(router_fleet.keys)}

    def replica(number: int) -> VirtualReplica:
        return VirtualReplica(
            Replica(geometry, blocks_of(geometry), on_step=lambda events: router_fleet.published(number, events)),
            TIMING,
        )

    fleet = Fleet([replica(number) for number in range(REPLICAS)])
    began_s = time.perf_counter()
    placed: dict[Job, tuple[Placement, float]] = {}
    ttfts: list[float] = []
    reused = predicted = 0

    def advance(until_s: float) -> None:
        nonlocal reused
        while True:
            # Events of a step are published within the step; the clock must show its end by then.
            next_s = min((one.next_s for one in fleet.replicas if one.next_s is not None), default=None)
            if next_s is None or next_s > until_s:
                return
            router_fleet.now_s = next_s
            for moment in fleet.advance(next_s):
                placement, arrived_s = placed[moment.job]
                if moment.kind == "first_token":
                    placement.first_token()
                    ttfts.append(moment.time_s - arrived_s)
                    reused += moment.job.cached
                else:
                    placement.done(moment.job.sampled)
                    del placed[moment.job]

    for number, request in enumerate(requests):
        now_s = request.timestamp / 1000 / speedup
        advance(now_s)
        router_fleet.now_s = now_s
        router.tend([
            EngineLoad(len(one.replica.scheduler.waiting), len(one.replica.scheduler.running), one.replica.cache.usage)
            for one in fleet.replicas
        ])  # fmt: skip
        size = geometry.hash_block_size
        hashes = PieceText.hash_numbers(request.hash_ids, request.input_length, PIECE_TOKENS, size)
        placement = router.place(hashes, request.input_length, request.output_length)
        predicted += placement.choice.hit.disk
        text = PieceText(
            request.hash_ids, request.input_length, piece_tokens=PIECE_TOKENS, hash_block_size=size, number=number
        )
        job = fleet.submit(numbers[placement.worker], text, max(1, request.output_length), now_s)
        placed[job] = (placement, now_s)
    advance(float("inf"))
    cuts = statistics.quantiles(ttfts, n=100)
    return Run(
        shape, policy, len(requests), sum(r.input_length for r in requests), reused, predicted,
        int(router.counted("achievable_hit_tokens_total")), statistics.fmean(ttfts), cuts[49], cuts[94], cuts[98],
        {why: int(found) for why in LOST_REASONS if (found := router.counted("lost_hit_tokens_total", reason=why))},
        time.perf_counter() - began_s,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--shape", action="append", choices=SHAPES)
    parser.add_argument("--policy", action="append", choices=NAMES)
    parser.add_argument("--requests", type=int, default=2**31, help="only the first so many")
    parser.add_argument("--speedup", type=float, default=1.0, help="requests come so many times as fast")
    parser.add_argument("--json", action="store_true", help="one JSON object a run")
    given = parser.parse_args()
    warm()
    requests = list(read(given.trace, given.requests))
    print(f"{' '.join(['python', *sys.argv])}\n{json.dumps(machine())}", flush=True)
    print(
        "| shape | policy | reused | of the prompts | of the achievable | TTFT mean | p50 | p95 | p99 |\n"
        + "|---" * 9
        + "|"
    )
    for shape in given.shape or ("gemma3", "gpt-oss", "qwen3-next", "llama"):
        for policy in given.policy or NAMES:
            run = simulate(shape, policy, requests, given.speedup)
            print(
                f"| {run.shape} | {run.policy} | {run.reused_tokens / 1e6:.1f} M | {run.reused_tokens / run.prompt_tokens:.1%} | "
                f"{run.reused_tokens / max(1, run.achievable_tokens):.1%} | {run.ttft_mean_s:.2f} s | {run.ttft_p50_s:.2f} | "
                f"{run.ttft_p95_s:.2f} | {run.ttft_p99_s:.2f} |",
                flush=True,
            )
            if given.json:
                print(json.dumps(msgspec.to_builtins(run)), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
