# SPDX-License-Identifier: Apache-2.0
"""What router processes say of themselves: heartbeats, and which workers their sources show them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from kvrouter.router.base.redis_client.errors import ReplyError, StoreUnavailable
from kvrouter.router.base.redis_client.resp import command
from kvrouter.router.index.store import keys
from kvrouter.router.index.store.transactions import Transactions, pairs

# A heartbeat and a look at the others: later than this, the answer is about a moment that is over.
BEAT_TIMEOUT_S = 1.0


class Peers:
    """Raises StoreUnavailable and StoreError."""

    def __init__(self, transactions: Transactions) -> None:
        self._transactions = transactions
        self._servers = transactions.servers

    async def beat(self, token: str, heartbeat: bytes) -> dict[bytes, bytes]:
        """Writes this router's heartbeat; returns those of all, by token. Whoever wrote them: they are to be judged."""
        orders = command("HSET", keys.ROUTERS, token, heartbeat) + command("HGETALL", keys.ROUTERS)
        try:
            async with asyncio.timeout(BEAT_TIMEOUT_S):
                _, fields = await self._servers.on(keys.ROUTERS, lambda one: one.run(orders, 2), urgent=True)
        except TimeoutError:
            raise StoreUnavailable(f"the server did not answer in {BEAT_TIMEOUT_S:g} s") from None
        except ReplyError as error:
            if error.code != "WRONGTYPE":
                raise
            # Of an older version, or another program's: no router can say anything until it is gone.
            await self._servers.run(keys.ROUTERS, command("DEL", keys.ROUTERS))
            raise
        return dict(pairs(fields))

    async def heartbeats(self) -> dict[bytes, bytes]:
        """The heartbeats of all routers, by token; also of some that are gone."""
        (fields,) = await self._servers.run(keys.ROUTERS, command("HGETALL", keys.ROUTERS))
        return dict(pairs(fields))

    async def drop_heartbeats(self, tokens: Iterable[str]) -> None:
        """`tokens` must not be empty. A router that lives writes its own again."""
        await self._servers.run(keys.ROUTERS, command("HDEL", keys.ROUTERS, *tokens))

    async def put_claim(self, token: str, claim: bytes) -> None:
        """What the sources of router `token` show it, in place of what it said before."""
        await self._servers.run(keys.CLAIMS, command("HSET", keys.CLAIMS, token, claim))

    async def claims(self) -> dict[str, bytes]:
        """By token; also of routers that are gone."""
        fields = await self._transactions.reply(keys.CLAIMS, command("HGETALL", keys.CLAIMS))
        return {token.decode(errors="replace"): claim for token, claim in pairs(fields)}

    async def drop_claims(self, tokens: Iterable[str]) -> None:
        """`tokens` must not be empty."""
        await self._servers.run(keys.CLAIMS, command("HDEL", keys.CLAIMS, *tokens))
