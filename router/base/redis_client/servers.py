# SPDX-License-Identifier: Apache-2.0
"""Connections to the servers of the store: a single one, a cluster's primaries, or the primary that Sentinel names."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext, suppress
from typing import Any, TypeVar

from kvrouter.router.base.redis_client.connection import Connection
from kvrouter.router.base.redis_client.errors import ReplyError, StoreError, StoreUnavailable
from kvrouter.router.base.redis_client.resp import command, info_field
from kvrouter.router.base.redis_client.topology import ClusterSlots, OneServer, SentinelPrimary
from kvrouter.router.base.redis_client.url import Address, StoreUrl, address_text, parse_url

T = TypeVar("T")

# Connections to each server. Commits of different workers run side by side, and a server has one thread.
CONNECTIONS_PER_SERVER = 16
# A key's slot can move again while a redirect is followed. More rounds than this mean that the nodes of the cluster
# disagree.
REDIRECTS_MAX = 16
# How many names of keys one SCAN examines: some hundred microseconds of the server's single thread.
SCAN_KEYS = 1_000
# Error codes of a server that is reachable but cannot serve now: it is loading its data, it is a replica, or slots are
# uncovered.
_UNAVAILABLE_CODES = frozenset({"LOADING", "READONLY", "MASTERDOWN", "CLUSTERDOWN", "BUSY"})
_LOGIN_CODES = frozenset({"NOAUTH", "WRONGPASS", "NOPERM"})


class _Pool:
    """The connections to one server. At most CONNECTIONS_PER_SERVER are lent at a time; further borrowers wait."""

    def __init__(self, connect: Callable[[], Awaitable[Connection]]) -> None:
        self._connect = connect
        self._idle: list[Connection] = []
        self._free = asyncio.Semaphore(CONNECTIONS_PER_SERVER)
        # In the order in which they were opened.
        self._open: weakref.WeakKeyDictionary[Connection, None] = weakref.WeakKeyDictionary()

    async def open(self) -> Connection:
        """Open a connection that the caller closes; `close` closes it too."""
        connection = await self._connect()
        self._open[connection] = None
        return connection

    @asynccontextmanager
    async def lend(self, *, urgent: bool = False) -> AsyncIterator[Connection]:
        """Lend a connection for the block. A connection whose block raises is closed, because replies may be under way.

        Args:
            urgent: Whether to lend one even if the limit is reached, for the one request that must not wait for commits.
        """
        async with nullcontext() if urgent else self._free:
            connection = None
            while self._idle and (connection is None or connection.closed):
                connection = self._idle.pop()
            if connection is None or connection.closed:
                connection = await self.open()
            try:
                yield connection
            except BaseException:
                connection.close()
                raise
            self._idle.append(connection)

    def close(self) -> None:
        """Close all connections; requests under way raise StoreUnavailable."""
        for connection in tuple(self._open):
            connection.close()
        self._idle.clear()


class Servers:
    """All servers of the store. Belongs to one event loop."""

    def __init__(self, url: StoreUrl) -> None:
        self._url = url
        self._topology = SentinelPrimary(url) if url.sentinels else OneServer(url.address)
        self._pools: dict[Address, _Pool] = {}
        self._learning = asyncio.Lock()

    @classmethod
    async def open(cls, url: str) -> Servers:
        """Connect once and detect whether the server belongs to a cluster. Raises StoreError or StoreUnavailable."""
        servers = cls(parse_url(url))
        try:
            await servers._look_around()
        except BaseException:
            await servers.close()
            raise
        return servers

    async def _look_around(self) -> None:
        await self._topology.learn()
        (address,) = self._topology.addresses
        try:
            async with self._pool(address).lend() as connection:
                (info,) = await connection.run(command("INFO", "cluster"), 1)
        except ReplyError as error:
            raise _login_error(address, error) from None
        if info_field(info, "cluster_enabled") == "1":
            self._topology = ClusterSlots(self._url)
            await self._topology.learn()
        elif self._url.must_be_cluster:
            raise StoreError(
                f"{address_text(address)} is no cluster: write redis:// or rediss:// in place of the +cluster form"
            )

    @property
    def is_cluster(self) -> bool:
        """Whether the store is a cluster."""
        return isinstance(self._topology, ClusterSlots)

    async def on(self, key: str, work: Callable[[Connection], Awaitable[T]], *, urgent: bool = False) -> T:
        """Run `work` on a connection to the server of `key`, and repeat it if a cluster redirects it.

        `work` must leave no WATCH behind unless it raises. Raises StoreUnavailable and ReplyError.
        """
        for _ in range(REDIRECTS_MAX):
            try:
                async with self._pool(self.address_of(key)).lend(urgent=urgent) as connection:
                    return await work(connection)
            except ReplyError as error:
                await self.follow_error(error)
            except StoreUnavailable:
                await self.relearn()
                raise
        raise StoreUnavailable(f"the cluster kept redirecting {key}: its nodes do not agree who holds it")

    async def run(self, key: str, *commands: bytes) -> list[Any]:
        """Run `commands`, whose keys must share the slot of `key`, and return their replies."""
        return await self.on(key, lambda connection: connection.run(b"".join(commands), len(commands)))

    async def run_each(self, *orders: tuple[str, bytes]) -> list[Any]:
        """Run commands on one key each, in order, and return their replies; a single server gets them in one request.

        Each of `orders` is a key and a command.
        """
        if not self.is_cluster:
            return await self.run(orders[0][0], *(order for _, order in orders))
        return [reply for key, order in orders for reply in await self.run(key, order)]

    async def dedicated(self, key: str) -> Connection:
        """Open a separate connection to the server of `key`, for blocking reads. The caller closes it."""
        if self._topology.moves_unseen:
            await self.relearn()
        try:
            return await self._pool(self.address_of(key)).open()
        except ReplyError as error:
            raise _login_error(self.address_of(key), error) from None
        except StoreUnavailable:
            await self.relearn()
            raise

    async def scan(self, pattern: str) -> set[bytes]:
        """Return the names of the matching keys of all servers.

        It reads the names of all keys, so use it only for repairs. Raises StoreError.
        """
        keys: set[bytes] = set()
        for address in self._topology.addresses:
            async with self._pool(address).lend() as connection:
                cursor = b""
                while cursor != b"0":
                    order = command("SCAN", cursor or b"0", "MATCH", pattern, "COUNT", SCAN_KEYS)
                    ((cursor, names),) = await connection.run(order, 1)
                    keys.update(names)
        return keys

    async def each(self, *commands: bytes) -> dict[str, list[Any]]:
        """Run `commands` on every server and return the replies by the server's address. Raises StoreError."""
        if self._topology.moves_unseen:
            await self.relearn()
        replies = {}
        for address in self._topology.addresses:
            async with self._pool(address).lend() as connection:
                replies[address_text(address)] = await connection.run(b"".join(commands), len(commands))
        return replies

    def address_of(self, key: str) -> Address:
        """Return the address of the server that holds `key`, as far as known."""
        return self._topology.address_of(key)

    async def follow_error(self, error: ReplyError) -> None:
        """Handle an error reply so that the caller can repeat the request; raise if a repetition cannot help.

        Raises StoreUnavailable if the server cannot serve now, and `error` itself otherwise.
        """
        if await self._topology.redirect(error):
            return
        if error.code in _UNAVAILABLE_CODES:
            await self.relearn()
            raise StoreUnavailable(str(error)) from None
        raise error

    async def relearn(self) -> None:
        """Find out again which server holds which keys, and close connections to servers that hold none any longer.

        If no server answers, the previous knowledge stays.
        """
        # Hundreds of workers notice a lost server at once. One of them queries the topology, and the others wait for
        # the result.
        already_asked = self._learning.locked()
        async with self._learning:
            if already_asked:
                return
            with suppress(StoreError):
                await self._topology.learn()
                for gone in set(self._pools) - set(self._topology.addresses):
                    self._pools.pop(gone).close()

    def _pool(self, address: Address) -> _Pool:
        pool = self._pools.get(address)
        if pool is None:
            pool = self._pools[address] = _Pool(lambda: self._connect(address))
        return pool

    async def _connect(self, address: Address) -> Connection:
        connection = await Connection.open(address, self._url.login)
        try:
            await self._topology.check(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    async def close(self) -> None:
        """Close all connections."""
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()
        await self._topology.close()
        # The transports are closed only after one turn of the loop.
        await asyncio.sleep(0)


def _login_error(address: Address, error: ReplyError) -> StoreError:
    where = address_text(address)
    if error.code in _UNAVAILABLE_CODES:
        return StoreUnavailable(f"{where}: {error}")
    if error.code in _LOGIN_CODES:
        return StoreError(f"{where} refused the login ({error.code}): correct user and password in the Redis URL")
    return StoreError(f"{where}: {error}")
