# SPDX-License-Identifier: Apache-2.0
"""The schemas of keys that the store holds, and the registrations of the former schema.

The keys of the former schema are read and never written (ADR 42).
"""

from __future__ import annotations

import logging

import msgspec

from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.base.redis_client.errors import StoredValueError
from kvrouter.router.base.redis_client.resp import command
from kvrouter.router.index.store import keys
from kvrouter.router.index.store.log_entry import decode_text
from kvrouter.router.index.store.registry import load_registry
from kvrouter.router.index.store.transactions import Transactions, pairs

log = logging.getLogger(__name__)


class SchemasSeen(msgspec.Struct, frozen=True):
    """The other schemas that the store holds."""

    # For each schema above ours, the version of the router that wrote it first.
    newer: dict[int, str]
    # The version of the former schema's registry, None if there is none.
    former_version: int | None
    # Whether it was noted that the former registry was taken over.
    is_adopted: bool


class Adopted(msgspec.Struct, frozen=True):
    """The part of the former schema's registry that was taken over."""

    # The version up to which the former registry was taken over, None if there is none or it was lost.
    version: int | None
    # The former registrations that were taken over, by the worker's tag.
    workers: dict[str, bytes]


class Schemas:
    """The schemas of one store. The methods raise StoreUnavailable and StoreError."""

    def __init__(self, transactions: Transactions) -> None:
        self._transactions = transactions
        self._servers = transactions.servers

    async def look(self, software: str, *, has_adopted: bool = False) -> SchemasSeen:
        """Note this schema with this router's version, unless it is noted already, and return the other schemas.

        Args:
            software: The version of this router.
            has_adopted: Whether this router took the former registry over, which is noted, too.
        """
        key, former = keys.SCHEMAS, keys.FORMER_REGISTRATIONS
        newer, is_adopted = {}, False
        try:
            await self._transactions.reply(key, command("HSETNX", key, keys.SCHEMA, software))
            for field, value in pairs(await self._transactions.reply(key, command("HGETALL", key))):
                is_adopted |= field == keys.SCHEMAS_ADOPTED.encode()
                if (number := _number(field)) is not None and number > keys.SCHEMA:
                    newer[number] = value.decode(errors="replace")
            if has_adopted and not is_adopted:
                await self._transactions.reply(key, command("HSETNX", key, keys.SCHEMAS_ADOPTED, software))
                is_adopted = True
        except StoredValueError as error:
            await self._drop(error)
        try:
            version = await self._transactions.reply(former, command("GET", former))
        except StoredValueError:
            # Routers of the former schema drop such a value and count again from 0.
            version = b""
        return SchemasSeen(newer, None if version is None else _number(version) or 0, is_adopted)

    async def former(self) -> tuple[dict[WorkerKey, bytes], list[StoredValueError]]:
        """Return the registrations of the former schema, and the values of it that cannot be read."""
        try:
            return await load_registry(self._transactions, keys.FORMER_PREFIX)
        except StoredValueError as error:
            return {}, [error]

    async def adopted(self) -> Adopted:
        """Return the part of the former schema's registry that was taken over."""
        key = keys.ADOPTED
        try:
            fields = dict(pairs(await self._transactions.reply(key, command("HGETALL", key))))
        except StoredValueError as error:
            await self._drop(error)
            fields = {}
        version = _number(fields.pop(keys.ADOPTED_VERSION.encode(), b""))
        return Adopted(version, {decode_text(tag): raw for tag, raw in fields.items()})

    async def adopt(self, worker: WorkerKey, raw: bytes | None) -> None:
        """Note that the former registration of `worker` was taken over, or with None that it is gone there and here."""
        field = keys.worker_tag(worker)
        order = command("HDEL", keys.ADOPTED, field) if raw is None else command("HSET", keys.ADOPTED, field, raw)
        await self._servers.run(keys.ADOPTED, order)

    async def adopt_version(self, version: int) -> None:
        """Note that the former registry was taken over up to this version."""
        await self._servers.run(keys.ADOPTED, command("HSET", keys.ADOPTED, keys.ADOPTED_VERSION, version))

    async def _drop(self, error: StoredValueError) -> None:
        """Delete a key of a type that no router writes."""
        log.warning("stored value dropped", extra={"key": error.key, "reason": str(error)})
        await self._servers.run(error.key, command("DEL", error.key))


def _number(data: bytes) -> int | None:
    try:
        return keys.parse_number(data)
    except ValueError:
        return None
