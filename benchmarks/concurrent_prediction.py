# SPDX-License-Identifier: Apache-2.0
"""Claim: with concurrent requests, every predicted token is reused, and the reuse beyond is expected to a few percent.

    python -m benchmarks.concurrent_prediction [--shape gpt-oss]... [--traffic bursts]... [--requests 240] [--seed 1]...
        [--rate 4] [--cache-tokens 200000] [--cpu-tokens 0] [--results FILE]

Simulated replicas in virtual time make the decisions and events of vLLM's scheduler, and this router's own ingest,
mirror, matcher, cost and expectation follow them, as in `kvrouter replay`.

- Exact: the hit at the moment of the choice, which is the prediction of `x-kvrouter-predicted-hit`.
- Expected: `expected_tokens` of the same choice, which also counts the prompts that are computed before.
- Received: the tokens that the replica reuses when it schedules the prompt.

Extra tokens are those beyond the exact prediction. The error of a line is |sum of expected - sum of received| / sum of
received extra tokens; the mean absolute error is that of single requests. Every run begins without anything learned.
The script prints a table by expected extra tokens (the calibration), a table by shape and traffic, the command and the
machine.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from random import Random

import msgspec
import numpy as np

from benchmarks.report import machine, parser_of
from kvrouter.replay.fleet.fleet_shape import FleetShape, ReplicaShape, blocks_of
from kvrouter.replay.runs.simulate import simulate
from kvrouter.replay.traces.request import Request, Trace
from kvrouter.router.route.placement.policies import KV
from kvrouter.simulator.cache.shapes import SHAPES, make_geometry

WORKERS = 4
# Lower ends of the buckets of expected extra tokens.
BUCKETS = (0, 1, 256, 1_024, 4_096)
# The most tokens that one id of a prompt stands for, so that prompts may differ anywhere, not only at the router's 256
# tokens.
PIECE_TOKENS = 16


class Prompt:
    """A text under construction: the ids of its pieces, and the tokens of a partial last piece, if there is one."""

    def __init__(self, rng: Random, piece_tokens: int, before: Sequence[int] = ()) -> None:
        self._rng = rng
        self._piece_tokens = piece_tokens
        self.pieces = list(before)
        self.tail_id, self.tail_tokens = rng.getrandbits(51), rng.choice((0, rng.randint(1, piece_tokens - 1)))

    def more(self, tokens: int) -> Prompt:
        """Return this text with about this many tokens appended that no other prompt has."""
        own = [self._rng.getrandbits(51) for _ in range(max(1, tokens // self._piece_tokens))]
        return Prompt(self._rng, self._piece_tokens, [*self.pieces, *own])

    def request(self, time_s: float, output_tokens: int) -> Request:
        """Return a request for an answer to this text; every call gives the same prompt."""
        num_tokens = len(self.pieces) * self._piece_tokens + self.tail_tokens
        ids = [*self.pieces, self.tail_id] if self.tail_tokens else self.pieces
        return Request(time_s, num_tokens, output_tokens, np.array(ids, np.uint64))


Requests = Iterator[Request]


def bursts(rng: Random, empty: Prompt, span_s: float) -> Requests:
    """Yield siblings that arrive together: each burst has one long beginning, each request its own question."""
    while True:
        start_s, beginning = rng.uniform(0, span_s), empty.more(rng.randint(200, 9_000))
        for _ in range(rng.randint(2, 24)):
            yield beginning.more(rng.randint(20, 900)).request(start_s + rng.uniform(0, 1), rng.randint(1, 200))


def chats(rng: Random, empty: Prompt, span_s: float) -> Requests:
    """Yield chats behind some system prompts; some turns are sent twice, or before the previous turn is answered."""
    systems = [empty.more(rng.randint(100, 3_000)) for _ in range(4)]
    while True:
        time_s, chat = rng.uniform(0, span_s * 0.7), rng.choice(systems)
        for _ in range(rng.randint(1, 6)):
            chat = chat.more(rng.randint(30, 1_200))
            for _ in range(rng.choice((1, 1, 1, 2, 3))):
                yield chat.request(time_s, rng.randint(1, 300))
            time_s += rng.choice((0.05, 0.3, 3.0, 8.0))


def trees(rng: Random, empty: Prompt, span_s: float) -> Requests:
    """Yield the prompts of branching agents: each step continues one of the recent steps, several at a time."""
    while True:
        time_s, nodes = rng.uniform(0, span_s * 0.8), [empty.more(rng.randint(300, 4_000))]
        for _ in range(rng.randint(6, 30)):
            nodes.append(rng.choice(nodes[-6:]).more(rng.randint(50, 1_500)))
            time_s += rng.choice((0.0, 0.02, 0.2, 1.0))
            yield nodes[-1].request(time_s, rng.randint(1, 150))


def documents(rng: Random, empty: Prompt, span_s: float) -> Requests:
    """Yield several questions on each document at the same time, some of them equal."""
    while True:
        time_s, document = rng.uniform(0, span_s), empty.more(rng.randint(2_000, 16_000))
        questions = [document.more(rng.randint(20, 200)) for _ in range(rng.randint(1, 5))]
        for _ in range(rng.randint(2, 8)):
            yield rng.choice(questions).request(time_s + rng.uniform(0, 2), rng.randint(1, 100))


def alone(rng: Random, empty: Prompt, span_s: float) -> Requests:
    """Yield prompts that share nothing, so no reuse may be expected."""
    while True:
        yield empty.more(rng.randint(100, 6_000)).request(rng.uniform(0, span_s), rng.randint(1, 200))


TRAFFIC: dict[str, Callable[[Random, Prompt, float], Requests]] = {
    function.__name__: function for function in (bursts, chats, trees, documents, alone)
}


class Sample(msgspec.Struct, frozen=True):
    """One request of a run, in tokens."""

    exact: int
    expected: int
    received: int


class Line(msgspec.Struct, frozen=True):
    """Requests together: a line of a table."""

    name: str
    requests: int
    # The mean expected tokens of a request beyond the exact prediction.
    expected: float
    # The mean received tokens of a request beyond the exact prediction.
    received: float
    # The share of the received extra tokens by which the sums differ; None where nothing was received.
    error: float | None
    # The mean of |expected - received| over the requests, in tokens.
    absolute: float
    # Requests that received less than the exact prediction.
    less: int
    # Requests that received more than the exact prediction.
    more: int


def run(shape: str, traffic: str, seed: int, options: argparse.Namespace) -> list[Sample]:
    """Return a sample for each request of one run that was answered."""
    geometry = make_geometry(shape)
    piece_tokens = max(PIECE_TOKENS, geometry.hash_block_size)
    rng = Random(f"{shape} {traffic} {seed}")
    drawn_requests = TRAFFIC[traffic](rng, Prompt(rng, piece_tokens), options.requests / options.rate)
    requests = sorted((next(drawn_requests) for _ in range(options.requests)), key=lambda request: request.time_s)
    trace = Trace(traffic, "made", piece_tokens, requests)
    replica = ReplicaShape(blocks_of(geometry, options.cache_tokens), blocks_of(geometry, options.cpu_tokens))
    fleet = FleetShape(geometry, (replica,) * WORKERS)
    policy_run = simulate(trace, fleet, KV, seed)
    numbers = zip(policy_run.predicted, policy_run.expected, policy_run.reused, policy_run.ttft_s, strict=True)
    return [Sample(exact, expected, received) for exact, expected, received, ttft_s in numbers if ttft_s == ttft_s]


def line(name: str, samples: Iterable[Sample]) -> Line:
    """Summarize these requests in one line."""
    kept = list(samples)
    count = max(1, len(kept))
    expected = sum(sample.expected - sample.exact for sample in kept)
    received = sum(sample.received - sample.exact for sample in kept)
    return Line(
        name,
        len(kept),
        expected / count,
        received / count,
        abs(expected - received) / received if received > 0 else None,
        sum(abs(sample.expected - sample.received) for sample in kept) / count,
        sum(sample.received < sample.exact for sample in kept),
        sum(sample.received > sample.exact for sample in kept),
    )


def calibration(samples: Sequence[Sample]) -> list[Line]:
    """Return a line for each bucket of expected extra tokens."""
    ends = [*BUCKETS[1:], 1 << 62]
    lines = []
    for low, end in zip(BUCKETS, ends, strict=True):
        inside = [sample for sample in samples if low <= sample.expected - sample.exact < end]
        name = "0" if end == 1 else f"{low:,} to {end - 1:,}" if end < 1 << 62 else f"{low:,} and more"
        lines.append(line(name, inside))
    return lines


def table(first: str, lines: Sequence[Line]) -> str:
    """Return the lines as Markdown."""
    head = f"| {first} | requests | expected | received | error | mean absolute error | less than exact | more |"
    rows = [head, "|---|---|---|---|---|---|---|---|"]
    for each in lines:
        error = "" if each.error is None else f"{each.error:.1%}"
        rows.append(
            f"| {each.name} | {each.requests:,} | {each.expected:,.1f} | {each.received:,.1f} | {error} | {each.absolute:,.1f} | "
            f"{each.less:,} | {each.more:,} |"
        )
    return "\n".join(rows)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--shape", action="append", choices=SHAPES)
    parser.add_argument("--traffic", action="append", choices=TRAFFIC)
    parser.add_argument("--requests", type=int, default=240, help="of each run")
    parser.add_argument("--rate", type=float, default=4.0, help="requests a second, of all together")
    parser.add_argument("--seed", type=int, action="append")
    parser.add_argument("--cache-tokens", type=int, default=200_000)
    parser.add_argument("--cpu-tokens", type=int, default=0)
    parser.add_argument("--results", type=Path, help="JSON with every line")
    options = parser.parse_args()
    all_samples: list[Sample] = []
    lines: list[Line] = []
    for shape in options.shape or SHAPES:
        for traffic in options.traffic or TRAFFIC:
            samples = [sample for seed in options.seed or (1,) for sample in run(shape, traffic, seed, options)]
            all_samples += samples
            lines.append(line(f"{shape}, {traffic}", samples))
    print(f"{' '.join(['python', *sys.argv])}\n{json.dumps(machine())}\n")
    buckets, total = calibration(all_samples), line("all", all_samples)
    print(table("expected extra tokens", [*buckets, total]), end="\n\n")
    print(table("shape and traffic", lines))
    if options.results is not None:
        results = {"command": sys.argv, "machine": machine(), "buckets": buckets, "total": total, "runs": lines}
        options.results.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=2))


if __name__ == "__main__":
    main()
