# SPDX-License-Identifier: Apache-2.0
"""Which server holds a key, and a few connections to each: one server, or the primaries of a cluster.

A cluster is recognised by itself. A slot that moved is followed at once; while one is being moved, requests for it
wait.
"""

from __future__ import annotations

import asyncio
import binascii
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext, suppress
from typing import Any, TypeVar

from kvrouter.router.redis_client.connection import (
    Connection,
    Endpoint,
    ReplyError,
    StoreError,
    StoreUnavailable,
    parse_url,
)
from kvrouter.router.redis_client.resp import command

T = TypeVar("T")

SLOTS = 16_384
# Connections a server: commits of different workers run side by side, and one server has one thread.
CONNECTIONS_PER_SERVER = 16
# A key's slot can move again while we follow it; more rounds than this mean the cluster does not know itself.
REDIRECTS_MAX = 16
# Pause while a slot is under way between two nodes (a multi-key command cannot follow an ASK half-way).
MIGRATION_PAUSE_S = 0.1
# Error codes of a server that is there but cannot serve now: it loads its data, or it is a replica, or slots are
# uncovered.
_UNAVAILABLE_CODES = frozenset({"LOADING", "READONLY", "MASTERDOWN", "CLUSTERDOWN", "BUSY"})
_LOGIN_CODES = frozenset({"NOAUTH", "WRONGPASS", "NOPERM"})


def key_slot(key: str) -> int:
    """The cluster slot of `key`: CRC-16/XMODEM of its hash tag. Source: Redis Cluster specification."""
    start = key.find("{")
    end = key.find("}", start + 1)
    tag = key[start + 1 : end] if start >= 0 and end > start + 1 else key
    return binascii.crc_hqx(tag.encode(), 0) % SLOTS


