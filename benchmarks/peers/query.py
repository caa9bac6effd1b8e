# SPDX-License-Identifier: Apache-2.0
"""`POST /query_by_hash` of 512 blocks over HTTP beside dynamo.indexer.

Both servers follow the same 16 event streams and are queried by the same client over one kept connection, in turns;
once idle, and once while 50,000 blocks/s are published to the queried server. Answers are compared first. CPU is that
of the server's processes; while they ingest, the CPU that ingest alone took just before is subtracted. A note has the
cost of the same exchange with a server that does not interpret the request.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from benchmarks.peers.dynamo import INDEXER, check_equal, rotate, run_servers
from benchmarks.peers.packages import PeerSettings
from benchmarks.peers.samples import Samples
from benchmarks.peers.table import Findings, latency_rows, peer_row
from benchmarks.processes import Publisher, Served, cpu_s, serving
from benchmarks.report import progress
from benchmarks.workload import (
    CHAIN_BLOCKS,
    MODEL,
    ONE_GROUP,
    PREFIX_BLOCKS,
    WORKERS,
    Chain,
    Kind,
    Publishing,
    Workload,
    chains_for,
    last_placed,
    write_frames,
)
from tests.support.ports import free_port

BLOCKS_PER_EVENT = 32
INGEST_BLOCKS_S = 50_000
# The number of prompts that are queried in turn.
PROMPTS = 64
WARM_REQUESTS = 50
# The server of the note, which exchanges the same bytes.
BARE = "a bare protocol"
IDLE, BUSY = "idle", f"while ingesting {INGEST_BLOCKS_S:,} blocks/s"


def latencies(server: Served, questions: Sequence[bytes], count: int = 0, until: float = 0.0) -> np.ndarray:
    """Return the times of single requests in us.

    Args:
        server: The server to query.
        questions: The requests, sent in turn.
        count: How many to send; 0 for as many as are sent before `until`.
        until: The end (CLOCK_MONOTONIC), if `count` is 0.
    """
    clock = time.perf_counter_ns
    send = server.client.send
    taken: list[int] = []
    at = 0
    while (len(taken) < count) if count else (time.monotonic() < until):
        start = clock()
        status, _ = send(questions[at])
        taken.append(clock() - start)
        if status != 200:
            raise RuntimeError(f"{server.name} answered {status}")
        at = (at + 1) % len(questions)
    return np.array(taken) / 1000


def busy_round(
    server: Served, publisher: Publisher, questions: Sequence[bytes], batches: int, seconds: float
) -> tuple[np.ndarray, float, float]:
    """Query a server while it ingests; half of the time goes to ingest alone, so that its CPU is known.

    Returns:
        The times in us; the server's CPU for these requests in s; the published blocks/s.
    """
    began, before = time.monotonic(), cpu_s(server.pid)
    publisher.start(f"send {batches} {INGEST_BLOCKS_S}")
    time.sleep(seconds / 2)
    alone, middle = cpu_s(server.pid), time.monotonic()
    taken = latencies(server, questions, until=middle + seconds / 2)
    whole, end = cpu_s(server.pid), time.monotonic()
    sent = publisher.finish()
    ingest = (alone - before) / (middle - began) * (end - middle)
    return taken, max(0.0, whole - alone - ingest), sent["blocks"] / (sent["end"] - sent["start"])


@contextlib.contextmanager
def bare_server(folder: Path, answer: bytes) -> Iterator[Served]:
    """Run a server that answers every question with these bytes."""
    path, port = folder / "bare-answer.bin", free_port()
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(answer)}\r\n\r\n"
    path.write_bytes(head.encode() + answer)
    with serving(
        [sys.executable, "-m", "benchmarks.bare_server", str(port), str(path)], port, folder / "bare.log"
    ) as pid:
        yield Served(pid, port, BARE)


def check_groups(server: Served, chain: Chain, groups: int) -> None:
    """Raise AssertionError unless this router judges a prompt by all of its groups."""
    body = {"model_name": MODEL, "block_hashes": chain.hashes.tolist(), "explain": True}
    for worker, hit in server.client.call("POST", "/query_by_hash", body)["instances"].items():
        if hit["longest_matched"] and len(hit["groups"]) != groups:
            raise AssertionError(f"{len(hit['groups'])} groups at worker {worker}, {groups} were announced")


def measure(settings: PeerSettings, groups: Sequence[Kind] = ONE_GROUP) -> Findings:
    rounds = settings.pick(7, 2)
    requests = settings.pick(3000, 200)
    busy_s = settings.pick(4, 2)
    count = chains_for(settings.pick(200_000, 40_000))
    own_blocks = (CHAIN_BLOCKS - PREFIX_BLOCKS) * 2 * len(groups)
    busy_chains = int(INGEST_BLOCKS_S * busy_s * rounds / own_blocks) + WORKERS
    progress("query: making events")
    chains = Workload().chains(count + busy_chains)
    publishing = Publishing(groups=groups)
    first_frames = list(publishing.frames(enumerate(chains[:count]), BLOCKS_PER_EVENT))
    loaded_entries = publishing.entries
    later_frames = list(publishing.frames(list(enumerate(chains))[count:], BLOCKS_PER_EVENT))
    path = settings.folder / "frames.bin"
    write_frames(path, [*first_frames, *later_frames])
    per_round = int(len(later_frames) / rounds)

    samples, published = Samples(), []
    with contextlib.ExitStack() as stack:
        servers = stack.enter_context(run_servers(INDEXER, settings.dynamo.bin, settings.folder))
        publishers = {}
        for server in servers:
            publisher = publishers[server.name] = stack.enter_context(Publisher.run(path, WORKERS))
            server.register(publisher.endpoints)
            publisher.wait()
            publisher.send(len(first_frames))
            for index, worker in last_placed(publishing.held, count):
                server.wait_visible(chains[index], worker)
        check_equal(servers, chains[:count])
        check_groups(servers[0], chains[0], len(groups))
        questions = {server.name: [server.question(chain) for chain in chains[:PROMPTS]] for server in servers}
        _, answer = servers[0].client.send(questions[servers[0].name][0])
        bare = stack.enter_context(bare_server(settings.folder, answer))
        questions[BARE] = questions[servers[0].name]
        for turn in range(rounds):
            progress(f"query: idle, round {turn + 1} of {rounds}")
            for server in rotate([*servers, bare], turn):
                latencies(server, questions[server.name], WARM_REQUESTS)
                before = cpu_s(server.pid)
                taken = latencies(server, questions[server.name], requests)
                samples.add(IDLE, server.name, taken, cpu_s(server.pid) - before)
        for turn in range(rounds):
            progress(f"query: while ingesting, round {turn + 1} of {rounds}")
            for server in rotate(servers, turn):
                server_questions = questions[server.name]
                taken, used_s, rate = busy_round(server, publishers[server.name], server_questions, per_round, busy_s)
                samples.add(BUSY, server.name, taken, used_s)
                published.append(rate)
    floor_us = float(np.median([np.median(round_us) for round_us in samples.taken[IDLE].pop(BARE)]))
    floor_cpu = float(np.median(samples.cpu[IDLE].pop(BARE)))
    goal = 1.5 if len(groups) == 1 else 1.0
    rows = []
    for kind in (IDLE, BUSY):
        what = f"/query_by_hash, 512 blocks, {WORKERS} workers, {len(groups)} group{'s'[: len(groups) - 1]}, {kind}"
        problem = settings.dynamo.problem
        rows += latency_rows(what, INDEXER, samples.taken[kind], goal=goal, problem=problem)
        cpu = samples.cpu[kind]
        rows.append(peer_row(f"{what}, CPU", "us/request", INDEXER, cpu, goal=goal, problem=problem))
    return Findings(
        rows,
        [
            f"{loaded_entries:,} entries; published meanwhile: {np.median(published):,.0f} blocks/s",
            f"the same bytes exchanged with {BARE}, idle: p50 {floor_us:.1f} us, CPU {floor_cpu:.1f} us/request",
        ],
    )
