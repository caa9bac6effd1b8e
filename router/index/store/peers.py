# SPDX-License-Identifier: Apache-2.0
"""Reports of router processes about themselves: heartbeats, and the workers that their sources show them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from kvrouter.router.base.redis_client.errors import ReplyError, StoreUnavailable
from kvrouter.router.base.redis_client.resp import command
from kvrouter.router.index.store import keys
from kvrouter.router.index.store.transactions import Transactions, pairs

# For a heartbeat and a look at the others. A later answer is about a moment that is over.
BEAT_TIMEOUT_S = 1.0


class Peers:
    """Heartbeats and claims of the router processes on one store. The methods raise StoreUnavailable and StoreError."""

    def __init__(self, transactions: Transactions) -> None:
        self._transactions = transactions
        self._servers = transactions.servers

    async def beat(self, token: str, heartbeat: bytes) -> dict[bytes, bytes]:
        """Write this router's heartbeat, and return those of all routers by token.

        The caller must check them, because any program may have written them.
        """
        orders = command("HSET", keys.ROUTERS, token, heartbeat) + command("HGETALL", keys.ROUTERS)
        try:
            async with asyncio.timeout(BEAT_TIMEOUT_S):
                _, fields = await self._servers.on(
                    keys.ROUTERS, lambda connection: connection.run(orders, 2), urgent=True
                )
        except TimeoutError:
            raise StoreUnavailable(f"the server did not answer in {BEAT_TIMEOUT_S:g} s") from None
        except ReplyError as error:
            if error.code != "WRONGTYPE":
                raise
            # The key is an older version's or another program's. No router can write a heartbeat until it is gone.
            await self._servers.run(keys.ROUTERS, command("DEL", keys.ROUTERS))
            raise
        return dict(pairs(fields))

    async def heartbeats(self) -> dict[bytes, bytes]:
        """Return the heartbeats of all routers by token, including some of routers that are gone."""
        (fields,) = await self._servers.run(keys.ROUTERS, command("HGETALL", keys.ROUTERS))
        return dict(pairs(fields))

    async def drop_heartbeats(self, tokens: Iterable[str]) -> None:
        """Delete the heartbeats of these routers, at least one. A router that lives writes its own again."""
        await self._servers.run(keys.ROUTERS, command("HDEL", keys.ROUTERS, *tokens))

    async def put_claim(self, token: str, claim: bytes) -> None:
        """Write the workers that the sources of router `token` show it, in place of its earlier claim."""
        await self._servers.run(keys.CLAIMS, command("HSET", keys.CLAIMS, token, claim))

    async def claims(self) -> dict[str, bytes]:
        """Return the claims by token, including those of routers that are gone."""
        fields = await self._transactions.reply(keys.CLAIMS, command("HGETALL", keys.CLAIMS))
        return {token.decode(errors="replace"): claim for token, claim in pairs(fields)}

    async def drop_claims(self, tokens: Iterable[str]) -> None:
        """Delete the claims of these routers, at least one."""
        await self._servers.run(keys.CLAIMS, command("HDEL", keys.CLAIMS, *tokens))
