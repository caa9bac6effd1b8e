# SPDX-License-Identifier: Apache-2.0
"""The cost of clients of GET /events to a router that ingests 50,000 blocks/s: its CPU, and the latency of questions.

The clients read in a process of their own on the same machine.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.processes import Ours, Publisher, child, cpu_s
from benchmarks.report import Others, Result, Row, finish, machine, parser_of, progress, scratch, table
from benchmarks.workload import Publishing, Workload, write_frames

WORKERS = 16
RATE_BLOCKS_S = 50_000
BLOCKS_PER_EVENT = 32
PROMPTS = 64


@contextlib.contextmanager
def watchers(port: int, count: int, query: str, folder: Path) -> Iterator[dict[str, int]]:
    """Run `count` clients during the block; the yielded dict has their received bytes and events after the block."""
    received: dict[str, int] = {}
    command = [sys.executable, "-m", "benchmarks.event_watchers", str(port), str(count), f"--query={query}"]
    with child(command, folder / "watchers.log", stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdout.readline()
        yield received
        process.stdin.close()
        received |= json.loads(process.stdout.readline())


def measure(count: int, query: str, seconds: float, folder: Path) -> list[Row]:
    chains = Workload().chains(int(RATE_BLOCKS_S * seconds / 900) + WORKERS)
    frames = list(Publishing().frames(enumerate(chains), BLOCKS_PER_EVENT))
    path = folder / "frames.bin"
    write_frames(path, frames)
    with contextlib.ExitStack() as stack:
        publisher = stack.enter_context(Publisher.run(path, WORKERS))
        router = stack.enter_context(Ours.run(folder))
        router.register(publisher.endpoints)
        publisher.wait()
        received = stack.enter_context(watchers(router.port, count, query, folder))
        name = f"{count} clients{f' ({query[1:]})' if query else ''}"
        progress(name)
        questions = [router.question(chain) for chain in chains[:PROMPTS]]
        before_s, began = cpu_s(router.pid), time.monotonic()
        publisher.start(f"send {len(frames)} {RATE_BLOCKS_S}")
        taken: list[float] = []
        while time.monotonic() - began < seconds:
            start = time.perf_counter_ns()
            status, _ = router.client.send(questions[len(taken) % PROMPTS])
            taken.append((time.perf_counter_ns() - start) / 1e3)
            if status != 200:
                raise RuntimeError(f"answered {status}")
            time.sleep(0.005)
        used = (cpu_s(router.pid) - before_s) / (time.monotonic() - began)
        sent = publisher.finish()
    rate = sent["blocks"] / (sent["end"] - sent["start"])
    return [
        Row(f"{name}: published", "blocks/s", rate),
        Row(f"{name}: CPU of the router, 200 questions a second included", "cores", used),
        Row(f"{name}: question, p50", "us", float(np.percentile(taken, 50))),
        Row(f"{name}: question, p99", "us", float(np.percentile(taken, 99))),
        Row(f"{name}: sent to a client", "events", received["events"] / max(count, 1)),
        Row(f"{name}: sent to all clients", "MiB", received["bytes"] / 2**20),
    ]


def main() -> None:
    parser = parser_of(__doc__, result=True)
    parser.add_argument("--seconds", type=float, default=8.0)
    arguments = parser.parse_args()
    about, others, rows = machine(), Others(), []
    for count, query in ((0, ""), (1, ""), (100, ""), (10, "?hashes=true")):
        with scratch() as folder:
            rows += measure(count, query, arguments.seconds, folder)
    notes = [others.note()]
    finish(Result("many_watchers", False, about, rows, notes), arguments.json, table(rows))


if __name__ == "__main__":
    main()
