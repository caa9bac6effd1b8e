# SPDX-License-Identifier: Apache-2.0
"""Bytes an entry: in the router's process beside dynamo.indexer's, and in Valkey beside llm-d's layout there.

The entries of 16 workers come through their event streams. In process it is the growth of the resident set, after
garbage was collected and free pages were given back, so it includes the mirror, the copy counts and everything else
that following 16 workers needs. In Valkey it is the growth of used_memory, so it includes residency, copies, meta and
the log. llm-d's keys are written by this script into the same server.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from benchmarks.filling import FILL_BLOCKS_S, Load, fill_ours, make_load
from benchmarks.our_process import info, private_store
from benchmarks.peers import llm_d
from benchmarks.peers.dynamo import INDEXER, Dynamo
from benchmarks.peers.packages import PeerSettings
from benchmarks.peers.table import OURS, Findings, PeerRow, peer_row
from benchmarks.processes import Publisher, rss_bytes
from benchmarks.report import progress
from benchmarks.workload import WORKERS, last_placed
from kvrouter.router.index.store.store import IndexStore

PROCESS_GOAL, VALKEY_GOAL = 2.0, 10.0
SETTLE_S = 1.5
COMMANDS_PER_TRIP = 2_048


def measure(settings: PeerSettings) -> Findings:
    return measure_entries(settings, settings.pick(1_000_000, 60_000), settings.pick(3, 1))


def measure_many(settings: PeerSettings) -> Findings:
    """Measure ten times as many entries, in the processes alone."""
    return measure_entries(settings, settings.pick(10_000_000, 120_000), 1, valkey=False)


def measure_entries(settings: PeerSettings, entries: int, rounds: int, *, valkey: bool = True) -> Findings:
    progress("memory: making events")
    load = make_load(settings.folder, entries)
    process: dict[str, list[float]] = {}
    store: dict[str, list[float]] = {}
    figures = {}
    for turn in range(rounds):
        progress(f"memory: {load.entries:,} entries, round {turn + 1} of {rounds}")
        folder = settings.folder / f"round{turn}"
        folder.mkdir()
        figures = fill_ours(folder, load)
        if figures["entries"] != load.entries:
            raise AssertionError(f"{figures['entries']} entries arrived, {load.entries} were published")
        process.setdefault(OURS, []).append(figures["rss"] / load.entries)
        store.setdefault(OURS, []).append(figures["redis"] / load.entries)
        if settings.dynamo.bin is not None:
            process.setdefault(INDEXER, []).append(dynamo_bytes(settings.dynamo.bin, folder, load) / load.entries)
        if valkey:
            for name in (llm_d.TIER_FIELDS, llm_d.JSON_FIELDS):
                grown = asyncio.run(llm_d_bytes(folder / name.replace(" ", "-"), load, name))
                store.setdefault(name, []).append(grown / load.entries)
    size = f"{load.entries:,} entries"
    unit = "bytes/entry"
    problem = settings.dynamo.problem
    rows: list[PeerRow] = [
        peer_row(f"memory of the process, {size}", unit, INDEXER, process, goal=PROCESS_GOAL, problem=problem)
    ]
    if valkey:
        rows += [
            peer_row(f"memory in Valkey, log included, {size}", unit, name, store, goal=goal)
            for name, goal in ((llm_d.JSON_FIELDS, VALKEY_GOAL), (llm_d.TIER_FIELDS, None))
        ]
    keys = ", ".join(f"{name} {grown / load.entries:.1f}" for name, grown in sorted(figures["keys"].items()))
    return Findings(
        rows,
        [
            f"{size}: {figures['rss_untrimmed'] / load.entries:.1f} bytes an entry before malloc_trim; by our own count "
            f"mirror {figures['mirror'] / load.entries:.1f}, copy counts {figures['copies'] / load.entries:.1f}",
            f"{size} in Valkey, by MEMORY USAGE: {keys} bytes an entry; its resident set grew by "
            f"{figures['redis_rss'] / load.entries:.1f}; published at {FILL_BLOCKS_S:,} blocks/s",
        ],
    )


def dynamo_bytes(bin_folder: Path, folder: Path, load: Load) -> int:
    """Return the growth of dynamo's resident set for the same events."""
    with Dynamo.run(bin_folder, INDEXER, folder) as dynamo, Publisher.run(load.path, WORKERS) as publisher:
        dynamo.register(publisher.endpoints)
        publisher.wait()
        time.sleep(SETTLE_S)
        before = rss_bytes(dynamo.pid)
        publisher.send(load.batches, FILL_BLOCKS_S)
        for index, worker in last_placed(load.held, len(load.chains)):
            dynamo.wait_visible(load.chains[index], worker)
        time.sleep(SETTLE_S)
        return rss_bytes(dynamo.pid) - before


def llm_d_commands(load: Load, layout: str) -> Iterator[bytes]:
    for index, chain in enumerate(load.chains):
        # dynamo's hashes stand for llm-d's own numbers, which differ from the engine's but are as long.
        engine, own = chain.hashes.tolist(), chain.dynamo_hashes.tolist()
        for worker in load.held[index]:
            yield from llm_d.commands(layout, f"10.0.0.{worker}:8000", engine, own)


async def llm_d_bytes(folder: Path, load: Load, layout: str) -> int:
    """Return the growth of used_memory when llm-d's keys for the same entries are written."""
    async with private_store(folder) as store:
        before = await info(store)
        await write(store, llm_d_commands(load, layout))
        await asyncio.sleep(SETTLE_S)
        return (await info(store))["used_memory"] - before["used_memory"]


async def write(store: IndexStore, commands: Iterable[bytes]) -> None:
    batch: list[bytes] = []
    for command in commands:
        batch.append(command)
        if len(batch) == COMMANDS_PER_TRIP:
            await store.servers.run("x", *batch)
            batch.clear()
    if batch:
        await store.servers.run("x", *batch)
