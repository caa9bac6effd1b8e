# SPDX-License-Identifier: Apache-2.0
"""The time from the sockets of a fleet to visible answers, beside dynamo.indexer.

As vLLM does, each worker publishes one event a message, with its token ids: a prefill's blocks, or the one block that a
decoding request has filled. The workers' streams are encoded beforehand and published at full speed, one message of
each worker in turn. The time runs from the first send until /query_by_hash shows each worker's whole last prompt. Each
round starts both servers again. All prompts are compared after the last round. This router also writes the blocks to
Valkey in the background, and its CPU is counted until they are stored; dynamo keeps them in memory only.
"""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.peers.dynamo import INDEXER, check_equal, rotate, run_servers
from benchmarks.peers.packages import PeerSettings
from benchmarks.peers.table import Findings, peer_row
from benchmarks.processes import Publisher, Served, cpu_s
from benchmarks.report import progress
from benchmarks.workload import Chain, Publishing, Workload, at_once, chains_for, write_frames

# The workers, the blocks of an event, and the entries of a whole and of a quick run.
CASES = ((16, 32, 600_000, 60_000), (16, 1, 150_000, 30_000), (64, 32, 600_000, 100_000), (64, 1, 150_000, 100_000))
GOAL, CPU_GOAL = 1.3, 1.0


def one_round(
    server: Served, publisher: Publisher, batches: int, last: Mapping[int, Chain]
) -> tuple[float, float, float]:
    """Publish all batches to a server and wait until the last prompt of each worker is visible.

    Returns:
        Blocks/s until visible; blocks/s that the publisher handed to ZMQ; us of the server's CPU for a block.
    """
    publisher.wait()
    before = cpu_s(server.pid)
    publisher.start(f"send {batches} 0")
    sent = publisher.finish()
    visible = max(server.wait_visible(chain, worker) for worker, chain in last.items())
    server.wait_stored()
    blocks = sent["blocks"]
    used = (cpu_s(server.pid) - before) / blocks * 1e6
    return blocks / (visible - sent["start"]), blocks / (sent["end"] - sent["start"]), used


def measure(settings: PeerSettings) -> Findings:
    rounds = settings.pick(5, 1)
    wanted = [settings.pick(whole, quick) for _, _, whole, quick in CASES]
    chains = Workload().chains(max(chains_for(entries, case[0]) for case, entries in zip(CASES, wanted, strict=True)))
    rows = []
    notes = []
    for (workers, size, *_), entries in zip(CASES, wanted, strict=True):
        chosen = chains[: chains_for(entries, workers)]
        publishing = Publishing(workers, events_per_batch=1)
        path = settings.folder / f"frames-{workers}-{size}.bin"
        batches, blocks = write_frames(path, at_once(publishing.frames(enumerate(chosen), size)))
        last = {worker: chosen[index] for index, holders in publishing.held.items() for worker in holders}
        rates: dict[str, list[float]] = {}
        used: dict[str, list[float]] = {}
        published = []
        what = f"ingest to visible, {workers} workers at once, an event of {size} block{'s'[: size - 1]} a message"
        for turn in range(rounds):
            progress(f"{what}, round {turn + 1} of {rounds}")
            with run_servers(INDEXER, settings.dynamo.bin, settings.folder) as servers:
                for server in rotate(servers, turn):
                    with Publisher.run(path, workers) as publisher:
                        server.register(publisher.endpoints)
                        rate, sending, cpu = one_round(server, publisher, batches, last)
                        used.setdefault(server.name, []).append(cpu)
                        rates.setdefault(server.name, []).append(rate)
                        published.append(sending)
                if turn == rounds - 1:
                    check_equal(servers, chosen)
        problem = settings.dynamo.problem
        rows.append(peer_row(what, "blocks/s", INDEXER, rates, goal=GOAL, more=True, problem=problem))
        rows.append(
            peer_row(f"{what}, CPU, Valkey included", "us/block", INDEXER, used, goal=CPU_GOAL, problem=problem)
        )
        notes.append(f"{what}: {blocks:,} blocks; the publisher itself sent {min(published):,.0f} blocks/s or more")
    return Findings(rows, notes)
