# SPDX-License-Identifier: Apache-2.0
"""The share of prompts that a CPU tier of a given size saves the engine from computing again, with LRU and with ARC.

Request traces are replayed against the tier's own bookkeeping (`CpuTier` and its policies; no bytes are moved). Each
hash id of a trace is one chunk of 512 tokens. A request reuses the longest run of resident chunks from its start. Then
all its chunks become resident: chunks that are there count as used, the others are stored. A request is done before the
next one begins. The hit ratio is the chunks reused by all chunks requested; with endless memory nothing is ever
evicted, so no policy can do better.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from benchmarks.report import Result, Row, finish, machine, parser_of, progress
from kvrouter.engine_patch.offload.key import OffloadKey, pack
from kvrouter.engine_patch.offload.tiers.cpu_tier import ChunkState, CpuTier
from kvrouter.engine_patch.offload.tiers.policy import PolicyError, make_policy

NAME = "offload_hit_ratio"
PATTERN = "mooncake_*_trace.jsonl"
CHUNK_TOKENS = 512
HASH_BYTES = 32
CAPACITIES = (1_000, 2_000, 5_000, 10_000, 20_000, 50_000)
QUICK_CAPACITIES = (500, 2_000)
QUICK_REQUESTS = 500
POLICIES = ("lru", "arc")


class Request(msgspec.Struct):
    """A line of a trace, without the fields that are not needed."""

    hash_ids: list[int]


class Trace(NamedTuple):
    """The requests of a trace."""

    name: str
    # The chunks of each request, in the order of the prompt.
    requests: list[list[OffloadKey]]
    # The chunks of all requests together.
    chunks: int
    # The number of different chunks.
    distinct: int


class Replay(NamedTuple):
    """The outcome of a replay. All counts are of chunks."""

    reused: int
    evicted: int
    # Chunks that were never stored, as their request is longer than the tier.
    unstored: int
    seconds: float


def read_trace(path: Path, requests: int | None) -> Trace:
    """Read the first requests of a trace, or all if `requests` is None."""
    decoder = msgspec.json.Decoder(Request)
    keys: dict[int, OffloadKey] = {}
    requests_as_keys = []
    for line in path.read_bytes().splitlines()[:requests]:
        # An id stands for its whole prefix, so a second time in one request would be an error of the trace.
        ids = list(dict.fromkeys(decoder.decode(line).hash_ids))
        for hash_id in ids:
            if hash_id not in keys:
                keys[hash_id] = pack(hash_id.to_bytes(HASH_BYTES, "big"), 0)
        requests_as_keys.append([keys[hash_id] for hash_id in ids])
    name = path.stem.removeprefix("mooncake_").removesuffix("_trace")
    return Trace(name, requests_as_keys, sum(map(len, requests_as_keys)), len(keys))


def replay(trace: Trace, policy: str, capacity: int) -> Replay:
    """Replay all requests, one after another, against a tier of `capacity` chunks."""
    tier = CpuTier(capacity, make_policy(policy, capacity))
    reused = unstored = 0
    start = time.process_time()
    for chunks in trace.requests:
        is_ready = [tier.state(chunk) is ChunkState.READY for chunk in chunks]
        reused += is_ready.index(False) if False in is_ready else len(is_ready)
        resident = [chunk for chunk, ready in zip(chunks, is_ready, strict=True) if ready]
        absent = [chunk for chunk, ready in zip(chunks, is_ready, strict=True) if not ready]
        # The head of a prompt is worth more than its tail, so the tail is left out if not all chunks fit.
        fitting = absent[: capacity - len(resident)]
        unstored += len(absent) - len(fitting)
        allocation = tier.allocate(fitting, frozenset(resident))
        if allocation is None:
            raise AssertionError(f"{policy} found no room for {len(fitting)} chunks among {capacity}")
        tier.touch(resident)
        for chunk in fitting:
            tier.ready(chunk)
    return Replay(reused, tier.evicted_total, unstored, time.process_time() - start)


def percent(part: int, whole: int) -> float:
    return 100.0 * part / whole if whole else 0.0


def grid(lines: Sequence[Sequence[str]]) -> str:
    """Return the lines as a table in Markdown; the first line is its head."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    shown = [f"| {' | '.join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))} |" for line in lines]
    rule = f"| {' | '.join('-' * (width - 1) + ':' for width in widths)} |"
    return "\n".join([shown[0], rule, *shown[1:]])


def measure(
    traces: Sequence[Trace], capacities: Sequence[int], policies: Sequence[str]
) -> tuple[list[Row], list[str], str]:
    """Replay every trace with every capacity and policy; return the rows, the notes and the table."""
    rows: list[Row] = []
    notes: list[str] = []
    lines = [["trace", "chunks", "tokens", *(f"{policy}, %" for policy in policies), "endless, %"]]
    for trace in traces:
        endless = percent(replay(trace, "lru", trace.distinct).reused, trace.chunks)
        rows.append(Row(f"hit ratio, {trace.name}, endless memory", "%", endless))
        notes.append(
            f"{trace.name}: {len(trace.requests):,} requests, {trace.chunks:,} chunks requested, {trace.distinct:,} different ones"
        )
        for capacity in capacities:
            ratios = []
            for policy in policies:
                result = replay(trace, policy, capacity)
                ratio = percent(result.reused, trace.chunks)
                progress(
                    f"{NAME}: {trace.name}, {capacity:,} chunks, {policy}: {ratio:.2f} % in {result.seconds:.1f} s"
                )
                rows.append(Row(f"hit ratio, {trace.name}, {capacity:,} chunks, {policy}", "%", ratio))
                ratios.append(f"{ratio:.2f}")
                if result.unstored:
                    notes.append(
                        f"{trace.name}, {capacity:,} chunks, {policy}: {result.unstored:,} chunks of requests longer than the tier "
                        "were never stored"
                    )
            lines.append([trace.name, f"{capacity:,}", f"{capacity * CHUNK_TOKENS:,}", *ratios, f"{endless:.2f}"])
    return rows, notes, grid(lines)


def read_arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, quick=True, result=True)
    parser.add_argument("traces", type=Path, help=f"a trace, or a folder of {PATTERN}")
    parser.add_argument("--capacity", type=int, nargs="+", metavar="CHUNKS", help="sizes of the tier, in chunks")
    parser.add_argument(
        "--policy",
        nargs="+",
        default=POLICIES,
        metavar="NAME",
        help="lru, arc, or package.module:Class (default: lru arc)",
    )
    arguments = parser.parse_args()
    try:
        for policy in arguments.policy:
            for capacity in arguments.capacity or CAPACITIES:
                make_policy(policy, capacity)
    except PolicyError as error:
        parser.error(str(error))
    return arguments


def main() -> None:
    arguments = read_arguments()
    paths = sorted(arguments.traces.glob(PATTERN)) if arguments.traces.is_dir() else [arguments.traces]
    if not paths or not paths[0].exists():
        raise SystemExit(f"no traces at {arguments.traces}: name a trace, or a folder with {PATTERN}")
    about = machine()
    traces = [read_trace(path, QUICK_REQUESTS if arguments.quick else None) for path in paths]
    capacities = arguments.capacity or (QUICK_CAPACITIES if arguments.quick else CAPACITIES)
    rows, notes, shown = measure(traces, capacities, arguments.policy)
    finish(Result(NAME, arguments.quick, about, rows, notes), arguments.json, shown)


if __name__ == "__main__":
    main()
