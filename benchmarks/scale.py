# SPDX-License-Identifier: Apache-2.0
"""The cost of a question as a fleet grows.

It is measured against workers, holders of a block, blocks of the index, length of the prompt, groups, and connections;
each alone, the others fixed. All but the last are measured in process (`Matcher.match`, one question after another,
with other questions in between where a row is cold), connections on a whole router. The script writes the table of
benchmarks/results/tables.md and docs/images/scale.png; --quick prints only.

    python -m benchmarks.scale [--quick] [--only SWEEP]
"""

from __future__ import annotations

import gc
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from benchmarks.http_client import HttpClient
from benchmarks.processes import rss_bytes
from benchmarks.report import TABLES, Others, Result, machine, markdown, number, parser_of, progress, save, write_part
from kvrouter.router.base.common.ids import GPU, Place, WorkerKey
from kvrouter.router.index.matching.matcher import HashPlans, Matcher, WorkerView
from kvrouter.router.index.matching.mirror import Mirror
from kvrouter.router.index.matching.question import Question
from kvrouter.router.model.kvcache.block_hash import HashScheme
from kvrouter.router.model.kvcache.catalog import Group, build_catalog
from kvrouter.router.model.kvcache.prompt_hasher import SegmentMemory
from kvrouter.router.model.workers.registration import CatalogSpec
from kvrouter.router.model.workers.stream_state import StreamState

HERE = Path(__file__).resolve().parent
BEGIN = "<!-- table: written by benchmarks/scale.py -->"
PICTURE = HERE.parent / "docs" / "images" / "scale.png"
RESULT = HERE / "results" / "scale.json"

MODEL = "m"
BLOCK_TOKENS = 16
MIRROR_BYTES = 4 << 30
# A mid-sized fleet: the values of every sweep but the one that varies them.
WORKERS, HOLDERS, BLOCKS, ENTRIES = 16, 16, 512, 200_000
WINDOW_TOKENS = 1_024
# A point has as many questions as fit into this time, within these bounds.
POINT_S, LEAST_CALLS, MOST_CALLS = 1.0, 20, 2_000
# The growth of a sweep is judged by its last 1/TAIL part, its upper half, where fixed costs matter least.
TAIL = 2


class Point(msgspec.Struct):
    """One point of a sweep: the number that varies, and the percentiles of a question's time."""

    sweep: str
    x: int
    p50_us: float
    p99_us: float


def hashes(rng: np.random.Generator, count: int) -> NDArray[np.uint64]:
    return rng.integers(1, 1 << 63, count, dtype=np.uint64)


