# SPDX-License-Identifier: Apache-2.0
"""The laws of what routers write, judged at each write that the store executes, and what the writes show of the routers.

- *Fence.* Nothing is written to a worker's log by a router that does not have its lease.
- *Lease.* Nobody takes the lease of a router that lives and holds it.
- *Memory.* No router goes on from its memory of a worker that another one followed since.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence

from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.index.store import keys
from kvrouter.router.index.store.commit import LeaseValue
from kvrouter.router.index.store.log_entry import EntryKind
from kvrouter.router.route.load.load_messages import decode
from tests.simulation.router import Router
from tests.simulation.store.commands import entry_id
from tests.simulation.store.keyspace import Command
from tests.simulation.store.stream import EntryId
from tests.simulation.store_server import StoreServer

LOADS = keys.LOADS.encode()
# A router's lease that was there for so long has been there when another router looked whether it lives.
LIVES_S = 1.0
# How far apart the messages of a process about its load may be: it publishes every half second.
HEARD_EVERY_S = 1.0
# How long ago something was written that a crash of the store is meant to lose.
JUST_S = 0.4
# Writes that may have come just now: a router that goes on gave a lease back, a state was noted without a batch, or an
# engine that fell silent was written for the last time.
RETURNED, NOTED, FELL_SILENT = MOMENTS = ("lease returned", "state noted", "engine fell silent")
# A worker was unregistered, which other routers learn in a quarter of a second.
UNREGISTERED = "worker unregistered"


class Written:
    """The writes of one world's routers."""

    def __init__(
        self,
        store: StoreServer,
        routers: Sequence[Router],
        workers: Sequence[WorkerKey],
        now_s: Callable[[], float],
        broke: Callable[[str], None],
    ) -> None:
        """Observe the store.

        Args:
            store: The store.
            routers: The routers.
            workers: The workers.
            now_s: Returns the time.
            broke: Called with a broken law.
        """
        self._store, self._routers, self._now_s, self._broke = store.store, routers, now_s, broke
        self._by_log = {keys.log(worker).encode(): worker for worker in workers}
        self._by_meta = {keys.meta(worker).encode(): worker for worker in workers}
        self._by_lease = {keys.lease(worker).encode(): worker for worker in workers}
        self._registries = {keys.registry(worker.model).encode() for worker in workers}
        # How many writes to workers' logs the store executed, by the name of the router.
        self.logs: Counter[str] = Counter()
        # The workers' leases in the present server, and since when the routers' leases have been there.
        self._node = self._store.node
        self._leases: dict[bytes, bytes] = {}
        self._lives_since_s: dict[bytes, float] = {}
        # Since when each process has published its load, and when it did so last.
        self._published_s: dict[str, tuple[float, float]] = {}
        # When each process said that it leaves, and the id of the message.
        self._left: dict[str, tuple[float, EntryId]] = {}
        # The routers that wrote to a worker's log since the store last lost something, in the order of their last writes.
        self._writers: dict[WorkerKey, dict[str, None]] = {}
        # The workers whose engines send nothing for a while.
        self.silent: set[WorkerKey] = set()
        # How many writes there were, and for each moment, when it was and how many there were before it.
        self.writes = 0
        self._moments: dict[str, tuple[float, int]] = {}
        self._store.observe(self._take)

    def _take(self, client: str, effects: Sequence[Command]) -> None:
        if any(words[0].upper() == b"XADD" and words[1] in self._by_log for words in effects):
            self.logs[client] += 1
        if self._store.has_former:
            # Two primaries have two leases: no fence can hold, and the writes to one of them are lost.
            self._forget()
            return
        if self._node is not self._store.node:
            self._forget()
            self._node = self._store.node
        for words in effects:
            self._take_one(client, words[0].upper(), words)
        self.writes += 1

    def _forget(self) -> None:
        for table in (
            self._leases, self._lives_since_s, self._published_s, self._left, self._writers, self._moments
        ):  # fmt: skip
            table.clear()

    def _take_one(self, client: str, name: bytes, words: Command) -> None:
        if name == b"XADD" and words[1] == LOADS:
            self._take_load(words)
        elif name == b"XADD" and client and (worker := self._by_log.get(words[1])) is not None:
            self._judge_fence(client, worker)
            writers = self._writers.setdefault(worker, {})
            writers.pop(client, None)
            writers[client] = None
            if EntryKind.NOTE.value in words:
                self._note(NOTED)
            if worker in self.silent:
                self._note(FELL_SILENT)
        elif name == b"SET" and words[1] in self._by_lease:
            self._judge_lease(client, words[1], words[2])
            self._leases[words[1]] = words[2]
        elif name == b"SET":
            self._lives_since_s.setdefault(words[1], self._now_s())
        elif name == b"HDEL" and words[1] in self._registries:
            self._note(UNREGISTERED)
        elif name in (b"DEL", b"UNLINK"):
            for key in words[1:]:
                if self._leases.pop(key, None) is not None and self._goes_on(client):
                    self._note(RETURNED)
                self._lives_since_s.pop(key, None)
                if key == LOADS:
                    # A message that a slow network had not brought to a reader yet is gone, and the id of a later one
                    # does not say that the reader had it (seed 600644).
                    self._left.clear()
                if key in self._by_meta:
                    # The numbers of the leases are lost with it.
                    self._writers.pop(self._by_meta[key], None)
        elif name == b"FLUSHALL":
            self._forget()

    def _goes_on(self, client: str) -> bool:
        """Return whether the router of this name runs and is not about to end."""
        return any(router.name == client and router.core is not None for router in self._routers)

    def _judge_fence(self, client: str, worker: WorkerKey) -> None:
        holder = self._store.node.space.values.get(keys.lease(worker).encode())
        token = LeaseValue.token_of(holder) if isinstance(holder, bytes) else None
        writer = next(router for router in self._routers if router.name == client)
        if token not in writer.tokens:
            self._broke(f"fence: {client} wrote to the log of {worker.worker_id}, whose lease {token} has")

    def _judge_lease(self, client: str, key: bytes, value: bytes) -> None:
        before = self._leases.get(key)
        token = None if before is None else LeaseValue.token_of(before)
        if before is None or token is None or token == LeaseValue.token_of(value):
            return
        worker = self._by_lease[key]
        for router in self._routers:
            follower = None if router.core is None else router.core.registry.followers.get(worker)
            if router.token != token or follower is None or not follower.lease.held:
                continue
            since_s = self._lives_since_s.get(keys.router_lease(token).encode())
            if since_s is not None and since_s < self._now_s() - LIVES_S:
                self._broke(f"lease: {client} took {worker.worker_id} from {router.name}, which lives and follows it")

    def _take_load(self, words: Command) -> None:
        message = decode(words[-1])
        if message is not None:
            now_s = self._now_s()
            since_s, last_s = self._published_s.get(message.process, (now_s, now_s))
            # A message that was under way when the process left may come after that.
            self._left.pop(message.process, None)
            self._published_s[message.process] = (since_s if now_s - last_s <= HEARD_EVERY_S else now_s), now_s
            if message.leaves:
                self._left[message.process] = now_s, entry_id(words[-3])

    def has_published(self, token: str, for_s: float = 0.0) -> bool:
        """Return whether a process published its load all the time until now, as one does that reaches the store."""
        since_s, last_s = self._published_s.get(token, (math.inf, -math.inf))
        now_s = self._now_s()
        return now_s - last_s <= HEARD_EVERY_S and since_s <= now_s - for_s

    def _note(self, moment: str) -> None:
        self._moments[moment] = self._now_s(), self.writes

    def met(self) -> set[str]:
        """Return the moments of just now."""
        return {moment for moment, (at_s, _) in self._moments.items() if at_s >= self._now_s() - JUST_S}

    def since(self, moments: Collection[str]) -> int:
        """Return how many writes there were from the earliest of these moments on, if they were just now."""
        return max((self.writes - self._moments[moment][1] for moment in moments if moment in self.met()), default=0)

    def judge_memory(self, router: str, worker: WorkerKey) -> None:
        """Judge that a router goes on from its memory of a worker."""
        writers = list(self._writers.get(worker, ()))
        if router in writers[:-1]:
            self._broke(
                f"memory: {router} goes on from its memory of {worker.worker_id}, to which {writers[-1]} wrote last"
            )

    def left(self, since_s: float, until: bytes) -> set[str]:
        """Return the processes whose messages that they leave were written since a time, and not after an entry's id."""
        last = entry_id(until)
        return {token for token, (left_s, left_id) in self._left.items() if left_s >= since_s and left_id <= last}
