# SPDX-License-Identifier: Apache-2.0
"""The time from the sockets of a fleet to visible answers, beside dynamo.indexer.

As vLLM does, each worker publishes one event a message, with its token ids: a prefill's blocks, or the one block that a
decoding request has filled. The workers' streams are encoded beforehand and published at full speed, one message of
each worker in turn. Before the timing each worker has stored a prompt or two, in events of 32 blocks, so that the
servers know its groups. The time runs from the first send until /query_by_hash shows each worker's whole last prompt.
Each round starts both servers again. All prompts are compared after the last round. This router also writes the blocks
to Valkey in the background, and its CPU is counted until they are stored; dynamo keeps them in memory only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from benchmarks.peers.dynamo import INDEXER, check_equal, rotate, run_servers
from benchmarks.peers.packages import PeerSettings
from benchmarks.peers.table import Findings, peer_row
from benchmarks.processes import Publisher, Served, cpu_s
from benchmarks.report import progress
from benchmarks.workload import Chain, Frame, Publishing, Workload, at_once, chains_for, places, write_frames

# The workers, the blocks of an event, and the entries of a whole and of a quick run.
CASES = ((16, 32, 600_000, 60_000), (16, 1, 150_000, 40_000), (64, 32, 600_000, 130_000), (64, 1, 250_000, 130_000))
GOAL, CPU_GOAL = 1.3, 1.0
PREFILL_BLOCKS = 32


class Stream(NamedTuple):
    """The batches of one case."""

    # The batches before the timing, and those that are timed.
    first: list[Frame]
    timed: list[Frame]
    # The last prompt of each worker before the timing and in it.
    first_last: dict[int, Chain]
    timed_last: dict[int, Chain]


def stream_of(chains: Sequence[Chain], workers: int, size: int) -> Stream:
    """Return the batches for these prompts, of which the first that reach all workers come before the timing."""
    missing, known = set(range(workers)), 0
    while missing:
        missing -= set(places(known, workers))
        known += 1
    publishing = Publishing(workers, events_per_batch=1)
    numbered = list(enumerate(chains))
    first = list(publishing.frames(numbered[:known], PREFILL_BLOCKS))
    first_last = _last(publishing.held, chains)
    timed = list(at_once(publishing.frames(numbered[known:], size)))
    return Stream(first, timed, first_last, _last(publishing.held, chains))


def _last(held: Mapping[int, Sequence[int]], chains: Sequence[Chain]) -> dict[int, Chain]:
    return {worker: chains[index] for index, holders in held.items() for worker in holders}


def one_round(server: Served, publisher: Publisher, stream: Stream) -> tuple[float, float, float]:
    """Publish all batches to a server and wait until the last prompt of each worker is visible.

    Returns:
        Blocks/s until visible; blocks/s that the publisher handed to ZMQ; us of the server's CPU for a block.
    """
    publisher.wait()
    publisher.send(len(stream.first))
    for worker, chain in stream.first_last.items():
        server.wait_visible(chain, worker)
    server.wait_stored()
    before = cpu_s(server.pid)
    publisher.start(f"send {len(stream.timed)} 0")
    sent = publisher.finish()
    visible = max(server.wait_visible(chain, worker) for worker, chain in stream.timed_last.items())
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
        stream = stream_of(chosen, workers, size)
        path = settings.folder / f"frames-{workers}-{size}.bin"
        write_frames(path, [*stream.first, *stream.timed])
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
                        rate, sending, cpu = one_round(server, publisher, stream)
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
        blocks = sum(frame.blocks for frame in stream.timed)
        notes.append(f"{what}: {blocks:,} blocks; the publisher itself sent {min(published):,.0f} blocks/s or more")
    return Findings(rows, notes)
