# SPDX-License-Identifier: Apache-2.0
"""Transactions on one worker's keys: lease and meta are watched, so nothing can change between check and EXEC.

Redis 6.0.9 and later abort for a watched key that expired.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.base.redis_client.connection import Connection
from kvrouter.router.base.redis_client.errors import ReplyError, StoredValueError, StoreError
from kvrouter.router.base.redis_client.resp import command
from kvrouter.router.base.redis_client.servers import SCAN_KEYS, Servers
from kvrouter.router.index.store import keys
from kvrouter.router.index.store.commit import Head

log = logging.getLogger(__name__)

T = TypeVar("T")

# A lease renewal or a take-over may touch the watched keys between check and EXEC; either happens once in seconds.
CONFLICTS_MAX = 8
# The error for a key of another type, which can only be dropped.
WRONG_TYPE = "WRONGTYPE"
_FOREIGN_TYPE = "of a type that no router writes"

UNWATCH = command("UNWATCH")
_MULTI = command("MULTI")
_EXEC = command("EXEC")


class Transactions:
    """Transactions and reads on one store. The methods raise StoreUnavailable and StoreError."""

    def __init__(self, servers: Servers) -> None:
        self.servers = servers

    async def run(self, worker: WorkerKey, write: Callable[[bytes | None, Head], list[bytes] | T]) -> T | None:
        """Execute the commands that `write` returns for lease and head, if neither changes before EXEC.

        If one of them changes, `write` is called again. Return None if the commands were executed, else the result that
        `write` returned in place of commands.

        Args:
            worker: The worker.
            write: Takes the lease's value and the head of `meta`; returns commands, or a result that needs none.
        """
        lease, meta = keys.lease(worker), keys.meta(worker)
        watch = command("WATCH", lease, meta) + command("GET", lease) + command("HMGET", meta, *keys.META_FIELDS)

        async def attempt(connection: Connection) -> tuple[bool, T | None]:
            try:
                _, holder, head = await connection.run(watch, 3)
            except ReplyError as error:
                if error.code != WRONG_TYPE:
                    raise
                await self._drop_foreign(connection, worker)
                return False, None
            orders = write(holder, Head.of(meta, *head))
            if not isinstance(orders, list):
                await connection.run(UNWATCH, 1)
                return True, orders
            replies = await connection.run(multi(orders), len(orders) + 2)
            done = replies[-1]
            if done is None:
                return False, None
            for reply in done:
                if not isinstance(reply, Exception):
                    continue
                if str(reply).startswith(WRONG_TYPE):
                    # The other commands were executed, so the store is in neither of the two states. Only a new epoch
                    # mends that.
                    await self._drop_foreign(connection, worker)
                    raise StoredValueError(meta, "a key of its worker", _FOREIGN_TYPE)
                raise StoreError(f"{meta}: the server refused a part of a commit: {reply}")
            return True, None

        for _ in range(CONFLICTS_MAX):
            finished, result = await self.servers.on(meta, attempt)
            if finished:
                return result
        raise StoreError(f"{meta} kept changing while it was written; more than one router writes it: see their leases")

    async def _drop_foreign(self, connection: Connection, worker: WorkerKey) -> None:
        """Drop keys of the worker that have another type than routers write.

        Such keys hold nothing of ours, and refuse every command of ours.
        """
        wanted = {keys.lease(worker): b"string", keys.meta(worker): b"hash", keys.log(worker): b"stream"}
        _, *types = await connection.run(
            b"".join((UNWATCH, *(command("TYPE", key) for key in wanted))), 1 + len(wanted)
        )
        foreign = [
            key for (key, kind), stored in zip(wanted.items(), types, strict=True) if stored not in (kind, b"none")
        ]
        if foreign:
            log.warning("stored keys of another type dropped", extra={"keys": foreign})
            await connection.run(command("UNLINK", *foreign), 1)
        if keys.meta(worker) in foreign:
            await self.unlink_epochs(connection, worker, None)

    async def unlink_epochs(self, connection: Connection, worker: WorkerKey, kept_epoch: str | None) -> None:
        """Unlink the keys of all epochs of the worker but `kept_epoch`.

        This looks at the names of all keys of the server, ten for each worker. Use it only if `meta` does not show the
        names.
        """
        cursor = b"0"
        while True:
            order = command("SCAN", cursor, "MATCH", keys.of_epochs(worker), "COUNT", SCAN_KEYS)
            ((cursor, names),) = await connection.run(order, 1)
            beginning = None if kept_epoch is None else keys.copies(worker, kept_epoch).removesuffix("copies").encode()
            gone = [key for key in names if beginning is None or not key.startswith(beginning)]
            if gone:
                await connection.run(command("UNLINK", *gone), 1)
            if cursor == b"0":
                return

    async def read(self, key: str, work: Callable[[Connection], Awaitable[T]], field: str = "") -> T:
        """Run `work` as `servers.on` does.

        Raises StoredValueError, with `field`, if a key has another type than routers write.
        """
        try:
            return await self.servers.on(key, work)
        except ReplyError as error:
            if error.code != WRONG_TYPE:
                raise
            raise StoredValueError(key, field, _FOREIGN_TYPE) from None

    async def reply(self, key: str, order: bytes) -> Any:
        """Return the reply to one command. Raises StoredValueError, as `read` does."""
        (reply,) = await self.read(key, lambda connection: connection.run(order, 1))
        return reply


def multi(orders: list[bytes]) -> bytes:
    """Return one transaction of `orders`; their replies come as one list, after len(orders) + 1 other replies."""
    return b"".join((_MULTI, *orders, _EXEC))


def pairs(flat: list[bytes]) -> Iterable[tuple[bytes, bytes]]:
    """Return the fields of a HASH with their values, from the flat list of RESP2."""
    return zip(flat[::2], flat[1::2], strict=True)
