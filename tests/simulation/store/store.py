# SPDX-License-Identifier: Apache-2.0
"""The store of a simulated fleet: a Redis in memory, on the simulation's clock, with every fault from one seed.

The product's own client runs unchanged: `Store.create_connection` stands in for the event loop's, and everything above it
(redis-py's login, the protocol over hiredis, pools, transactions) is the real code.

    store = Store(clock, rng)
    servers = await Servers.open(store.url("router-a"))     # on a loop whose create_connection is the store's
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from enum import Enum
from typing import Any

from kvrouter.router.base.redis_client.servers import Servers
from tests.simulation.store.commands import COMMANDS, Reply
from tests.simulation.store.keyspace import Keyspace
from tests.simulation.store.node import Node, Observer, Role
from tests.simulation.store.session import Session
from tests.simulation.store.stream import NODE_BYTES, NODE_ENTRIES
from tests.simulation.store.wire import Wire

PORT = 6379
# What a host name ends with; the part before it is the client's name.
DOMAIN = ".store"
# A round trip in one rack, and one with a busy server.
LATENCY_S = (0.00005, 0.002)


class Former(Enum):
    """What becomes of the primary that a failover replaces."""

    # Its machine is off: connections break.
    GONE = "gone"
    # It follows the new one: connections stay, and it refuses writes.
    REPLICA = "replica"
    # It was cut off from the new one and goes on for those who are connected, until `end_former` loses their writes.
    SERVING = "serving"


class Store:
    """A primary behind one address, with the network between it and its clients."""

    def __init__(
        self,
        clock: Callable[[], float],
        rng: random.Random,
        *,
        latency_s: tuple[float, float] = LATENCY_S,
        node_entries: int = NODE_ENTRIES,
        node_bytes: int = NODE_BYTES,
    ) -> None:
        """Start an empty store.

        Args:
            clock: Returns the server's time in seconds since 1970. It passes as fast as the time of the event loop,
                which ends the waiting of an XREAD.
            rng: Gives latencies, cuts of requests and evicted keys.
            latency_s: The least and the longest time of a message in one direction.
            node_entries: The limit of entries in one node of a stream (stream-node-max-entries).
            node_bytes: The limit of its bytes (stream-node-max-bytes).
        """
        self._clock = clock
        self._rng = rng
        self.latency_s = latency_s
        self.node = self._new_node(Keyspace(node_entries=node_entries, node_bytes=node_bytes))
        self._former: list[Node] = []
        self.is_up = True
        # Whether a client that connects to a server that is down waits, in place of being refused.
        self._is_silent = False
        self._wires: dict[Wire, None] = {}
        self._cut: set[str] = set()
        self._reachable = asyncio.Event()
        self._observers: list[Observer] = []

    # -- clients

    def url(self, client: str) -> str:
        """Return the URL under which `client` finds the store."""
        return f"redis://{client}{DOMAIN}:{PORT}/0"

    async def client(self, name: str) -> Servers:
        """Return what the product's parts work with, opened as the product opens it."""
        return await Servers.open(self.url(name))

    async def create_connection(
        self, factory: Callable[[], asyncio.BaseProtocol], host: str, port: int = PORT, **_: Any
    ) -> tuple[asyncio.BaseTransport, asyncio.BaseProtocol]:
        """Connect the client that `host` names, in place of the event loop's method."""
        name = host.removesuffix(DOMAIN)
        await asyncio.sleep(self._latency())
        while name in self._cut or (self._is_silent and not self.is_up):
            self._reachable.clear()
            await self._reachable.wait()
        if not self.is_up:
            raise ConnectionRefusedError(111, f"Connect call failed ('{host}', {port})")
        protocol = factory()
        session = Session(self.node, name)
        wire = Wire(protocol, session, latency=self._latency, rng=self._rng, name=name)
        self._wires = {known: None for known in self._wires if not known.is_over}
        self._wires[wire] = None
        wire.start()
        return wire.near, protocol

    def _latency(self) -> float:
        return self._rng.uniform(*self.latency_s)

    def ask(self, *words: str | bytes | int) -> Reply:
        """Execute a command at once, without a connection, and return its reply."""
        packed = tuple(word if isinstance(word, bytes) else str(word).encode() for word in words)
        reply = self.node.execute(COMMANDS[packed[0].upper()], packed)
        self.node.finish("")
        return reply

    def observe(self, observer: Observer) -> None:
        """Call `observer` with the client and the effects of each write."""
        self._observers.append(observer)
        self.node.observers.append(observer)

    def _new_node(self, space: Keyspace) -> Node:
        return Node(space, clock=self._clock, rng=self._rng)

    # -- faults of the server

    def crash(self, lose_last: int = 0, *, is_silent: bool = False) -> None:
        """End the server, which loses its last writes, as one does whose append-only file is synced each second.

        Args:
            lose_last: How many writes are lost; a transaction is one.
            is_silent: Whether the clients' connections stay open without answers, as when the machine has lost its power.
        """
        old = self._replace(lose_last)
        if is_silent:
            for wire in self._wires:
                if wire.far.get_protocol() in old.sessions:
                    wire.vanish()
        old.end()
        self.is_up, self._is_silent = False, is_silent

    def start(self, loading_s: float = 0.0) -> None:
        """Start the server after a crash; for `loading_s` it answers that it loads its data."""
        self.is_up = True
        self._reachable.set()
        if loading_s:
            node = self.node
            node.is_loading = True
            asyncio.get_running_loop().call_later(loading_s, node.finish_loading)

    def _replace(self, lose_last: int) -> Node:
        """Put a node with the data that lasts in the place of the present one, and return that one."""
        former, self.node = self.node, self._new_node(self.node.lasting(lose_last))
        self.node.observers += self._observers
        self.node.policy = former.policy
        for node in self._former:
            if node.role is Role.REPLICA:
                node.follow(self.node)
        return former

    def failover(self, lose_last: int = 0, former: Former = Former.GONE) -> None:
        """Put a replica in the place of the primary.

        Args:
            lose_last: How many writes the replica was behind, which are lost.
            former: What becomes of the old primary.
        """
        old = self._replace(lose_last)
        if former is Former.GONE:
            old.end()
            return
        self._former.append(old)
        if former is Former.REPLICA:
            old.follow(self.node)

    def end_former(self) -> None:
        """End the servers that failovers left running."""
        for node in self._former:
            node.end()
        self._former.clear()

    def stop(self) -> None:
        """Stop the process, as SIGSTOP does: connections are accepted, and nothing is answered."""
        self.node.is_stopped = True

    def resume(self) -> None:
        """Let the stopped process go on."""
        self.node.resume()

    def flushall(self) -> None:
        """Delete all keys."""
        self.ask("FLUSHALL")

    def evict(self, count: int) -> list[bytes]:
        """Drop `count` keys, as a server without memory does, and return their names."""
        return self.node.evict(count)

    def fill(self, policy: str = "noeviction") -> None:
        """Use up the memory: writes are refused, or with another maxmemory-policy each costs a key."""
        self.node.policy = policy
        self.node.is_full = True

    def drain(self) -> None:
        """Give the server memory again."""
        self.node.is_full = False

    def fill_disk(self) -> None:
        """Let no write reach the disk: the server refuses them."""
        self.node.is_disk_full = True

    def free_disk(self) -> None:
        """Give the disk space again."""
        self.node.is_disk_full = False

    # -- faults of the network

    def partition(self, client: str) -> None:
        """Let nothing pass between one client and the store."""
        self._cut.add(client)
        for wire in self._wires_of(client):
            wire.cut()

    def heal(self, client: str) -> None:
        """End a partition. What was sent meanwhile arrives now, also from connections that the client has closed."""
        self._cut.discard(client)
        self._reachable.set()
        for wire in self._wires_of(client):
            wire.mend()

    def reset(self, client: str) -> None:
        """Break the connections of one client."""
        for wire in self._wires_of(client):
            wire.far.abort()

    def close(self) -> None:
        """Close the connections of all clients, at the end of a simulation."""
        for wire in self._wires:
            wire.near.abort()

    def _wires_of(self, client: str) -> list[Wire]:
        return [wire for wire in self._wires if wire.name == client]
