# SPDX-License-Identifier: Apache-2.0
"""The parts of patch_overhead.py: each compares an engine in two situations, in blocks that take turns."""

from __future__ import annotations

import multiprocessing
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from vllm.distributed.kv_events import KVEventBatch

from benchmarks import report
from benchmarks.patch_comparison import Comparison, compared
from benchmarks.patch_engines import Engine, Steps, alone, resident_bytes
from benchmarks.patch_reader import Reader
from benchmarks.patch_real_engine import RealEngine
from kvrouter.events.patch.messages import ReportEvent, ReportStored, pack_hashes

CASES = ("full+window", "3-way", "cpu 3-way, placeholder, 1 a chunk")
CASE = CASES[0]
REQUESTS = 10_000
BLOCK_STEPS = 200
# The time of a step of a small model on a fast GPU. The step only sleeps, so other threads may run, as while a GPU
# works.
MODEL_S = 0.005
MODEL_BLOCK_STEPS = 40
# More messages than either PUB socket keeps for a reader: 1,000 on ours by report_hwm, 100,000 on vLLM's by its
# default.
FILL_REPORTS, FILL_STOCK = 2_000, 100_500
FILL_REPORT_BLOCKS = 512
SNAPSHOT_BLOCKS = 200_000
REAL_BATCH = 100
# The time in which a subscription arrives.
CONNECT_S = 0.1


class Settings(report.Settings):
    model: Path


Found = tuple[list[Comparison], list[str]]
Sides = tuple[list[Steps], list[Steps]]


def step_rows(what: str, without: Sequence[Steps], with_: Sequence[Steps]) -> list[Comparison]:
    names = (f"{what}: step", "the same, CPU of the engine's thread", "the same, slowest step in 100")
    figures = zip(names, zip(*without, strict=True), zip(*with_, strict=True), strict=True)
    return [compared(name, "us", without_us, with_us) for name, without_us, with_us in figures]


def alternate(rounds: int, without: Callable[[], Steps], with_: Callable[[], Steps]) -> Sides:
    """Take this many blocks of each side; the sides take turns in going first."""
    sides: Sides = ([], [])
    for turn in range(rounds):
        for side in (0, 1) if turn % 2 else (1, 0):
            sides[side].append((without, with_)[side]())
    return sides


def rested(engine: Engine, steps: int, model_s: float = 0.0) -> Steps:
    took = engine.block(steps, model_s)
    engine.rest()
    return took


def patch_against_none(settings: Settings) -> Found:
    """Compare an engine with the patch and one without it, which get the same requests.

    A block has 200 steps, or 40 steps with a model of 5 ms.
    """
    rows: list[Comparison] = []
    notes: list[str] = []
    for case in CASES[: settings.pick(3, 1)]:
        case_rows, note = one_case(case, settings)
        rows += case_rows
        notes.append(note)
    return rows, notes


def one_case(case: str, settings: Settings) -> tuple[list[Comparison], str]:
    plain, patched = Engine(case, settings.model, False), Engine(case, settings.model, True)
    counts: dict[str, int] = {}
    without_reader: Sides = ([], [])
    with_reader: Sides = ([], [])
    for engine in (plain, patched):
        rested(engine, BLOCK_STEPS)
    with Reader() as reader:

        def read() -> Steps:
            reader.read(patched.reporter.reports_endpoint)
            took = rested(patched, BLOCK_STEPS)
            for name, count in reader.leave().items():
                counts[name] = counts.get(name, 0) + count
            return took

        reported_s, sent, steps = patched.reporter_cpu_s(), patched.reporter.counters.sent, patched.steps
        while patched.requests < settings.pick(REQUESTS, 400):
            for sides, with_ in ((without_reader, partial(rested, patched, BLOCK_STEPS)), (with_reader, read)):
                for side, new_steps in zip(
                    sides, alternate(2, partial(rested, plain, BLOCK_STEPS), with_), strict=True
                ):
                    side.extend(new_steps)
        steps, sent = patched.steps - steps, patched.reporter.counters.sent - sent
        reported_s = patched.reporter_cpu_s() - reported_s
    note = (
        f"{case}: {patched.requests:,} requests with the patch in {patched.steps:,} steps, {plain.requests:,} without in "
        f"{plain.steps:,}; {sent / steps:.2f} messages a step, {counts['events'] / max(1, counts['with_events']):.1f} events and "
        f"{counts['bytes'] / max(1, counts['messages']):.0f} bytes a message; the reporter's thread used "
        f"{reported_s / steps * 1e6:.0f} us of CPU a step; dropped {patched.reporter.counters.dropped}"
    )
    modelled = alternate(
        settings.pick(30, 4),
        partial(rested, plain, MODEL_BLOCK_STEPS, MODEL_S),
        partial(rested, patched, MODEL_BLOCK_STEPS, MODEL_S),
    )
    plain.close()
    patched.close()
    rows = step_rows(f"{case}, no model, nobody reads", *without_reader)
    rows += step_rows(f"{case}, no model, one reader", *with_reader)
    rows += step_rows(f"{case}, model of 5 ms, nobody reads", *modelled)
    return rows, note


