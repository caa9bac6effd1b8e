# SPDX-License-Identifier: Apache-2.0
"""Claim: `POST /query_by_hash` of 512 blocks over HTTP is faster than dynamo's at the median and at the 99th
percentile.

Both servers follow the same 16 event streams (200,000 entries) and are queried by the same client over one kept
connection, in turns; once idle, and once while 50,000 blocks/s are published to the one that is queried. Answers are
compared first.
"""

from __future__ import annotations

import contextlib
import time

import numpy as np
from processes import Dynamo, Ours, Publisher, Served, check_equal, cpu_s
from report import Row, Settings, below_dynamo, median_row, progress, run
from workload import WORKERS, Publishing, Workload, chains_for, write_frames

BLOCKS_PER_EVENT = 32
INGEST_BLOCKS_S = 50_000
# Prompts queried in turn.
PROMPTS = 64


def latencies(server: Served, questions: list[bytes], count: int = 0, until: float = 0.0) -> np.ndarray:
    """Times of single requests in us: `count` of them, or as many as go before `until` (CLOCK_MONOTONIC)."""
    clock = time.perf_counter_ns
    send = server.client.send
    taken = []
    at = 0
    while (len(taken) < count) if count else (time.monotonic() < until):
        start = clock()
        status, _ = send(questions[at])
        taken.append(clock() - start)
        if status != 200:
            raise RuntimeError(f"{server.name} answered {status}")
        at = (at + 1) % len(questions)
    return np.array(taken) / 1000


def measure(settings: Settings) -> tuple[list[Row], list[str]]:
    rounds = settings.pick(7, 2)
    requests = settings.pick(3000, 200)
    busy_s = settings.pick(4, 1)
    count = chains_for(settings.pick(200_000, 40_000))
    busy_chains = int(INGEST_BLOCKS_S * busy_s * rounds / 768) + 16
    progress("query: making events")
    chains = Workload().chains(count + busy_chains)
    publishing = Publishing()
    load = list(publishing.frames(enumerate(chains[:count]), BLOCKS_PER_EVENT))
    loaded = publishing.entries
    more = list(publishing.frames(list(enumerate(chains))[count:], BLOCKS_PER_EVENT))
    path = settings.folder / "frames.bin"
    write_frames(path, [*load, *more])
    # One after another over the workers, as a fleet would publish.
    per_round = int(len(more) / rounds)

    samples: dict[tuple[str, str], list[np.ndarray]] = {}
    cpu: dict[str, list[float]] = {}
    with contextlib.ExitStack() as stack:
        servers: list[Served] = [stack.enter_context(Ours.run(settings.folder))]
        if settings.dynamo is not None:
            servers.append(stack.enter_context(Dynamo.run(settings.dynamo, settings.folder)))
        publishers = {}
        for server in servers:
            publisher = publishers[server.name] = stack.enter_context(Publisher.run(path, WORKERS))
            server.register(publisher.endpoints)
            publisher.wait()
            publisher.send(len(load))
            for index in range(max(0, count - 2 * WORKERS), count):
                for worker in publishing.held[index]:
                    server.wait_visible(chains[index], worker)
        if len(servers) == 2:
            check_equal(*servers, chains[:count])  # type: ignore[arg-type]
        asked = chains[:PROMPTS]
        questions = {server.name: [server.question(chain) for chain in asked] for server in servers}
        unsigned = [servers[0].question(chain, signed=False) for chain in asked]
        for turn in range(rounds):
            progress(f"query: idle, round {turn + 1} of {rounds}")
            for server in servers:
                latencies(server, questions[server.name], 50)
                before = cpu_s(server.pid)
                taken = latencies(server, questions[server.name], requests)
                cpu.setdefault(server.name, []).append((cpu_s(server.pid) - before) / requests * 1e6)
                samples.setdefault(("i64", server.name), []).append(taken)
            samples.setdefault(("u64", "kvrouter"), []).append(latencies(servers[0], unsigned, requests))
        lag = []
        for turn in range(rounds):
            progress(f"query: while ingesting, round {turn + 1} of {rounds}")
            for server in servers:
                publisher = publishers[server.name]
                publisher.start(f"send {per_round} {INGEST_BLOCKS_S}")
                taken = latencies(server, questions[server.name], until=time.monotonic() + busy_s)
                sent = publisher.finish()
                lag.append(sent["blocks"] / (sent["end"] - sent["start"]))
                samples.setdefault(("busy", server.name), []).append(taken)
    entries = f"{loaded:,} entries"
    rows = []
    for kind, text in (("i64", "idle"), ("busy", f"while ingesting {INGEST_BLOCKS_S:,} blocks/s")):
        for quantile in (50, 99):
            values = {s.name: [float(np.percentile(x, quantile)) for x in samples[kind, s.name]] for s in servers}
            rows.append(
                median_row(
                    f"/query_by_hash, 512 blocks, {entries}, {text}, p{quantile}",
                    "us",
                    values["kvrouter"],
                    values.get("dynamo", ()),
                    goal="below dynamo's",
                    wanted=below_dynamo,
                )
            )
    rows.append(median_row("the same, idle, CPU of the server", "us/request", cpu["kvrouter"], cpu.get("dynamo", ())))
    for quantile in (50, 99):
        values_u = [float(np.percentile(x, quantile)) for x in samples["u64", "kvrouter"]]
        rows.append(median_row(f"the same, idle, hashes written as u64, p{quantile}", "us", values_u))
    return rows, [f"published meanwhile: {np.median(lag):,.0f} blocks/s"]


if __name__ == "__main__":
    run("query_http", __doc__, measure)
