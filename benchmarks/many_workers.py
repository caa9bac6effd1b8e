# SPDX-License-Identifier: Apache-2.0
"""The cost of a fleet of many workers to a router that gets few requests.

Measured are registering the workers, following them while they are idle, and one question about a prompt that all of
them hold; then the waiting time of questions while a worker with many blocks is removed. Every worker holds the same
prompt; its engine publishes nothing more. With --urls each worker has an HTTP endpoint too, whose health is checked
every second.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from benchmarks.http_client import HttpClient
from benchmarks.processes import Ours, Publisher, child, cpu_s, rss_bytes
from benchmarks.report import Others, Result, Row, finish, machine, parser_of, progress, scratch, table
from benchmarks.workload import (
    BLOCK_TOKENS,
    CHAIN_BLOCKS,
    EVENTS_PER_BATCH,
    MODEL,
    Chain,
    Frame,
    Workload,
    stored,
    write_frames,
)
from kvrouter.events.vllm.codec import encode_batch

BLOCKS_PER_EVENT = 32
IDLE_S = 20.0
QUESTIONS = 1_000
# Pending work in the router is done within this time after the last worker is live.
SETTLE_S = 3.0
WAIT_S = 300.0
# The removal: the number of other workers; the prompts of 512 blocks of the removed worker (some share a beginning);
# and the time for which questions are sent meanwhile.
BESIDE = 16
OWN_PROMPTS = 259
REMOVAL_S = 3.0


STEP_BLOCKS = BLOCKS_PER_EVENT * EVENTS_PER_BATCH


def payloads(chain: Chain) -> Iterator[bytes]:
    """Yield the batches that store a chain."""
    for batch_first in range(0, CHAIN_BLOCKS, STEP_BLOCKS):
        firsts = range(batch_first, batch_first + STEP_BLOCKS, BLOCKS_PER_EVENT)
        yield encode_batch(1.7e9, [stored(chain, first, first + BLOCKS_PER_EVENT) for first in firsts], 0)


def frames(chain: Chain, workers: int) -> Iterator[Frame]:
    for seq, payload in enumerate(payloads(chain)):
        yield from (Frame(worker, seq, STEP_BLOCKS, payload) for worker in range(workers))


def register(client: HttpClient, endpoints: Sequence[str], urls: Sequence[str] = ()) -> None:
    for worker, endpoint in enumerate(endpoints):
        body = {"worker_id": f"w{worker}", "model": MODEL, "endpoint": endpoint, "block_size": BLOCK_TOKENS}
        client.call("POST", "/register", body | ({"url": urls[worker]} if urls else {}))


def question_of(client: HttpClient, chain: Chain) -> bytes:
    values = chain.hashes.view(np.int64).tolist()
    return client.request("POST", "/query_by_hash", {"model_name": MODEL, "block_hashes": values})


@contextlib.contextmanager
def http_engines(count: int, folder: Path) -> Iterator[list[str]]:
    """Run `count` engines that answer their health checks, and yield their URLs."""
    command = [sys.executable, "-m", "benchmarks.http_engines", str(count)]
    with child(command, folder / "http_engines.log", stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())


def wait(client: HttpClient, count: int, blocks: int = CHAIN_BLOCKS) -> float:
    """Wait until `count` workers are live and hold `blocks` blocks, and return that moment (CLOCK_MONOTONIC)."""
    deadline = time.monotonic() + WAIT_S
    wanted = {"g0:GPU": blocks}
    while True:
        rows = client.call("GET", "/workers")["workers"]
        if sum(row["state"] == "live" and row["residency"] == wanted for row in rows) == count:
            return time.monotonic()
        if time.monotonic() > deadline:
            raise TimeoutError(f"not all workers are live: {rows[0]}")
        time.sleep(0.1)


def measure(count: int, folder: Path, *, urls: bool) -> list[Row]:
    chain = Workload().chain(0)
    path = folder / "frames.bin"
    batches, _ = write_frames(path, frames(chain, count))
    with contextlib.ExitStack() as stack:
        publisher = stack.enter_context(Publisher.run(path, count))
        addresses = stack.enter_context(http_engines(count, folder)) if urls else []
        router = stack.enter_context(Ours.run(folder))
        client = router.client
        progress(f"{count} workers: registering")
        cpu, start = cpu_s(router.pid), time.monotonic()
        register(client, publisher.endpoints, addresses)
        took_s, took_cpu_s = time.monotonic() - start, cpu_s(router.pid) - cpu
        publisher.wait()
        publisher.send(batches)
        live_s = wait(client, count) - start
        time.sleep(SETTLE_S)
        progress(f"{count} workers: idle")
        cpu, start = cpu_s(router.pid), time.monotonic()
        time.sleep(IDLE_S)
        idle = (cpu_s(router.pid) - cpu) / (time.monotonic() - start)
        progress(f"{count} workers: questions")
        question = question_of(client, chain)
        times = []
        cpu = cpu_s(router.pid)
        for _ in range(QUESTIONS):
            begin = time.perf_counter_ns()
            status, _ = client.send(question)
            times.append((time.perf_counter_ns() - begin) / 1e6)
            if status != 200:
                raise RuntimeError(f"answered {status}")
        per_question = (cpu_s(router.pid) - cpu) / QUESTIONS * 1e3
        memory = rss_bytes(router.pid) / 2**20
    fleet = f"{count:,} workers{', health checked' if urls else ''}"
    return [
        Row(f"{fleet}: all registered", "s", took_s),
        Row(f"{fleet}: all registered, CPU of the router", "s", took_cpu_s),
        Row(f"{fleet}: all live, from the first registration", "s", live_s),
        Row(f"{fleet}: idle", "cores", idle),
        Row(f"{fleet}: /query_by_hash, 512 blocks that all hold, p50", "ms", float(np.percentile(times, 50))),
        Row(f"{fleet}: the same, p99", "ms", float(np.percentile(times, 99))),
        Row(f"{fleet}: the same, longest", "ms", max(times)),
        Row(f"{fleet}: the same, CPU of the router", "ms", per_question),
        Row(f"{fleet}: resident memory of the router", "MiB", memory),
    ]


def removal_frames(chains: list[Chain]) -> Iterator[Frame]:
    """Yield the first prompt for each of the workers that stay, and all prompts for the last worker."""
    seq = 0
    for chain in chains:
        for payload in payloads(chain):
            if chain is chains[0]:
                yield from (Frame(worker, seq, STEP_BLOCKS, payload) for worker in range(BESIDE))
            yield Frame(BESIDE, seq, STEP_BLOCKS, payload)
            seq += 1


def measure_removal(folder: Path) -> list[Row]:
    """Time questions while a worker with many blocks is removed, and in as much time before the removal."""
    chains = Workload().chains(OWN_PROMPTS)
    path = folder / "removal.bin"
    batches, _ = write_frames(path, removal_frames(chains))
    blocks = len(np.unique(np.concatenate([chain.hashes for chain in chains])))
    with Publisher.run(path, BESIDE + 1) as publisher, Ours.run(folder) as router:
        client, remover = router.client, HttpClient(router.port)
        register(client, publisher.endpoints)
        publisher.wait()
        publisher.send(batches)
        wait(client, 1, blocks)
        time.sleep(SETTLE_S)
        question = question_of(client, chains[0])

        def longest_ms() -> float:
            longest, end = 0.0, time.monotonic() + REMOVAL_S
            while time.monotonic() < end:
                begin = time.perf_counter_ns()
                client.send(question)
                longest = max(longest, (time.perf_counter_ns() - begin) / 1e6)
            return longest

        quiet = longest_ms()
        took: list[float] = []

        def remove() -> None:
            begin = time.monotonic()
            remover.call("POST", "/unregister", {"worker_id": f"w{BESIDE}", "model": MODEL})
            took.append((time.monotonic() - begin) * 1e3)

        thread = threading.Thread(target=remove)
        thread.start()
        busy = longest_ms()
        thread.join()
        page = client.send(client.request("GET", "/metrics"))[1].decode()
    entries = next(line.split()[1] for line in page.splitlines() if line.startswith("kvrouter_mirror_entries "))
    if float(entries) != BESIDE * CHAIN_BLOCKS:
        raise AssertionError(f"{entries} entries are left")
    name = f"a worker with {blocks:,} blocks removed beside {BESIDE}"
    return [
        Row(f"{name}: answered after", "ms", took[0]),
        Row(f"{name}: longest question meanwhile", "ms", busy),
        Row(f"{name}: longest question in as much time before", "ms", quiet),
    ]


def main() -> None:
    parser = parser_of(__doc__, result=True)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 250, 1_000], help="sizes of the fleet")
    parser.add_argument("--urls", action="store_true", help="engines with HTTP, whose health is checked")
    arguments = parser.parse_args()
    about, others, rows = machine(), Others(), []
    for count in arguments.workers:
        # /tmp instead of the system's temporary folder, as the path of the private store's socket must stay short.
        with scratch() as folder:
            rows += measure(count, folder, urls=arguments.urls)
    with scratch() as folder:
        progress("removal")
        rows += measure_removal(folder)
    notes = [others.note()]
    finish(Result("many_workers", False, about, rows, notes), arguments.json, table(rows))


if __name__ == "__main__":
    main()
