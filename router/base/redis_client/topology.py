# SPDX-License-Identifier: Apache-2.0
"""The topology of the store: a single server, a cluster's primary of each slot, or the primary that Sentinel names.

redis-py queries clusters and Sentinels; this module interprets their answers.
"""

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

# Pause while a slot migrates between two nodes, because a multi-key command cannot follow an ASK for a part of its
# keys.
MIGRATION_PAUSE_S = 0.1
# A Sentinel holds a few names and answers at once; one that does not is skipped.
SENTINEL_TIMEOUT_S = 1.0


class OneServer:
    """A store of one server, and the interface of all topologies. `addresses` are the servers that hold keys."""

    # Whether the server of a key can change while the old one still answers.
    moves_unseen = False

    def __init__(self, address: Address) -> None:
        self.addresses: tuple[Address, ...] = (address,)

    def address_of(self, key: str) -> Address:
        """Return the address of the server that holds `key`, as far as known."""
        return self.addresses[0]

    async def learn(self) -> None:
        """Query which server holds which keys. Raises StoreError, and then the previous knowledge stays."""

    async def redirect(self, error: ReplyError) -> bool:
        """Return whether `error` only means that the key has moved or is moving to another server.

        A move is recorded, so that the request can be repeated.
        """
        return False

    async def check(self, connection: Connection) -> None:
        """Raise StoreUnavailable if a new connection leads to a server that must not be used."""

    async def close(self) -> None:
        """Close the connections to cluster nodes or Sentinels; a single server has none."""


class ClusterSlots(OneServer):
    """A cluster: the primary of each of 16,384 slots."""

    def __init__(self, url: StoreUrl) -> None:
        super().__init__(url.address)
        if isinstance(url.address, str):
            raise StoreError(f"{url.address} is a node of a cluster: write its redis://host:port")
        host, port = url.address
        options = _asking(CONNECT_TIMEOUT_S) | url.login.options | {"ssl": url.login.tls is not None}
        self._client = RedisCluster(host=host, port=port, **options)

    def address_of(self, key: str) -> Address:
        """Return the address of the primary of the key's slot, as far as known."""
        return _address(self._client.nodes_manager.get_node_from_slot(self._client.keyslot(key)))

    async def learn(self) -> None:
        """Query the primaries and their slots from the nodes. Raises StoreUnavailable."""
        try:
            # `client.initialize()` is not called, because it also sends COMMAND, which an ACL might not allow.
            await self._client.nodes_manager.initialize()
        except (RedisError, RedisClusterException) as error:
            raise StoreUnavailable(str(error)) from None
        self.addresses = tuple(map(_address, self._client.get_primaries()))

    async def redirect(self, error: ReplyError) -> bool:
        """Record a MOVED slot, or pause for a slot that is migrating; return False for other errors."""
        if error.code == "MOVED":
            moved = MovedError(str(error).partition(" ")[2])
            # A cluster may be configured not to name hosts (cluster-preferred-endpoint-type); then all nodes have the
            # same host.
            moved.host = moved.host or self._client.nodes_manager.slots_cache[moved.slot_id][0].host
            await self._client.nodes_manager.move_slot(moved)
        elif error.code in ("ASK", "TRYAGAIN"):
            await asyncio.sleep(MIGRATION_PAUSE_S)
        else:
            return False
        return True

    async def close(self) -> None:
        """Close redis-py's connections to all nodes."""
        await self._client.nodes_manager.aclose()
        await self._client.nodes_manager.aclose("startup_nodes")


def _address(node: ClusterNode) -> Address:
    return node.host, int(node.port)


class SentinelPrimary(OneServer):
    """A service whose primary Sentinel names. The primary changes when it fails."""

    moves_unseen = True

    def __init__(self, url: StoreUrl) -> None:
        super().__init__(url.address)
        self._service = url.service
        self._sentinels = ", ".join(address_text(address) for address in url.sentinels)
        options = _asking(SENTINEL_TIMEOUT_S) | url.sentinel_options
        self._client = Sentinel(url.sentinels, sentinel_kwargs=options)  # type: ignore[no-untyped-call]

    async def learn(self) -> None:
        """Query the service's primary from the Sentinels. Raises StoreUnavailable if none of them names one."""
        try:
            self.addresses = (await self._client.discover_master(self._service),)
        except RedisError:
            raise StoreUnavailable(
                f"no Sentinel of {self._sentinels} names a primary of {self._service!r}: not reached, not logged in "
                "(sentinel_password), no such service, or none elected yet"
            ) from None

    async def check(self, connection: Connection) -> None:
        """Raise StoreUnavailable if the server is no primary now.

        A Sentinel that was cut off still names the previous primary, which may be a replica of another server now. Its
        data is old, and a client that only reads would not notice.
        """
        (info,) = await connection.run(command("INFO", "replication"), 1)
        if info_field(info, "role") != "master":
            raise StoreUnavailable(f"{address_text(self.addresses[0])} is no primary now")

    async def close(self) -> None:
        """Close redis-py's connections to all Sentinels."""
        for sentinel in self._client.sentinels:
            await sentinel.aclose()


def _asking(timeout_s: float) -> dict[str, Any]:
    """Return options for redis-py's clients that make them try once, without retries."""
    return PLAIN_LOGIN | {
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "retry": Retry(NoBackoff(), 0),
    }