class Fleet:
    """A mirror with a fleet's blocks.

    In it `holders` of `workers` hold one prompt of `blocks` in all of `groups` groups, besides other blocks up to
    `entries`.
    """

    def __init__(
        self,
        *,
        workers: int = WORKERS,
        holders: int = HOLDERS,
        blocks: int = BLOCKS,
        entries: int = ENTRIES,
        groups: int = 1,
    ) -> None:
        rng = np.random.default_rng(1)
        self.mirror = Mirror(MIRROR_BYTES)
        windows = [Group(i, "sliding_window", BLOCK_TOKENS, sliding_window=WINDOW_TOKENS + i) for i in range(1, groups)]
        catalog = build_catalog((Group(0, "full_attention", BLOCK_TOKENS), *windows), "learned", CatalogSpec())
        keys = [WorkerKey(MODEL, str(i)) for i in range(workers)]
        for key in keys:
            self.mirror.begin_epoch(key, "e")
        self.prompt = hashes(rng, blocks)
        for key in keys[:holders]:
            for group in range(groups):
                self.mirror.add(key, Place(group, GPU), self.prompt)
        # Other prompts, each at one worker, which bring the table to its nominal size.
        self.others: list[NDArray[np.uint64]] = []
        for turn in range(max(0, entries - self.mirror.entries) // BLOCKS):
            other = hashes(rng, BLOCKS)
            self.mirror.add(keys[turn % workers], Place(0, GPU), other)
            self.others.append(other)
        scheme = HashScheme.default()
        views = [WorkerView(key, None, StreamState.LIVE, True, "", "e", catalog, scheme, {}) for key in keys]
        self.plans = HashPlans.build(self.mirror, views)
        self.matcher = Matcher(self.mirror, SegmentMemory(0))

    def question(self, prompt: NDArray[np.uint64]) -> Question:
        return Question(MODEL, len(prompt) * BLOCK_TOKENS + 1, block_hashes=prompt)

    def ask(self, question: Question) -> int:
        """Match a question and return its longest hit, in tokens."""
        table = self.matcher.table(question, self.plans)
        assert table is not None
        return int(table.found[:, 0].max())

    def hot(self, sweep: str, x: int) -> Point:
        """Time the one prompt again and again, which must be hit whole."""
        question = self.question(self.prompt)
        assert self.ask(question) == len(self.prompt) * BLOCK_TOKENS
        return timed(sweep, x, lambda turn: self.ask(question))

    def cold(self, sweep: str, x: int) -> Point:
        """Time other prompts of the index, each once in a round."""
        rng = np.random.default_rng(2)
        questions = [self.question(self.others[i]) for i in rng.permutation(len(self.others))[:MOST_CALLS]]
        return timed(sweep, x, partial(ask_in_turn, self, questions))


def timed(sweep: str, x: int, call: Callable[[int], Any]) -> Point:
    clock = time.perf_counter_ns
    call(0)
    taken: list[int] = []
    ends = time.monotonic() + POINT_S
    while len(taken) < LEAST_CALLS or (time.monotonic() < ends and len(taken) < MOST_CALLS):
        start = clock()
        call(len(taken))
        taken.append(clock() - start)
    p50, p99 = np.percentile(taken, [50, 99]) / 1000
    return Point(sweep, x, float(p50), float(p99))


def by_workers(quick: bool) -> Iterator[Point]:
    for workers in (1, 4, 16) if quick else (1, 4, 16, 64, 256, 1_000):
        yield Fleet(workers=workers, holders=workers, entries=0).hot("workers", workers)


def by_holders(quick: bool) -> Iterator[Point]:
    workers = 64 if quick else 1_000
    for holders in (1, 8, 64) if quick else (1, 4, 16, 64, 256, 1_000):
        yield Fleet(workers=workers, holders=holders, entries=0).hot("holders", holders)


def by_entries(quick: bool) -> Iterator[Point]:
    for entries in (10_000, 30_000) if quick else (10_000, 100_000, 1_000_000, 10_000_000):
        fleet = Fleet(holders=1, blocks=1, entries=entries)
        yield fleet.cold("entries", fleet.mirror.entries)


def by_prompt(quick: bool) -> Iterator[Point]:
    for tokens in (128, 8_192) if quick else (128, 1_024, 8_192, 65_536, 262_144, 1_048_576):
        yield Fleet(blocks=tokens // BLOCK_TOKENS, entries=0).hot("prompt", tokens)


def by_prompt_ids(quick: bool) -> Iterator[Point]:
    """Yield the points for token ids that were never seen, so that each question hashes its prompt."""
    rng = np.random.default_rng(3)
    for tokens in (128, 8_192) if quick else (128, 1_024, 8_192, 65_536, 262_144, 1_048_576):
        fleet = Fleet(blocks=1)
        # Hash each prompt to its end although no worker holds it, as happens with a long prompt that a worker holds.
        fleet.plans = msgspec.structs.replace(
            fleet.plans,
            by_scheme={
                space: msgspec.structs.replace(plan, stops_early=False) for space, plan in fleet.plans.by_scheme.items()
            },
        )
        prompts = [rng.integers(0, 200_000, tokens) for _ in range(8)]
        questions = [Question(MODEL, tokens, token_ids=prompt) for prompt in prompts]
        yield timed("prompt ids", tokens, partial(ask_in_turn, fleet, questions))


def ask_in_turn(fleet: Fleet, questions: list[Question], turn: int) -> int:
    return fleet.ask(questions[turn % len(questions)])


def by_groups(quick: bool) -> Iterator[Point]:
    for groups in (1, 6) if quick else (1, 2, 6, 16, 32, 64):
        yield Fleet(groups=groups, entries=0).hot("groups", groups)


def by_connections(quick: bool) -> Iterator[Point]:
    """Yield the points of idle connections beside one that queries a whole router, and report refused connections."""
    from tests.support.replica_process import MODEL as SERVED
    from tests.support.replica_process import replicas, worker_flags
    from tests.support.router_process import RouterProcess

    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvr-scale-", dir="/tmp"))
        engines = stack.enter_context(replicas(1))
        router = stack.enter_context(RouterProcess(Path(folder), worker_flags(engines)))
        asking = HttpClient(router.port)
        stack.callback(asking.close)
        body = {"model": SERVED, "block_hashes": list(range(1, BLOCKS + 1))}
        request = asking.request("POST", "/query_by_hash", body)
        status, content = asking.send(request)
        assert status == 200, content
        idle: list[HttpClient] = []
        before = rss_bytes(router.pid)
        for connections in (1, 100) if quick else (1, 10, 100, 1_000, 4_000):
            while len(idle) < connections - 1:
                connection = HttpClient(router.port)
                stack.callback(connection.close)
                # A connection counts as idle once a request on it was answered.
                connection.call("GET", "/version")
                idle.append(connection)
            yield timed("connections", connections, lambda turn: asking.send(request))
        if not quick:
            connection_bytes = (rss_bytes(router.pid) - before) / len(idle)
            progress(f"an idle connection takes {connection_bytes / 1024:.1f} KiB of the router")
            refused = 0
            for _ in range(5_000 - 4_000):
                connection = HttpClient(router.port)
                stack.callback(connection.close)
                try:
                    status, content = connection.send(connection.request("GET", "/version"))
                except OSError:
                    continue
                if status == 503:
                    refused += 1
                    last_refusal = content
            progress(f"of 5,000 connections {refused} were refused: {last_refusal.decode() if refused else ''}")


SWEEPS: dict[str, tuple[str, Callable[[bool], Iterator[Point]]]] = {
    "workers": ("workers, all of which hold the prompt", by_workers),
    "holders": ("holders of the prompt among 1,000 workers", by_holders),
    "entries": ("(worker, block) entries in the index, cold", by_entries),
    "prompt": ("tokens of the prompt, by hashes", by_prompt),
    "prompt ids": ("tokens of the prompt, ids never seen", by_prompt_ids),
    "groups": ("KV cache groups", by_groups),
    "connections": ("connections, over HTTP", by_connections),
}


def exponent(points: list[Point]) -> float | None:
    """Return the exponent of growth over the upper half: 0 if the cost does not depend on x, 1 if it is proportional.

    It is None for fewer than two points.
    """
    tail = points[len(points) // TAIL :]
    if len(tail) < 2:
        return None
    slope, _ = np.polyfit([math.log(point.x) for point in tail], [math.log(point.p50_us) for point in tail], 1)
    return float(slope)


def in_words(slope: float | None) -> str:
    if slope is None:
        return ""
    if slope < 0.1:
        return "does not grow"
    return f"grows with x^{slope:.2f}" + (" (less than in proportion)" if slope < 0.85 else " (in proportion)")


def page_part(result: Result[Point]) -> str:
    lines = [("against", "x", "p50, us", "p99, us", "growth")]
    for name, (what, _) in SWEEPS.items():
        points = [point for point in result.rows if point.sweep == name]
        for i, point in enumerate(points):
            last = i == len(points) - 1
            lines.append((what if i == 0 else "", f"{point.x:,}", number(point.p50_us), number(point.p99_us),
                          in_words(exponent(points)) if last else ""))  # fmt: skip
    about = "; ".join(f"{name}: {value}" for name, value in result.machine.items())
    return "\n".join([markdown(lines), "", *(f"- {note}" for note in result.notes), "", f"Machine: {about}."])


def draw(points: list[Point], path: Path) -> None:
    from matplotlib.figure import Figure

    names = [name for name in SWEEPS if any(point.sweep == name for point in points)]
    figure = Figure(figsize=(12, 3 * math.ceil(len(names) / 3)), dpi=80, layout="constrained")
    for place, name in enumerate(names, 1):
        axes = figure.add_subplot(math.ceil(len(names) / 3), 3, place)
        own = [point for point in points if point.sweep == name]
        axes.loglog([point.x for point in own], [point.p50_us for point in own], "o-", color="#2a78d6", label="p50")
        axes.loglog([point.x for point in own], [point.p99_us for point in own], "s--", color="#c97a00", label="p99")
        axes.set_xlabel(SWEEPS[name][0])
        axes.set_ylabel("us a question")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path)


def main() -> None:
    parser = parser_of(__doc__, quick=True)
    parser.add_argument("--only", choices=list(SWEEPS), action="append", help="this sweep; may be repeated")
    arguments = parser.parse_args()
    about, others = machine(), Others()
    points: list[Point] = []
    stored_points: dict[str, list[Point]] = {}
    if arguments.only and RESULT.exists():
        for stored_point in msgspec.json.decode(RESULT.read_bytes(), type=Result[Point]).rows:
            stored_points.setdefault(stored_point.sweep, []).append(stored_point)
    for name, (_, sweep) in SWEEPS.items():
        if arguments.only and name not in arguments.only:
            # The page shows all sweeps; those that are not measured now keep their last measurement.
            points += stored_points.get(name, [])
            continue
        for point in sweep(arguments.quick):
            progress(f"{name} {point.x:,}: p50 {point.p50_us:,.1f} us, p99 {point.p99_us:,.1f} us")
            points.append(point)
            gc.collect()
    result = Result("scale", arguments.quick, about, points, [f"scale: {others.note()}"])
    part = page_part(result)
    print(f"\n{part}")
    if not arguments.quick:
        save(result, RESULT)
        write_part(TABLES, BEGIN, part)
        draw(points, PICTURE)


if __name__ == "__main__":
    main()
