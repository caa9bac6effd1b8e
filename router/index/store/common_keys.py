# SPDX-License-Identifier: Apache-2.0
"""Replacement of the common keys of all routers and workers that have another type than routers write.

Such a key holds nothing of ours and refuses every command, so a router could neither start nor report itself. The
registered workers survive, because each model's registrations have a key of their own.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from kvrouter.router.base.redis_client.connection import Connection
from kvrouter.router.base.redis_client.errors import ReplyError
from kvrouter.router.base.redis_client.resp import command
from kvrouter.router.index.store import keys
from kvrouter.router.index.store.transactions import UNWATCH, WRONG_TYPE, Transactions, multi

log = logging.getLogger(__name__)

# A short read of each key, which only a key of its own type answers.
PROBES = {
    keys.REGISTRATIONS: command("GET", keys.REGISTRATIONS),
    keys.MODELS: command("SMEMBERS", keys.MODELS),
    keys.SCHEMAS: command("HLEN", keys.SCHEMAS),
    keys.ADOPTED: command("HLEN", keys.ADOPTED),
    keys.ROUTERS: command("HLEN", keys.ROUTERS),
    keys.CLAIMS: command("HLEN", keys.CLAIMS),
    **{
        key: command("XREVRANGE", key, "+", "-", "COUNT", 1)
        for key in (keys.LOADS, keys.HISTORY_STEPS, keys.HISTORY_MINUTES)
    },
}
NO_PERMISSION = "NOPERM"


class CommonKeys:
    """The common keys of one store. The methods raise StoreUnavailable and StoreError."""

    def __init__(self, transactions: Transactions) -> None:
        self._servers = transactions.servers

    async def replace_foreign(self, known_models: Iterable[str]) -> list[str]:
        """Drop the keys of another type, and return their names.

        Args:
            known_models: Models that are written again, beside those whose registrations are found.
        """
        if not await self._is_foreign(*PROBES):
            return []
        foreign = [key for key in PROBES if await self._is_foreign(key)]
        return [key for key in foreign if await self._replace(key, known_models)]

    async def _is_foreign(self, *wanted: str) -> bool:
        """Return whether any of these keys is of another type."""
        try:
            await self._servers.run_each(*((key, PROBES[key]) for key in wanted))
        except ReplyError as error:
            if error.code != WRONG_TYPE:
                raise
            return True
        return False

    async def _replace(self, key: str, known_models: Iterable[str]) -> bool:
        members: set[bytes] = set()
        if key == keys.MODELS:
            members = await self._stored_models() | {keys.model_member(model).encode() for model in known_models}

        async def attempt(connection: Connection) -> bool:
            # Watch the key, because another router may be replacing it at this moment.
            try:
                await connection.run(command("WATCH", key) + PROBES[key], 2)
            except ReplyError as error:
                if error.code != WRONG_TYPE:
                    raise
            else:
                await connection.run(UNWATCH, 1)
                return False
            orders = [command("DEL", key), *([command("SADD", key, *members)] if members else [])]
            *_, done = await connection.run(multi(orders), len(orders) + 2)
            return done is not None

        replaced = await self._servers.on(key, attempt)
        if replaced:
            log.warning("stored key of another type replaced", extra={"key": key, "members": len(members)})
        return replaced

    async def _stored_models(self) -> set[bytes]:
        """Return the members of the models' key, as the names of all keys of the servers show them."""
        before, after = keys.registry_key_parts()
        try:
            names = await self._servers.scan(f"{before}*{after}")
        except ReplyError as error:
            if error.code != NO_PERMISSION:
                raise
            log.warning("models not searched: the router's user may not use SCAN", extra={"reason": str(error)})
            return set()
        members = {name.removeprefix(before.encode()).removesuffix(after.encode()) for name in names}
        return {member for member in members if keys.is_model_member(member)}