def memory(settings: Settings) -> Found:
    """Compare the growth of a process since before its engine was built, with one process for each engine."""
    rows, notes = [], []
    requests = settings.pick(REQUESTS, 400)
    spawning = multiprocessing.get_context("spawn")
    for case, rounds in ((CASES[0], 2), (CASES[2], 1)):
        grown: dict[str, list[dict[str, int]]] = {"without": [], "with": []}
        for side in ("without", "with") * settings.pick(rounds, 1):
            with spawning.Pool(1) as pool:
                grown[side].append(pool.apply(alone, (case, settings.model, side == "with", requests)))
        rounds_mib = {side: [sizes["worked"] / 2**20 for sizes in side_sizes] for side, side_sizes in grown.items()}
        medians = {side: statistics.median(values) for side, values in rounds_mib.items()}
        what = f"{case}: resident set after {requests:,} requests"
        rows.append(Comparison(what, "MiB", medians["without"], medians["with"], rounds=rounds_mib))
        notes.append(f"{case}: the ledger took {grown['with'][0]['ledger']:,} bytes of it")
    return rows, notes


def stuck_reader(settings: Settings) -> Found:
    """Compare an engine without readers with one whose reader never reads, in turns of 5 blocks.

    Before a turn with the reader, the queues that both PUB sockets keep for it are filled until they drop messages.
    """
    rows, notes = [], []
    engine = Engine(CASE, settings.model, True)
    fill = pack_hashes(np.arange(FILL_REPORT_BLOCKS, dtype=np.uint64))
    with Reader() as reader:
        lost = sent = 0
        filled = 0.0
        sides: dict[tuple[bool, float], list[Steps]] = {}
        rested(engine, BLOCK_STEPS)
        sizes = []
        for turn in range(2 * settings.pick(6, 2)):
            stuck = bool(turn % 2)
            if stuck:
                reader.stick(engine.endpoint, engine.reporter.reports_endpoint)
                time.sleep(CONNECT_S)
                before = engine.reporter.counters.sent
                flood(engine, fill, settings.pick(FILL_STOCK, 1_000))
            else:
                sizes.append(resident_bytes() / 2**20)
            for model_s, steps, blocks in ((0.0, BLOCK_STEPS, 5), (MODEL_S, MODEL_BLOCK_STEPS, 5)):
                sides.setdefault((stuck, model_s), []).extend(rested(engine, steps, model_s) for _ in range(blocks))
            if stuck:
                filled = resident_bytes() / 2**20
                published = engine.reporter.counters.sent - before
                sent += published
                lost += published - reader.leave()["with_events"]
    engine.close()
    for model_s, name in ((0.0, "no model"), (MODEL_S, "model of 5 ms")):
        rows += step_rows(
            f"a reader of both topics that never reads, {name}", sides[False, model_s], sides[True, model_s]
        )
    notes.append(
        f"the stuck reader: PUB dropped {lost:,} of {sent:,} messages for it; resident set without it "
        f"{sizes[0]:.0f} MiB at first and {sizes[-1]:.0f} MiB at last, with it {filled:.0f} MiB, "
        f"most of it the 100,000 messages of vLLM's own topic"
    )
    return rows, notes


def flood(engine: Engine, hashes: bytes, stock: int) -> None:
    """Publish messages until no PUB socket has room for a reader that is stuck.

    They change nothing that is resident in the end.
    """
    stored: list[ReportEvent] = [ReportStored(hashes, 0, "FLOOD")]
    for _ in range(FILL_REPORTS):
        engine.reporter.publish(lambda: stored, None)
    for _ in range(stock):
        engine.publish_stock(KVEventBatch(ts=0.0, events=[]))
    engine.rest()


