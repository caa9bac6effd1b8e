# SPDX-License-Identifier: Apache-2.0
"""`POST /select` of 8,192 token ids, and the life of a reservation, beside dynamo.select_service.

Both servers follow the same 16 event streams and serve the same client over one kept connection, in turns. In "last 256
new" a prompt's first 7,936 ids are cached and came in earlier requests; in "all new" nothing is cached. No prompt is
sent twice in a round. Choices are compared first: both servers must reuse the same tokens, at a worker that holds them.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.dynamo import SELECT_SERVICE, rotate, run_servers
from benchmarks.peers.packages import PeerSettings
from benchmarks.peers.samples import Samples
from benchmarks.peers.table import Findings, latency_rows, peer_row
from benchmarks.processes import POLL_S, VISIBLE_TIMEOUT_S, Publisher, Served, cpu_s, serving
from benchmarks.report import progress
from benchmarks.workload import (
    BLOCK_TOKENS,
    MODEL,
    VOCABULARY,
    WORKERS,
    Chain,
    Publishing,
    Workload,
    chains_for,
    last_placed,
    write_frames,
)
from tests.support.ports import free_port

BLOCKS_PER_EVENT = 32
NEW_TOKENS = 256
PROMPTS = 64
WARM_REQUESTS = 5
LAST_NEW, ALL_NEW, RESERVE = "last 256 new", "all new", "reserve"
KINDS = (LAST_NEW, ALL_NEW, RESERVE)
GOALS = {LAST_NEW: 1.3, ALL_NEW: 1.0, RESERVE: 1.2}
WHAT = {
    LAST_NEW: "/select, 8,192 ids, last 256 new",
    ALL_NEW: "/select, 8,192 ids, all new",
    RESERVE: "/select_and_reserve + prefill_complete + DELETE, 8,192 ids, last 256 new",
}


class Prompts:
    """The bodies of requests, no two alike; the same for every server, in the same order."""

    def __init__(self, chains: Sequence[Chain], kind: str, turn: int) -> None:
        self._bases = itertools.cycle(chains[:PROMPTS])
        self._rng = np.random.default_rng([turn, KINDS.index(kind)])
        self._names = (f"s{turn}-{number}" for number in itertools.count())
        self._kind = kind

    def ids(self) -> list[int]:
        tokens = next(self._bases).tokens.copy()
        new = len(tokens) if self._kind == ALL_NEW else NEW_TOKENS
        tokens[-new:] = self._rng.integers(0, VOCABULARY, new)
        return list(tokens.tolist())

    def requests(self, server: Served) -> list[bytes]:
        """Return one request, or the requests of a reservation's life."""
        body: dict[str, Any] = {"model_name": MODEL, "token_ids": self.ids()}
        if self._kind != RESERVE:
            return [server.client.request("POST", "/select", body)]
        name = next(self._names)
        return [
            server.client.request("POST", "/select_and_reserve", body | {"selection_id": name}),
            server.client.request("POST", f"/reservations/{name}/prefill_complete", {}),
            server.client.request("DELETE", f"/reservations/{name}"),
        ]


def select(server: Served, ids: Sequence[int], worker: int | None = None) -> tuple[int, int]:
    """Return the selected worker and the tokens that it reuses.

    Args:
        server: The server to query.
        ids: The prompt.
        worker: The only worker to consider, or None for all.
    """
    body: dict[str, Any] = {"model_name": MODEL, "token_ids": ids}
    if worker is not None:
        body["pinned_worker"] = {"worker_id": worker + 1, "dp_rank": 0}
    status, content = server.client.send(server.client.request("POST", "/select", body))
    if status != 200:
        raise RuntimeError(f"{server.name}: {status} {content[:300]!r}")
    selection = json.loads(content)
    return int(selection["worker_id"]) - 1, int(selection["overlap"]["longest_matched"])


def wait_visible(server: Served, chain: Chain, worker: int) -> None:
    ids = chain.tokens.tolist()
    deadline = time.monotonic() + VISIBLE_TIMEOUT_S
    # The block with the prompt's last token is computed again, so it is not counted.
    while select(server, ids, worker)[1] < len(ids) - BLOCK_TOKENS:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{server.name}: the last blocks did not become visible in {VISIBLE_TIMEOUT_S} s")
        time.sleep(POLL_S)


