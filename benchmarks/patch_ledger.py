# SPDX-License-Identifier: Apache-2.0
"""Claims: the engine patch's reporter costs a step at most 20 us, and the process 25 bytes a resident block.

Memory is the bytes that Python and numpy allocated (tracemalloc), after as many changes as there are blocks. The
engine's thread is timed at `publish`, the reporter's thread at everything but sending: ledger and encoding, with the
events available. The pause is the longest time for which a second thread could not run while a snapshot was frozen.
"""

from __future__ import annotations

import gc
import statistics
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator

import numpy as np
import zmq

from benchmarks.report import Row, Settings, below, median_row, progress, run
from kvrouter.engine_patch.reporter.counters import Counters
from kvrouter.engine_patch.reporter.event_queue import Message
from kvrouter.engine_patch.reporter.ledger import Ledger
from kvrouter.engine_patch.reporter.report_stream import ReportStream
from kvrouter.engine_patch.reporter.reporter import Reporter
from kvrouter.engine_patch.reporter.snapshots import Moment, parts
from kvrouter.engine_patch.setup.settings import ReporterSettings
from kvrouter.events.patch.messages import ReportEvent, ReportRemoved, ReportStored, pack_hashes
from kvrouter.events.vllm.messages import HashArray

GOAL_BYTES = 25.0
# A step of a fast engine takes 5 ms and more, so this is at most 0.4 percent of a step.
GOAL_PUBLISH_US = 20.0
EVENT_BLOCKS = 64
MAX_BLOCKS = 10_000_000


def hashes_of(count: int, seed: int) -> HashArray:
    return np.random.default_rng(seed).integers(0, 2**64, count, dtype=np.uint64)