def full_queue(settings: Settings) -> Found:
    """Compare an engine whose reporter's queue is full with one whose queue is not.

    The reporter's thread is held up, and its queue has room for 4 messages: all further messages are read and dropped
    in the engine's thread.
    """
    engine = Engine(CASE, settings.model, True)
    queue = engine.reporter._queue
    usual_max_messages = queue._max_messages

    def dropping() -> Steps:
        held, go_on = threading.Event(), threading.Event()

        def hold() -> list[ReportEvent]:
            held.set()
            go_on.wait()
            return []

        engine.reporter.publish(hold, None)
        held.wait()
        queue._max_messages = 4
        took = engine.block(BLOCK_STEPS)
        queue._max_messages = usual_max_messages
        go_on.set()
        engine.rest()
        return took

    rested(engine, BLOCK_STEPS)
    sides = alternate(settings.pick(30, 4), partial(rested, engine, BLOCK_STEPS), dropping)
    counters = engine.reporter.counters
    notes = [f"full queue: {counters.dropped:,} messages dropped, {counters.epochs_lost} epochs lost"]
    engine.close()
    return step_rows("the patch's queue full, no model", *sides), notes


def snapshots(settings: Settings) -> Found:
    """Compare an engine that serves snapshots in a loop with one that serves none.

    The ledger has 200,000 blocks of a medium that the engine lacks. A reader requests a snapshot as soon as it has the
    one before.
    """
    rows = []
    engine = Engine(CASE, settings.model, True)
    hashes = np.random.default_rng(1).integers(0, 2**64, settings.pick(SNAPSHOT_BLOCKS, 20_000), dtype=np.uint64)
    for part in np.array_split(hashes, 200):
        engine.reporter.publish(lambda part=part: [ReportStored(pack_hashes(part), 0, "ELSEWHERE")], None)
    rested(engine, BLOCK_STEPS)
    read_counts: list[dict[str, int]] = []
    took_s = 0.0
    with Reader() as reader:

        def loading(steps: int, model_s: float) -> Steps:
            nonlocal took_s
            reader.load(engine.reporter.requests_endpoint)
            start = time.monotonic()
            took = engine.block(steps, model_s)
            took_s += time.monotonic() - start
            read_counts.append(reader.leave())
            engine.rest()
            return took

        for model_s, steps, name in ((0.0, BLOCK_STEPS, "no model"), (MODEL_S, MODEL_BLOCK_STEPS, "model of 5 ms")):
            sides = alternate(
                settings.pick(20, 4), partial(rested, engine, steps, model_s), partial(loading, steps, model_s)
            )
            rows += step_rows(f"snapshots of {len(hashes):,} blocks in a loop, {name}", *sides)
    served = sum(counts["snapshots"] for counts in read_counts)
    notes = [
        f"snapshots: {served / took_s:.1f} a second, {sum(counts['blocks'] for counts in read_counts) / took_s:,.0f} blocks/s"
    ]
    engine.close()
    return rows, notes


def real_engine(settings: Settings) -> Found:
    """Compare two whole vLLM engines, one of which has the patch; while one works, the other is idle.

    A block has 100 requests that generate 16 tokens. Each prompt has 96 tokens, of which 48 are one of 12 beginnings.
    """
    rates: tuple[list[float], list[float]] = ([], [])
    cpu: tuple[list[float], list[float]] = ([], [])
    requests = settings.pick(REQUESTS, 400)
    with (
        RealEngine(settings.folder / "plain", False) as plain,
        RealEngine(settings.folder / "patched", True) as patched,
    ):
        engines = (plain, patched)
        for engine in engines:
            engine.batch(REAL_BATCH)
        for turn in range(requests // REAL_BATCH):
            for side in (0, 1) if turn % 2 else (1, 0):
                before = engines[side].core_thread_s()
                rates[side].append(engines[side].batch(REAL_BATCH))
                cpu[side].append((engines[side].core_thread_s() - before) / REAL_BATCH * 1e6)
        sizes = [engine.core_bytes() / 2**20 for engine in engines]
    rows = [
        compared("real engine, tiny Gemma-3 on the CPU", "requests/s", *rates),
        compared("the same, CPU of the engine's thread a request", "us", *cpu),
        Comparison(f"the same, memory of the engine core after {requests:,} requests", "MiB", sizes[0], sizes[1]),
    ]
    return rows, []


PARTS: dict[str, Callable[[Settings], Found]] = {
    "scheduler": patch_against_none,
    "memory": memory,
    "stuck": stuck_reader,
    "full": full_queue,
    "snapshots": snapshots,
    "real": real_engine,
}