def check(servers: Sequence[Served], chains: Sequence[Chain], held: dict[int, list[int]]) -> None:
    """Raise AssertionError unless every server reuses all that is cached."""
    for index, chain in enumerate(chains):
        ids = [*chain.tokens[:-NEW_TOKENS].tolist(), *range(NEW_TOKENS)]
        for server in servers:
            worker, tokens = select(server, ids)
            if worker not in held[index] or tokens != len(ids) - NEW_TOKENS:
                raise AssertionError(
                    f"{server.name} reuses {tokens} tokens at {worker}, {held[index]} hold prompt {index}"
                )


def timed(server: Served, requests: Sequence[Sequence[bytes]]) -> np.ndarray:
    """Return the times in us, each for all requests of one entry together."""
    taken = np.empty(len(requests))
    for n, parts in enumerate(requests):
        start = time.perf_counter_ns()
        statuses = [server.client.send(part)[0] for part in parts]
        taken[n] = time.perf_counter_ns() - start
        if not all(200 <= status < 300 for status in statuses):
            raise RuntimeError(f"{server.name} answered {statuses}")
    return taken / 1000


@contextlib.contextmanager
def engine(folder: Path) -> Iterator[str]:
    """Run a server that answers the router's health checks for all workers, and yield its URL."""
    port = free_port()
    with serving([sys.executable, "-m", "benchmarks.proxy_stub", str(port)], port, folder / "stub.log"):
        yield f"http://127.0.0.1:{port}"


def register(server: Served, url: str, endpoints: Sequence[str]) -> None:
    """Register the workers in the selection service's own form."""
    for worker, endpoint in enumerate(endpoints):
        body = {"worker_id": worker + 1, "model_name": MODEL, "endpoint": url, "kv_events_endpoint": endpoint}
        server.client.call("POST", "/workers", body | {"block_size": BLOCK_TOKENS})


def measure(settings: PeerSettings) -> Findings:
    rounds = settings.pick(7, 2)
    requests = settings.pick(600, 40)
    count = chains_for(settings.pick(200_000, 40_000))
    progress("select: making events")
    chains = Workload().chains(count)
    publishing = Publishing()
    path = settings.folder / "frames.bin"
    batches, _ = write_frames(path, publishing.frames(enumerate(chains), BLOCKS_PER_EVENT))
    samples = Samples()
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(engine(settings.folder))
        servers = stack.enter_context(run_servers(SELECT_SERVICE, settings.dynamo.bin, settings.folder))
        for server in servers:
            publisher = stack.enter_context(Publisher.run(path, WORKERS))
            register(server, url, publisher.endpoints)
            publisher.wait()
            publisher.send(batches)
            for index, worker in last_placed(publishing.held, count):
                wait_visible(server, chains[index], worker)
        check(servers, chains[:PROMPTS], publishing.held)
        for turn in range(rounds):
            for kind in KINDS:
                progress(f"select: {kind}, round {turn + 1} of {rounds}")
                for server in rotate(servers, turn):
                    prompts = Prompts(chains, kind, turn)
                    # Make the requests beforehand, so that only the server is timed.
                    prompt_requests = [prompts.requests(server) for _ in range(WARM_REQUESTS + requests)]
                    timed(server, prompt_requests[:WARM_REQUESTS])
                    before = cpu_s(server.pid)
                    taken = timed(server, prompt_requests[WARM_REQUESTS:])
                    samples.add(kind, server.name, taken, cpu_s(server.pid) - before)
    rows = []
    problem = settings.dynamo.problem
    for kind in KINDS:
        rows += latency_rows(WHAT[kind], SELECT_SERVICE, samples.taken[kind], goal=GOALS[kind], problem=problem)
        cpu = samples.cpu[kind]
        rows.append(peer_row(f"{WHAT[kind]}, CPU", "us/request", SELECT_SERVICE, cpu, problem=problem))
    return Findings(rows, [f"{publishing.entries:,} entries on {WORKERS} workers"])
