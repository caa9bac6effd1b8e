# SPDX-License-Identifier: Apache-2.0
"""Helpers for the laws of the index: a direct look into the store, and plain sets as the model."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from kvrouter.router.base.common.ids import Place, WorkerKey
from kvrouter.router.base.common.task_supervisor import TaskSupervisor
from kvrouter.router.index.ingest.net_changes import ResidencyDelta
from kvrouter.router.index.store.checkpoint import Checkpoint
from kvrouter.router.index.store.commit import CommitOutcome, LeaseValue
from kvrouter.router.index.store.log_entry import LogEntry
from kvrouter.router.index.store.log_follower import LogFollower
from kvrouter.router.index.store.store import IndexStore

APPLIED, FENCED, STALE = CommitOutcome.APPLIED, CommitOutcome.FENCED, CommitOutcome.STALE
# The lease that `World.owned` takes, which is the worker's first; and a lease that no router has.
ME, OTHER = LeaseValue("me", 1), LeaseValue("other", 1)
GPU, CPU, DISK = Place(0, "GPU"), Place(1, "CPU"), Place(None, "STORAGE", "fs:{}\n")
PLACES = (GPU, CPU, DISK)
HOSTILE = ["m}{m", "a/b:c\r\nDEL x", "", "{}", "ä\ud800", "x@1", "w" * 300]
WAIT_S = 15.0  # a law that takes longer is broken
_fresh = itertools.count()

Residency = dict[Place, set[int]]


def hashes(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.uint64)


def change(place: Place, added: tuple[int, ...] = (), removed: tuple[int, ...] = ()) -> ResidencyDelta:
    return ResidencyDelta(place, hashes(*added), hashes(*removed))


def checkpoint(worker: WorkerKey, epoch: str, seq: int, held: Mapping[Place, Iterable[int]]) -> Checkpoint:
    return Checkpoint(worker, epoch, seq, {place: hashes(*sorted(blocks)) for place, blocks in held.items()})


def held(places: dict[Place, np.ndarray]) -> Residency:
    return {place: set(blocks.tolist()) for place, blocks in places.items() if len(blocks)}


def apply(residency: Residency, entry: LogEntry) -> None:
    """Apply an entry to the model as a mirror would."""
    if entry.opened_epoch:
        residency.clear()
    for part in entry.changes:
        blocks = residency.setdefault(part.place, set())
        blocks |= set(part.added.tolist())
        blocks -= set(part.removed.tolist())
        if not blocks:
            del residency[part.place]


def supervisor() -> TaskSupervisor:
    return TaskSupervisor(clock=time.monotonic, rng=random.Random(1))


async def take(store: IndexStore, worker: WorkerKey, token: str, *, above: int = 0) -> LeaseValue | None:
    """Take a worker's lease, and return only the lease."""
    taken = await store.leases.take(worker, token, above=above)
    return None if taken is None else taken[0]


class World:
    """A flushed store, and a direct client to look into it."""

    def __init__(self, url: str, raw: Any) -> None:
        self.url = url
        self.raw = raw

    @asynccontextmanager
    async def store(self, **options: Any) -> AsyncIterator[IndexStore]:
        """Open the store with a clock that stands still, so that the first lease of each log has the number 1."""
        async with asyncio.timeout(2 * WAIT_S):
            store = await IndexStore.open(self.url, **{"wall_clock": lambda: 0.0} | options)
            try:
                yield store
            finally:
                await store.close()

    def run(self, body: Callable[[IndexStore], Awaitable[None]]) -> None:
        async def main() -> None:
            async with self.store() as store:
                await body(store)

        asyncio.run(main())

    def stored_keys(self) -> set[str]:
        return {key.decode() for key in self.raw.scan_iter(count=1_000)}

    def snapshot(self) -> dict[str, Any]:
        """Return everything that is stored, so that "changes nothing" means nothing at all."""
        readers = {
            b"hash": self.raw.hgetall,
            b"set": self.raw.smembers,
            b"string": self.raw.get,
            b"stream": self.raw.xrange,
        }
        return {key: readers[self.raw.type(key)](key) for key in self.stored_keys()}

    def worker(self) -> WorkerKey:
        return WorkerKey("model", f"w{next(_fresh)}")

    async def owned(self, store: IndexStore, epoch: str = "e1") -> WorkerKey:
        """Return a new worker with the lease ME and an open epoch."""
        worker = self.worker()
        assert await take(store, worker, "me") == ME
        assert await store.open_epoch(worker, epoch, ME) is APPLIED
        return worker


async def next_items(follower: LogFollower, count: int) -> list[Any]:
    items: list[Any] = []
    async with asyncio.timeout(WAIT_S):
        while len(items) < count:
            items += await follower.next()
    return items


def move_slot(raw: Any, key: str) -> None:
    """Move the slot of `key`, with its keys, to another node, as `redis-cli --cluster reshard` does."""
    slot = raw.keyslot(key)
    source = raw.get_node_from_key(key)
    target = next(node for node in raw.get_primaries() if node.name != source.name)
    ids = {
        node.name: raw.get_redis_connection(node).execute_command("CLUSTER", "MYID").decode()
        for node in (source, target)
    }
    at_source, at_target = raw.get_redis_connection(source), raw.get_redis_connection(target)
    at_target.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[source.name])
    at_source.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[target.name])
    moved = at_source.execute_command("CLUSTER", "GETKEYSINSLOT", slot, 100)
    at_source.execute_command("MIGRATE", target.host, target.port, "", 0, 5_000, "KEYS", *moved)
    for node in (at_target, at_source):
        node.execute_command("CLUSTER", "SETSLOT", slot, "NODE", ids[target.name])
