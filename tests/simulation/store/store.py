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
from tests.simulation.store.sentinel import SERVICE, SentinelSession
from tests.simulation.store.session import Session
from tests.simulation.store.stream import NODE_BYTES, NODE_ENTRIES
from tests.simulation.store.wire import Wire

PORT = 6379
# A host name is the client's name and what it leads to: the present primary, the Sentinels, or one node by its number.
STORE, SENTINEL, NODE = "store", "sentinel", "node"
# A round trip in one rack, and one with a busy server.
LATENCY_S = (0.00005, 0.002)


class Former(Enum):
    """The fate of the primary that a failover replaces."""

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
        # All nodes that run, by number: the last is the present primary, and the others are what failovers left.
        self._number = 0
        self._former: dict[int, Node] = {}
        # The number of the node that the Sentinels name.
        self._named = 0
        self.is_up = True
        # Whether a client that connects to a server that is down waits, in place of being refused.
        self._is_silent = False
        self._wires: dict[Wire, None] = {}
        self._cut: set[str] = set()
        self._reachable = asyncio.Event()
        self._observers: list[Observer] = []

    # -- clients

    def url(self, client: str, *, by_sentinel: bool = False) -> str:
        """Return the URL under which `client` finds the primary, itself or by the Sentinels."""
        if by_sentinel:
            return f"redis+sentinel://{client}.{SENTINEL}:{PORT}/{SERVICE}/0"
        return f"redis://{client}.{STORE}:{PORT}/0"

    async def client(self, name: str, *, by_sentinel: bool = False) -> Servers:
        """Return what the product's parts work with, opened as the product opens it."""
        return await Servers.open(self.url(name, by_sentinel=by_sentinel))

    async def create_connection(
        self, factory: Callable[[], asyncio.BaseProtocol], host: str, port: int = PORT, **_: Any
    ) -> tuple[asyncio.BaseTransport, asyncio.BaseProtocol]:
        """Connect the client that `host` names, in place of the event loop's method."""
        name, _dot, target = host.rpartition(".")
        await asyncio.sleep(self._latency())
        while name in self._cut or (self._is_silent and not self.is_up and target != SENTINEL):
            self._reachable.clear()
            await self._reachable.wait()
        far = self._session(name, target)
        if far is None:
            raise ConnectionRefusedError(111, f"Connect call failed ('{host}', {port})")
        protocol = factory()
        # A number of its own for each, so that the order in which connections end moves nothing else.
        rng = random.Random(self._rng.getrandbits(64))
        wire = Wire(protocol, far, latency=lambda: rng.uniform(*self.latency_s), rng=rng, name=name)
        self._wires = {known: None for known in self._wires if not known.is_over}
        self._wires[wire] = None
        wire.start()
        return wire.near, protocol

    def _session(self, client: str, target: str) -> asyncio.Protocol | None:
        """Return the server's side of a new connection, None if no server is there."""
        if target == SENTINEL:
            return SentinelSession(lambda: (f"{client}.{NODE}{self._named}", PORT))
        number = self._number if target == STORE else int(target.removeprefix(NODE))
        if number == self._number:
            return Session(self.node, client) if self.is_up else None
        return Session(self._former[number], client) if number in self._former else None

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
        for node in self._former.values():
            if node.role is Role.REPLICA:
                node.follow(self.node)
        return former

    def failover(self, lose_last: int = 0, former: Former = Former.GONE, *, is_named: bool = True) -> None:
        """Put a replica in the place of the primary.

        Args:
            lose_last: How many writes the replica was behind, which are lost.
            former: What becomes of the old primary.
            is_named: Whether the Sentinels know the new one now, and not only after `name_primary`.
        """
        old = self._replace(lose_last)
        number, self._number = self._number, self._number + 1
        if is_named:
            self.name_primary()
        if former is Former.GONE:
            old.end()
            return
        self._former[number] = old
        if former is Former.REPLICA:
            old.follow(self.node)

    def name_primary(self) -> None:
        """Let the Sentinels name the present primary."""
        self._named = self._number

    @property
    def has_former(self) -> bool:
        """Whether a server that a failover replaced still runs."""
        return bool(self._former)

    def end_former(self) -> None:
        """End the servers that failovers left running."""
        for node in self._former.values():
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
