# SPDX-License-Identifier: Apache-2.0
"""Claim: looking at an answer as it passes takes single microseconds for each piece, and some tens for each request.

Nothing is sent over a network. The first part times the tap between an engine's bytes and a client that drops them: for
the events of a chat as vLLM writes them, for events that each carry a usage, and for one whole answer. The second part
times a request's watch from its begin to its end, with and without traces. Times are CPU time of this process, so that
other processes of the machine do not count. See docs/reference/benchmarks.md.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable

import msgspec
import numpy as np

from benchmarks.report import Result, machine, markdown, parser_of, save
from kvrouter.contract.tiers import all_on_gpu
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.base.telemetry.metric_registry import MetricRegistry
from kvrouter.router.index.matching.question import Hit, Question
from kvrouter.router.observe.quality.answer_tap import AnswerTap
from kvrouter.router.observe.quality.concurrency import Concurrency
from kvrouter.router.observe.quality.quality_metrics import QualityMetrics
from kvrouter.router.observe.quality.request_watch import Quality
from kvrouter.router.observe.quality.tracing import Tracing
from kvrouter.router.route.placement.choose import Choice
from kvrouter.router.route.placement.placement_request import Placement, PlacementRequest

WORKER = WorkerKey("m", "w0", 0)
PATH = "/v1/chat/completions"
PROMPT_TOKENS = 1_000
# Nobody listens at this address, so most spans are dropped. The result is the cost for the request itself, without the
# work of the SDK's thread.
NOWHERE = "http://127.0.0.1:9"
USAGE = {
    "prompt_tokens": PROMPT_TOKENS,
    "total_tokens": PROMPT_TOKENS + 100,
    "completion_tokens": 100,
    "prompt_tokens_details": {"cached_tokens": 960},
}
HEADERS = [
    (b"host", b"x"),
    (b"content-type", b"application/json"),
    (b"traceparent", b"00-" + b"a" * 32 + b"-" + b"b" * 16 + b"-01"),
]


class TapRow(msgspec.Struct):
    """The CPU time of one operation, in microseconds: the best of some rounds, as other processes only add to it."""

    what: str
    size_bytes: int
    us: float


def event(usage: dict[str, object] | None) -> bytes:
    body: dict[str, object] = {
        "id": "chatcmpl-0123456789abcdef0123456789abcdef",
        "object": "chat.completion.chunk",
        "created": 1_700_000_000,
        "model": "meta-llama/Llama-3.1-8B-Instruct",
        "choices": [{"index": 0, "delta": {"content": " token"}, "logprobs": None, "finish_reason": None}],
    }
    return b"data: " + json.dumps(body if usage is None else body | {"usage": usage}).encode() + b"\n\n"


def best_us(work: Callable[[int], None], count: int, rounds: int) -> float:
    """Return the CPU time of one of `count` operations, in us: the best of the rounds.

    Args:
        work: Runs the operation the given number of times.
        count: The operations of a round.
        rounds: How often to measure.
    """
    times = []
    for _ in range(rounds):
        began_s = time.process_time()
        work(count)
        times.append(time.process_time() - began_s)
    return min(times) / count * 1e6


def ignore(parts: list[bytes]) -> None:
    """Drop the bytes, as a client that takes everything."""


def pieces(part: bytes, *, streams: bool) -> Callable[[int], None]:
    """Return a function that passes a given number of pieces through one tap, one by one, and then reads the usage."""

    def work(count: int) -> None:
        tap = AnswerTap(ignore, time.monotonic, Concurrency().begun(WORKER), streams=streams, readable=True)
        for _ in range(count):
            tap([part])
        tap.usage()

    return work


class NoEnds:
    """A stand-in for the owner of placements that ignores how each placement ends."""

    def first_token(self, placement: Placement) -> None: ...

    def done(self, placement: Placement, output_tokens: int | None) -> None: ...

    def reused(self, placement: Placement, tokens: int) -> None: ...


def requests(quality: Quality, parts: list[bytes]) -> Callable[[int], None]:
    """Return a function that watches whole requests, each answered with these pieces, without the proxy's own work."""
    ask = PlacementRequest(Question("m", PROMPT_TOKENS, token_ids=np.arange(PROMPT_TOKENS)))
    choice = Choice(Hit(WORKER, all_on_gpu(960), "live"), "http://engine:8000", "lowest cost", None)

    def work(count: int) -> None:
        for _ in range(count):
            watch = quality.begin(PATH, HEADERS)
            watch.lookup_ended(ask)
            placement = Placement(NoEnds(), "0123", choice, [], PROMPT_TOKENS, 0, quality.clock())  # type: ignore[arg-type]
            watch.placed(placement)
            watch.sending(WORKER, "engine", 8000, HEADERS)
            tap = watch.tap(ignore, 200, [], streams=True)
            for part in parts:
                tap([part])
            watch.output_tokens()
            watch.ended("ok")

    return work


def measure(*, quick: bool) -> list[TapRow]:
    rounds, count = (3, 2_000) if quick else (7, 50_000)
    plain, with_usage = event(None), event(USAGE)
    whole = json.dumps({"choices": [{"message": {"content": "word " * 20_000}}], "usage": USAGE}).encode()
    rows = [
        TapRow("an event of a stream", len(plain), best_us(pieces(plain, streams=True), count, rounds)),
        TapRow("an event with a usage", len(with_usage), best_us(pieces(with_usage, streams=True), count, rounds)),
        TapRow("100 kB of a whole answer", len(whole), best_us(pieces(whole, streams=False), count // 20, rounds)),
    ]
    measures = QualityMetrics(MetricRegistry())
    without = Quality(measures, time.monotonic)
    rows.append(
        TapRow(
            "a request, without its answer's pieces", 0, best_us(requests(without, [with_usage]), count // 10, rounds)
        )
    )
    traced = Quality(measures, time.monotonic, Tracing(NOWHERE, measures.spans))
    rows.append(TapRow("the same, with traces", 0, best_us(requests(traced, [with_usage]), count // 50, rounds)))
    return rows


def main() -> None:
    options = parser_of(__doc__, quick=True, result=True).parse_args()
    # The SDK logs each failure to export, and here every export fails.
    logging.getLogger("opentelemetry").setLevel("CRITICAL")
    rows = measure(quick=options.quick)
    print(markdown([("", "bytes", "us"), *((row.what, str(row.size_bytes or ""), f"{row.us:.2f}") for row in rows)]))
    save(Result("answer_tap", options.quick, machine(), rows), options.json)


if __name__ == "__main__":
    main()
