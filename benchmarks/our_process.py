# SPDX-License-Identifier: Apache-2.0
"""Our router without its HTTP server in a process of its own, which measures its memory and its start from inside.

`fill` follows event streams into a private Valkey and reports the memory that this took. `load` times the start of a
router on the stored index. Answers are lines of JSON on stdout.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import gc
import json
import os
import random
import time
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

import uvloop
import zmq

from benchmarks.processes import rss_bytes
from benchmarks.workload import BLOCK_TOKENS, MODEL
from kvrouter.router.app.core.core_metrics import CoreMetrics
from kvrouter.router.app.core.router_core import Core
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.base.redis_client.embedded_valkey import EmbeddedStore
from kvrouter.router.base.redis_client.resp import command
from kvrouter.router.base.telemetry.metric_registry import MetricRegistry
from kvrouter.router.index.store.store import IndexStore
from kvrouter.router.model.config.settings import Config
from kvrouter.router.model.workers.registration import Registration

TOKEN = "bench"
# The router's follower and Valkey's allocator settle within this time.
SETTLE_S = 1.5
FILL_TIMEOUT_S = 240.0


def tell(**answer: Any) -> None:
    print(json.dumps(answer), flush=True)


def trimmed_rss() -> int:
    """Return the resident bytes after garbage was collected and free heap pages were given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return rss_bytes(os.getpid())


async def info(store: IndexStore) -> dict[str, int]:
    """Return used_memory and used_memory_rss of the server, in bytes. Source: INFO memory."""
    (text,) = await store.servers.run("x", command("INFO", "memory"))
    pairs = (line.split(":") for line in text.decode().split("\r\n") if line.startswith("used_memory"))
    return {name: int(value) for name, value in pairs if value.isdigit()}


async def key_bytes(store: IndexStore) -> dict[str, int]:
    """Return the bytes of all keys by the last part of the key: logs, checkpoints and the rest.

    Source: MEMORY USAGE of every key.
    """
    (names,) = await store.servers.run("x", command("KEYS", "*"))
    totals: dict[str, int] = {}
    for name in names:
        (size,) = await store.servers.run("x", command("MEMORY", "USAGE", name, "SAMPLES", 0))
        name_parts = name.decode().rpartition("}")[2].split(":")
        label = name_parts[1] if len(name_parts) == 2 else "places" if len(name_parts) > 3 else name_parts[-1]
        totals[label] = totals.get(label, 0) + int(size)
    return totals


@contextlib.asynccontextmanager
async def private_store(folder: Path) -> AsyncIterator[IndexStore]:
    server = await EmbeddedStore.start(folder)
    try:
        store = await IndexStore.open(server.url)
        yield store
        await store.close()
    finally:
        await server.stop()


def make_core(store: IndexStore, folder: Path, context: zmq.Context[zmq.Socket[bytes]]) -> Core:
    return Core(
        store=store,
        config=Config(data_dir=str(folder)),
        metrics=CoreMetrics(MetricRegistry()),
        zmq_context=context,
        clock=time.monotonic,
        rng=random.Random(3),
        token=TOKEN,
    )


def entries(core: Core) -> int:
    return sum(sum(status.residency.values()) for status in core.statuses())


async def fill(folder: Path, endpoints: list[str], last_seqs: list[int]) -> None:
    """Register the workers, report `ready`, and once every batch is visible report the memory that they took."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    async with private_store(folder) as store:
        core = make_core(store, folder, context)
        await core.start()
        for worker, endpoint in enumerate(endpoints):
            await core.register(Registration(WorkerKey(MODEL, str(worker)), events=endpoint, block_size=BLOCK_TOKENS))
        await asyncio.sleep(SETTLE_S)
        before, redis_before = trimmed_rss(), await info(store)
        tell(ready=True)
        deadline = time.monotonic() + FILL_TIMEOUT_S
        wanted = {str(worker): seq for worker, seq in enumerate(last_seqs)}
        while {status.worker_id: status.seq for status in core.statuses()} != wanted:
            if time.monotonic() > deadline:
                raise TimeoutError("not all batches became visible")
            await asyncio.sleep(0.05)
        await asyncio.sleep(SETTLE_S)
        untrimmed = rss_bytes(os.getpid())
        after, redis_after = trimmed_rss(), await info(store)
        tell(
            entries=entries(core),
            rss=after - before,
            rss_untrimmed=untrimmed - before,
            redis=redis_after["used_memory"] - redis_before["used_memory"],
            redis_rss=redis_after["used_memory_rss"] - redis_before["used_memory_rss"],
            keys=await key_bytes(store),
            mirror=core.mirror_sync.mirror.bytes,
            copies=sum(follower.state.ingest.held.blocks.bytes for follower in core.registry.followers.values()),
        )
        await core.stop()
        # Replace the registrations, so that a later `load` does not look for streams that have ended.
        for worker in range(len(endpoints)):
            key = WorkerKey(MODEL, str(worker))
            await store.registry.put(key, registration_without_stream(key))
    context.destroy(linger=0)


def registration_without_stream(key: WorkerKey) -> bytes:
    import msgspec

    return msgspec.json.encode(Registration(key, url="http://127.0.0.1:1", block_size=BLOCK_TOKENS))


async def load(folder: Path, rounds: int) -> None:
    """Time `Core.start` on the stored index; the kernels are compiled and Valkey has its data in memory already."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    async with private_store(folder) as store:
        for _ in range(rounds):
            core = make_core(store, folder, context)
            start = time.monotonic()
            await core.start()
            taken = time.monotonic() - start
            tell(seconds=taken, entries=entries(core))
            await asyncio.sleep(SETTLE_S)
            await core.stop()
            del core
            gc.collect()
    context.destroy(linger=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=("fill", "load"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--endpoints", nargs="*", default=[])
    parser.add_argument("--last-seqs", nargs="*", type=int, default=[])
    parser.add_argument("--rounds", type=int, default=1)
    arguments = parser.parse_args()
    work: Coroutine[Any, Any, None]
    if arguments.command == "fill":
        work = fill(arguments.folder, arguments.endpoints, arguments.last_seqs)
    else:
        work = load(arguments.folder, arguments.rounds)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(work)


if __name__ == "__main__":
    main()
