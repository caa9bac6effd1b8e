# SPDX-License-Identifier: Apache-2.0
"""The time from the socket to visible answers, beside dynamo.indexer.

One worker's stream is encoded beforehand and published at full speed. The time runs from the first send until
/query_by_hash shows the whole last prompt. Each round starts both servers again. All prompts are compared after the
last round. This router also writes the blocks to Valkey in the background, and its CPU is counted until they are
stored; dynamo keeps them in memory only.
"""

from __future__ import annotations

from benchmarks.peers.dynamo import INDEXER, check_equal, rotate, run_servers
from benchmarks.peers.packages import PeerSettings
from benchmarks.peers.table import Findings, peer_row
from benchmarks.processes import Publisher, Served, cpu_s
from benchmarks.report import progress
from benchmarks.workload import EVENTS_PER_BATCH, Chain, Publishing, Workload, chains_for, write_frames

SIZES = (32, 1, 512)
GOAL, CPU_GOAL = 1.2, 1.0


def one_round(server: Served, publisher: Publisher, batches: int, last: Chain) -> tuple[float, float, float]:
    """Publish all batches to a server and wait until they are visible.

    Returns:
        Blocks/s until visible; blocks/s that the publisher handed to ZMQ; us of the server's CPU for a block.
    """
    publisher.wait()
    before = cpu_s(server.pid)
    publisher.start(f"send {batches} 0")
    sent = publisher.finish()
    visible = server.wait_visible(last, 0)
    server.wait_stored()
    blocks = sent["blocks"]
    used = (cpu_s(server.pid) - before) / blocks * 1e6
    return blocks / (visible - sent["start"]), blocks / (sent["end"] - sent["start"]), used


def measure(settings: PeerSettings) -> Findings:
    rounds = settings.pick(5, 1)
    wanted = {
        32: settings.pick(600_000, 40_000),
        1: settings.pick(150_000, 20_000),
        512: settings.pick(600_000, 40_000),
    }
    chains = Workload().chains(2 * chains_for(max(wanted.values()), 1))
    rows = []
    notes = []
    for size in SIZES:
        chosen = chains[: 2 * chains_for(wanted[size], 1)]
        path = settings.folder / f"frames-{size}.bin"
        batches, blocks = write_frames(path, Publishing(workers=1).frames(enumerate(chosen), size))
        rates: dict[str, list[float]] = {}
        used: dict[str, list[float]] = {}
        published = []
        for turn in range(rounds):
            progress(f"ingest: {size} blocks an event, round {turn + 1} of {rounds}")
            with run_servers(INDEXER, settings.dynamo.bin, settings.folder) as servers:
                for server in rotate(servers, turn):
                    with Publisher.run(path, 1) as publisher:
                        server.register(publisher.endpoints)
                        rate, sending, cpu = one_round(server, publisher, batches, chosen[-1])
                        used.setdefault(server.name, []).append(cpu)
                        rates.setdefault(server.name, []).append(rate)
                        published.append(sending)
                if turn == rounds - 1:
                    check_equal(servers, chosen)
        what = f"ingest to visible, {size} block{'s'[: size - 1]} an event"
        problem = settings.dynamo.problem
        rows.append(peer_row(what, "blocks/s", INDEXER, rates, goal=GOAL, more=True, problem=problem))
        rows.append(
            peer_row(f"{what}, CPU, Valkey included", "us/block", INDEXER, used, goal=CPU_GOAL, problem=problem)
        )
        notes.append(
            f"{size} blocks an event: {blocks:,} blocks, {EVENTS_PER_BATCH[size]} events a batch; the publisher itself "
            f"sent {min(published):,.0f} blocks/s or more"
        )
    return Findings(rows, notes)