def stored(hashes: HashArray, step: int = EVENT_BLOCKS) -> Iterator[ReportStored]:
    for start in range(0, len(hashes), step):
        packed = pack_hashes(hashes[start : start + step])
        yield ReportStored(packed, start % 4, "GPU", 16, [(16, len(packed) // 8)], kind="full_attention")


def removed(hashes: HashArray, step: int) -> Iterator[ReportRemoved]:
    # `start % 4` gives the groups of the stored events.
    for start in range(0, len(hashes), step):
        yield ReportRemoved(pack_hashes(hashes[start : start + step]), start % 4, "GPU")


def churned(blocks: int) -> Ledger:
    """Return a ledger of this many blocks, each of which has replaced another block."""
    ledger = Ledger(MAX_BLOCKS)
    old, new = hashes_of(blocks, 1), hashes_of(blocks, 2)
    for event in stored(old):
        ledger.apply(event)
    for removal, arrival in zip(removed(old, EVENT_BLOCKS), stored(new), strict=True):
        ledger.apply(removal)
        ledger.apply(arrival)
    return ledger


def bytes_a_block(blocks: int) -> float:
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    ledger = churned(blocks)
    gc.collect()
    after = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return (after - before) / ledger.blocks


def set_bytes_a_block(blocks: int) -> float:
    gc.collect()
    tracemalloc.start()
    plain: set[int] = set()
    for block_hash in hashes_of(blocks, 1):
        plain.add(int(block_hash))
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return used / len(plain)


def stream() -> ReportStream:
    return ReportStream(
        max_ledger_blocks=MAX_BLOCKS,
        heartbeat_s=1.0,
        dp_rank=0,
        counters=Counters(),
        wall_clock=time.time,
        clock=time.monotonic,
        new_epoch=lambda: "0" * 16,
    )


def timed(work: Callable[[], object]) -> float:
    """Return the CPU time of this thread for some work in seconds, which hardly depends on other processes."""
    start = time.thread_time()
    work()
    return time.thread_time() - start


def step_us(resident: int, steps: int, make: Callable[[int], list[ReportEvent]]) -> float:
    """Return the CPU time of one step in the reporter's thread, in us.

    Args:
        resident: The blocks in the ledger before.
        steps: The steps to average over.
        make: Returns the events of the step with a number.
    """
    report_stream = stream()
    for event in stored(hashes_of(resident, 1)):
        report_stream.ledger.apply(event)
    batches = [make(number) for number in range(steps)]

    def work() -> None:
        for number, events in enumerate(batches):
            report_stream.pass_on(Message(lambda events=events: events, number, 0.0))  # type: ignore[misc]

    return timed(work) / steps * 1e6


def decode_step(number: int) -> list[ReportEvent]:
    """Return the events, one a block, of a step in which 16 requests each fill a block and 16 blocks make room."""
    new = hashes_of(16, 1_000_000 + number)
    return [*stored(new, 1), *removed(new, 1)]


def prefill_step(number: int) -> list[ReportEvent]:
    """Return the events of a step of 8,192 tokens in blocks of 16, in two groups: 1,024 blocks in 4 events."""
    return list(stored(hashes_of(1_024, 2_000_000 + number), 256))


def publish_us(calls: int, idle: bool) -> list[float]:
    """Return the CPU times that `publish` takes in the engine's thread, in us.

    Args:
        calls: How often to call it.
        idle: Whether the reporter sleeps before each call and must be woken.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    reporter = Reporter(
        requests="inproc://requests",
        reports="inproc://reports",
        settings=ReporterSettings(heartbeat_s=60.0, max_queue_size=calls + 1),
        context=context,
        wall_clock=time.time,
        clock=time.monotonic,
        new_epoch=lambda: "0" * 16,
    )
    took = []
    if idle:
        for number in range(calls):
            time.sleep(0.0005)
            start = time.thread_time()
            reporter.publish(list, number)
            took.append((time.thread_time() - start) * 1e6)
    else:
        for _ in range(5):

            def work() -> None:
                for number in range(calls // 5):
                    reporter.publish(list, number)

            took.append(timed(work) / (calls // 5) * 1e6)
    reporter.close()
    context.term()
    return took


def freezing_ms(ledger: Ledger, rounds: int) -> tuple[list[float], list[float], list[float]]:
    """Time snapshots of a ledger.

    Returns:
        Three lists with a value for each round, in ms: freezing; making and encoding all parts; the longest pause of another
        thread during the freeze.
    """
    freezes, served, pauses = [], [], []
    for number in range(rounds):
        # Give the freeze new hashes to merge.
        for event in stored(hashes_of(4_000, 100 + number)):
            ledger.apply(event)
        gaps = [0.0]
        done = threading.Event()
        ready = threading.Event()

        def other(gaps: list[float] = gaps, done: threading.Event = done, ready: threading.Event = ready) -> None:
            last = time.perf_counter()
            ready.set()
            while not done.is_set():
                now = time.perf_counter()
                gaps[0] = max(gaps[0], now - last)
                last = now

        thread = threading.Thread(target=other)
        thread.start()
        ready.wait()
        ledger.freeze()
        done.set()
        thread.join()
        pauses.append(gaps[0] * 1e3)
        for event in stored(hashes_of(4_000, 200 + number)):
            ledger.apply(event)
        freezes.append(timed(ledger.freeze) * 1e3)
        moment = Moment("0" * 16, 0.0, 1, ledger.freeze())
        encoder = stream()._encoder
        served.append(timed(lambda: [encoder.encode(part) for part in parts(moment, 1)]) * 1e3)  # noqa: B023
    return freezes, served, pauses


def set_freezing_ms(blocks: int) -> float:
    plain = set(hashes_of(blocks, 1).tolist())
    return timed(lambda: list(plain)) * 1e3


def measure(settings: Settings) -> tuple[list[Row], list[str]]:
    rounds = settings.pick(5, 2)
    sizes = (200_000, 1_000_000) if not settings.quick else (20_000, 50_000)
    rows: list[Row] = []
    notes = []
    for blocks in sizes:
        progress(f"patch_ledger: {blocks:,} blocks")
        size = f"{blocks:,} blocks"
        rows.append(
            median_row(
                f"patch ledger, memory, {size}", "bytes/block", [bytes_a_block(blocks)],
                goal=f"at most {GOAL_BYTES:.0f}", wanted=below(GOAL_BYTES),
            )
        )  # fmt: skip
        freezes, served, pauses = freezing_ms(churned(blocks), rounds)
        rows += [
            median_row(f"patch ledger, freezing a snapshot, {size}", "ms", freezes),
            median_row(f"the same, longest pause of another thread, {size}", "ms", pauses),
            median_row(f"patch ledger, all parts of a snapshot, {size}", "ms", served),
        ]
        notes.append(
            f"a Python set of {size}: {set_bytes_a_block(blocks):.0f} bytes/block, copied in {set_freezing_ms(blocks):.1f} ms "
            f"during which no other thread runs"
        )
    progress("patch_ledger: steps")
    resident, steps = sizes[0], settings.pick(400, 40)
    decode = [step_us(resident, steps, decode_step) for _ in range(rounds)]
    prefill = [step_us(resident, steps // 4, prefill_step) for _ in range(rounds)]
    rows += [
        median_row("patch reporter thread, step with 16 + 16 events of 1 block", "us/step", decode),
        median_row("the same, a block", "us/block", [value / 32 for value in decode]),
        median_row("patch reporter thread, step with 4 events of 256 blocks", "us/step", prefill),
        median_row("the same, a block", "us/block", [value / 1_024 for value in prefill]),
        median_row(
            "patch on the engine's thread, publish, reporter busy", "us/step", publish_us(settings.pick(50_000, 5_000), False),
            goal=f"at most {GOAL_PUBLISH_US:.0f}", wanted=below(GOAL_PUBLISH_US),
        ),
    ]  # fmt: skip
    woken = publish_us(settings.pick(2_000, 200), True)
    rows.append(
        median_row(
            "patch on the engine's thread, publish, reporter asleep", "us/step", [statistics.median(woken)],
            goal=f"at most {GOAL_PUBLISH_US:.0f}", wanted=below(GOAL_PUBLISH_US),
        )
    )  # fmt: skip
    notes.append(
        f"publish while the reporter sleeps: 99th percentile {sorted(woken)[len(woken) * 99 // 100]:.1f} us of {len(woken)}"
    )
    return rows, notes


if __name__ == "__main__":
    run("patch_ledger", __doc__, measure)
