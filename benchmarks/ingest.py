# SPDX-License-Identifier: Apache-2.0
"""Claim: from the socket to visible answers, blocks are taken in at least as fast as by dynamo.

One worker's stream, encoded beforehand and published as fast as it goes; the time from the first send until
/query_by_hash shows the last prompt whole. Each round starts both servers again. All prompts are compared after the
last round. Ours also writes them to Valkey on the way; dynamo keeps them in memory only.
"""

from __future__ import annotations

import contextlib

from processes import Dynamo, Ours, Publisher, Served, check_equal, cpu_s
from report import Row, Settings, above_dynamo, median_row, progress, run
from workload import EVENTS_PER_BATCH, Chain, Publishing, Workload, chains_for, write_frames

SIZES = (32, 1, 512)


def one_round(server: Served, publisher: Publisher, batches: int, last: Chain) -> tuple[float, float, float]:
    """(blocks/s until visible, blocks/s that the publisher handed to ZMQ, us of the server's CPU a block)."""
    publisher.wait()
    before = cpu_s(server.pid)
    publisher.start(f"send {batches} 0")
    sent = publisher.finish()
    visible = server.wait_visible(last, 0)
    blocks = sent["blocks"]
    used = (cpu_s(server.pid) - before) / blocks * 1e6
    return blocks / (visible - sent["start"]), blocks / (sent["end"] - sent["start"]), used


def measure(settings: Settings) -> tuple[list[Row], list[str]]:
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
        publishing = Publishing(workers=1)
        chosen = chains[: 2 * chains_for(wanted[size], 1)]
        path = settings.folder / f"frames-{size}.bin"
        batches, blocks = write_frames(path, publishing.frames(enumerate(chosen), size))
        rates: dict[str, list[float]] = {}
        used: dict[str, list[float]] = {}
        published = []
        for turn in range(rounds):
            progress(f"ingest: {size} blocks an event, round {turn + 1} of {rounds}")
            with contextlib.ExitStack() as stack:
                servers: list[Served] = [stack.enter_context(Ours.run(settings.folder))]
                if settings.dynamo is not None:
                    servers.append(stack.enter_context(Dynamo.run(settings.dynamo, settings.folder)))
                for server in servers:
                    with Publisher.run(path, 1) as publisher:
                        server.register(publisher.endpoints)
                        rate, sending, cpu = one_round(server, publisher, batches, chosen[-1])
                        used.setdefault(server.name, []).append(cpu)
                        rates.setdefault(server.name, []).append(rate)
                        published.append(sending)
                if len(servers) == 2 and turn == rounds - 1:
                    check_equal(*servers, chosen)  # type: ignore[arg-type]
        events = EVENTS_PER_BATCH[size]
        rows.append(
            median_row(
                f"ingest, socket to visible answer, {size} blocks an event ({events} events a batch), {blocks:,} blocks",
                "blocks/s",
                rates["kvrouter"],
                rates.get("dynamo", ()),
                goal="at least dynamo's" if size == SIZES[0] else "",
                wanted=above_dynamo if size == SIZES[0] else None,
            )
        )
        rows.append(
            median_row(
                f"the same, CPU of router and Valkey, {size} blocks an event",
                "us/block",
                used["kvrouter"],
                used.get("dynamo", ()),
            )
        )
        notes.append(f"{size} blocks an event: the publisher itself sent {min(published):,.0f} blocks/s or more")
    return rows, notes


if __name__ == "__main__":
    run("ingest", __doc__, measure)