class _Pool:
    """Logged-in connections to one server; at most CONNECTIONS_PER_SERVER at a time, more wait."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._idle: list[Connection] = []
        self._free = asyncio.Semaphore(CONNECTIONS_PER_SERVER)

    @asynccontextmanager
    async def lend(self, *, urgent: bool = False) -> AsyncIterator[Connection]:
        """A connection. It is closed, not reused, when the block raises: what it still had to say is unknown.

        urgent: beyond the limit, for the one thing that must not wait for commits."""
        async with nullcontext() if urgent else self._free:
            connection = None
            while self._idle and (connection is None or connection.closed):
                connection = self._idle.pop()
            if connection is None or connection.closed:
                connection = await Connection.open(self._endpoint)
            try:
                yield connection
            except BaseException:
                connection.close()
                raise
            self._idle.append(connection)

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()


class Servers:
    """All servers of the store. Belongs to one event loop."""

    def __init__(self, seed: Endpoint) -> None:
        self._seed = seed
        self._pools: dict[Endpoint, _Pool] = {}
        self._slots: list[Endpoint] | None = None  # endpoint of each slot; None: one server has all
        self._nodes: tuple[Endpoint, ...] = ()
        self._learning = asyncio.Lock()

    @classmethod
    async def open(cls, url: str) -> Servers:
        """Connects once and looks whether it is a cluster. Raises StoreError or StoreUnavailable."""
        servers = cls(parse_url(url))
        try:
            await servers._look_around()
        except BaseException:
            await servers.close()
            raise
        return servers

    async def _look_around(self) -> None:
        try:
            async with self._pool(self._seed).lend() as connection:
                (info,) = await connection.run(command("INFO", "cluster"), 1)
        except ReplyError as error:
            raise _login_error(self._seed, error) from None
        if b"cluster_enabled:1" in info:
            await self._learn_slots()
        elif self._seed.must_be_cluster:
            raise StoreError(f"{self._seed} is no cluster: write redis:// or rediss:// in place of the +cluster form")

    @property
    def is_cluster(self) -> bool:
        return self._slots is not None

    async def on(self, key: str, work: Callable[[Connection], Awaitable[T]], *, urgent: bool = False) -> T:
        """`work` on a connection to the server of `key`; done again when a cluster redirects it.

        Work must leave no WATCH behind unless it raises. Raises StoreUnavailable and ReplyError."""
        for _ in range(REDIRECTS_MAX):
            try:
                async with self._pool(self.endpoint_of(key)).lend(urgent=urgent) as connection:
                    return await work(connection)
            except ReplyError as error:
                await self.follow_error(error)
            except StoreUnavailable:
                await self.relearn()
                raise
        raise StoreUnavailable(f"the cluster kept redirecting {key}: its nodes do not agree who holds it")

    async def run(self, key: str, *commands: bytes) -> list[Any]:
        """The replies to `commands`, whose keys must share the slot of `key`."""
        return await self.on(key, lambda connection: connection.run(b"".join(commands), len(commands)))

    async def dedicated(self, key: str) -> Connection:
        """A connection of its own to the server of `key`, for blocking reads; the caller closes it."""
        try:
            return await Connection.open(self.endpoint_of(key))
        except ReplyError as error:
            raise _login_error(self.endpoint_of(key), error) from None
        except StoreUnavailable:
            await self.relearn()
            raise

    async def each(self, *commands: bytes) -> dict[str, list[Any]]:
        """The replies of every server, by its address. Raises StoreError."""
        found = {}
        for endpoint in self._nodes or (self._seed,):
            async with self._pool(endpoint).lend() as connection:
                found[str(endpoint)] = await connection.run(b"".join(commands), len(commands))
        return found

    def endpoint_of(self, key: str) -> Endpoint:
        return self._seed if self._slots is None else self._slots[key_slot(key)]

    async def follow_error(self, error: ReplyError) -> None:
        """Does what `error` asks for, so that the request can be made again; raises when there is nothing to do."""
        if self._slots is not None and error.code == "MOVED":
            _, slot, target = str(error).split(" ")[:3]
            host, _, port = target.rpartition(":")
            origin = self._slots[int(slot)]
            self._slots[int(slot)] = origin.at(host or str(origin.address[0]), int(port))
        elif self._slots is not None and error.code in ("ASK", "TRYAGAIN"):
            await asyncio.sleep(MIGRATION_PAUSE_S)
        elif error.code in _UNAVAILABLE_CODES:
            await self.relearn()
            raise StoreUnavailable(str(error)) from None
        else:
            raise error

    async def relearn(self) -> None:
        """Asks the cluster anew who holds which slot; keeps what is known when none answers."""
        if self._slots is None:
            return
        # Hundreds of workers notice a lost node at once; one of them asks, the others wait for what it learns.
        already_asked = self._learning.locked()
        async with self._learning:
            if not already_asked:
                with suppress(StoreError):
                    await self._learn_slots()

    async def _learn_slots(self) -> None:
        failure: StoreError | None = None
        for endpoint in dict.fromkeys((*self._nodes, self._seed)):
            try:
                async with self._pool(endpoint).lend() as connection:
                    (ranges,) = await connection.run(command("CLUSTER", "SLOTS"), 1)
            except StoreError as error:
                failure = error
                continue
            slots: list[Endpoint | None] = [None] * SLOTS
            for first, last, primary, *_ in ranges:
                host = primary[0].decode() if primary[0] else str(endpoint.address[0])
                slots[first : last + 1] = [self._seed.at(host, primary[1])] * (last - first + 1)
            known = [slot for slot in slots if slot is not None]
            if len(known) == SLOTS:
                self._slots = known
                self._nodes = tuple(dict.fromkeys(known))
                for gone in set(self._pools) - {*self._nodes, self._seed}:
                    self._pools.pop(gone).close()
                return
            failure = StoreUnavailable(f"{endpoint}: the cluster has no node for {SLOTS - len(known)} slots")
        raise failure or StoreUnavailable("no node of the cluster is known")

    def _pool(self, endpoint: Endpoint) -> _Pool:
        pool = self._pools.get(endpoint)
        if pool is None:
            pool = self._pools[endpoint] = _Pool(endpoint)
        return pool

    async def close(self) -> None:
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()
        # One turn, so that the transports are really gone when this returns.
        await asyncio.sleep(0)


def _login_error(endpoint: Endpoint, error: ReplyError) -> StoreError:
    if error.code in _UNAVAILABLE_CODES:
        return StoreUnavailable(f"{endpoint}: {error}")
    if error.code in _LOGIN_CODES:
        return StoreError(f"{endpoint} refused the login ({error.code}): correct user and password in the Redis URL")
    return StoreError(f"{endpoint}: {error}")
