# SPDX-License-Identifier: Apache-2.0
"""Which server holds a key: the one there is, a cluster's primary of its slot, or the primary that Sentinel names.

redis-py asks clusters and Sentinels; here is what is made of their answers."""

from __future__ import annotations

import asyncio
from typing import Any

from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import MovedError, RedisClusterException, RedisError

from kvrouter.router.base.redis_client.connection import CONNECT_TIMEOUT_S, PLAIN_LOGIN, Connection
from kvrouter.router.base.redis_client.errors import ReplyError, StoreError, StoreUnavailable
from kvrouter.router.base.redis_client.resp import command, info_field
from kvrouter.router.base.redis_client.url import Address, StoreUrl, address_text

# Pause while a slot is under way between two nodes (a multi-key command cannot follow an ASK half-way).
MIGRATION_PAUSE_S = 0.1
# A Sentinel holds a few names and answers at once; one that does not is passed over.
SENTINEL_TIMEOUT_S = 1.0


class OneServer:
    # Whether a key's server can change while the old one still answers.
    moves_unseen = False

    def __init__(self, address: Address) -> None:
        self.addresses: tuple[Address, ...] = (address,)

    def address_of(self, key: str) -> Address:
        return self.addresses[0]

    async def learn(self) -> None:
        """Asks who holds what. Raises StoreError, and what was known stays."""

    async def redirect(self, error: ReplyError) -> bool:
        """Whether `error` only said that a key's server is another one, or soon will be."""
        return False

    async def check(self, connection: Connection) -> None:
        """Raises StoreUnavailable where a new connection leads to a server that must not be used."""

    async def close(self) -> None: ...


class ClusterSlots(OneServer):
    """The primary of each of 16,384 slots."""

    def __init__(self, url: StoreUrl) -> None:
        super().__init__(url.address)
        if isinstance(url.address, str):
            raise StoreError(f"{url.address} is a node of a cluster: write its redis://host:port")
        host, port = url.address
        options = _asking(CONNECT_TIMEOUT_S) | url.login.options | {"ssl": url.login.tls is not None}
        self._client = RedisCluster(host=host, port=port, **options)

    def address_of(self, key: str) -> Address:
        return _address(self._client.nodes_manager.get_node_from_slot(self._client.keyslot(key)))

    async def learn(self) -> None:
        try:
            # Not `client.initialize()`, which also asks for all COMMANDs that the server knows: no ACL need allow it.
            await self._client.nodes_manager.initialize()
        except (RedisError, RedisClusterException) as error:
            raise StoreUnavailable(str(error)) from None
        self.addresses = tuple(map(_address, self._client.get_primaries()))

    async def redirect(self, error: ReplyError) -> bool:
        if error.code == "MOVED":
            moved = MovedError(str(error).partition(" ")[2])
            # A cluster may be set not to name hosts (cluster-preferred-endpoint-type): then all have the same.
            moved.host = moved.host or self._client.nodes_manager.slots_cache[moved.slot_id][0].host
            await self._client.nodes_manager.move_slot(moved)
        elif error.code in ("ASK", "TRYAGAIN"):
            await asyncio.sleep(MIGRATION_PAUSE_S)
        else:
            return False
        return True

    async def close(self) -> None:
        await self._client.nodes_manager.aclose()
        await self._client.nodes_manager.aclose("startup_nodes")


def _address(node: ClusterNode) -> Address:
    return node.host, int(node.port)


class SentinelPrimary(OneServer):
    """The primary of one service, which changes when it fails."""

    moves_unseen = True

    def __init__(self, url: StoreUrl) -> None:
        super().__init__(url.address)
        self._service = url.service
        self._asked = ", ".join(address_text(address) for address in url.sentinels)
        options = _asking(SENTINEL_TIMEOUT_S) | url.sentinel_options
        self._client = Sentinel(url.sentinels, sentinel_kwargs=options)  # type: ignore[no-untyped-call]

    async def learn(self) -> None:
        try:
            self.addresses = (await self._client.discover_master(self._service),)
        except RedisError:
            raise StoreUnavailable(
                f"no Sentinel of {self._asked} names a primary of {self._service!r}: not reached, not logged in "
                "(sentinel_password), no such service, or none elected yet"
            ) from None

    async def check(self, connection: Connection) -> None:
        """A Sentinel that was cut off still names the server that was the primary, which may follow another now: what
        it holds is old, and says so to nobody who only reads."""
        (info,) = await connection.run(command("INFO", "replication"), 1)
        if info_field(info, "role") != "master":
            raise StoreUnavailable(f"{address_text(self.addresses[0])} is no primary now")

    async def close(self) -> None:
        for sentinel in self._client.sentinels:
            await sentinel.aclose()


def _asking(timeout_s: float) -> dict[str, Any]:
    """Options of redis-py's clients, which ask once."""
    return PLAIN_LOGIN | {
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "retry": Retry(NoBackoff(), 0),
    }
