# SPDX-License-Identifier: Apache-2.0
"""One worker's keys, read and written together: lease and meta are watched, so nothing can change between check and
EXEC. (Redis 6.0.9 and later abort for a watched key that expired.)"""

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
from kvrouter.router.index.store.commit import HEAD_FIELDS, Head

log = logging.getLogger(__name__)

T = TypeVar("T")

# A lease renewal or a take-over may touch the watched keys between check and EXEC; either happens once in seconds.
CONFLICTS_MAX = 8
# A key of the wrong type; it can only be dropped.
WRONG_TYPE = "WRONGTYPE"
_OFWRONG_TYPE = "of a type that no router writes"

UNWATCH = command("UNWATCH")
_MULTI = command("MULTI")
_EXEC = command("EXEC")


class Transactions:
    """Raises StoreUnavailable and StoreError."""

    def __init__(self, servers: Servers) -> None:
        self.servers = servers

    async def run(self, worker: WorkerKey, write: Callable[[bytes | None, Head], list[bytes] | T]) -> T | None:
        """Watches lease and meta, asks `write` what to do with them: commands to execute, or a result that needs none.

        None: the commands were executed. `write` is called again when lease or meta changed in between."""
        lease, meta = keys.lease(worker), keys.meta(worker)
        watch = command("WATCH", lease, meta) + command("GET", lease) + command("HMGET", meta, *HEAD_FIELDS)

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
                    # The rest of it was done, so what is stored is none of the two states: only a new epoch mends that.
                    await self._drop_foreign(connection, worker)
                    raise StoredValueError(meta, "a key of its worker", _OFWRONG_TYPE)
                raise StoreError(f"{meta}: the server refused a part of a commit: {reply}")
            return True, None

        for _ in range(CONFLICTS_MAX):
            finished, result = await self.servers.on(meta, attempt)
            if finished:
                return result
        raise StoreError(f"{meta} kept changing while it was written; more than one router writes it: see their leases")

    async def _drop_foreign(self, connection: Connection, worker: WorkerKey) -> None:
        """Drops keys of the worker that are of another type than we write: they hold nothing, and refuse every command
        of ours."""
        wanted = {keys.lease(worker): b"string", keys.meta(worker): b"hash", keys.log(worker): b"stream"}
        _, *types = await connection.run(
            b"".join((UNWATCH, *(command("TYPE", key) for key in wanted))), 1 + len(wanted)
        )
        foreign = [
            key for (key, kind), found in zip(wanted.items(), types, strict=True) if found not in (kind, b"none")
        ]
        if foreign:
            log.warning("stored keys of another type dropped", extra={"keys": foreign})
            await connection.run(command("UNLINK", *foreign), 1)
        if keys.meta(worker) in foreign:
            await self.unlink_epochs(connection, worker, None)

    async def unlink_epochs(self, connection: Connection, worker: WorkerKey, kept: str | None) -> None:
        """Unlinks what the worker has of all epochs but `kept`. It looks at the names of all keys of the server, ten a
        worker: only for when `meta` does not tell them."""
        cursor = b"0"
        while True:
            order = command("SCAN", cursor, "MATCH", keys.of_epochs(worker), "COUNT", SCAN_KEYS)
            ((cursor, found),) = await connection.run(order, 1)
            beginning = None if kept is None else keys.copies(worker, kept).removesuffix("copies").encode()
            gone = [key for key in found if beginning is None or not key.startswith(beginning)]
            if gone:
                await connection.run(command("UNLINK", *gone), 1)
            if cursor == b"0":
                return

    async def read(self, key: str, work: Callable[[Connection], Awaitable[T]], field: str = "") -> T:
        """As `servers.on`; raises StoredValueError, of `field`, where a key is of another type than we write."""
        try:
            return await self.servers.on(key, work)
        except ReplyError as error:
            if error.code != WRONG_TYPE:
                raise
            raise StoredValueError(key, field, _OFWRONG_TYPE) from None

    async def reply(self, key: str, order: bytes) -> Any:
        """As `read`, the reply to one command."""
        (reply,) = await self.read(key, lambda connection: connection.run(order, 1))
        return reply


def multi(orders: list[bytes]) -> bytes:
    """One transaction; its replies are those of `orders`, in one list behind len(orders) + 1 others."""
    return b"".join((_MULTI, *orders, _EXEC))


def pairs(flat: list[bytes]) -> Iterable[tuple[bytes, bytes]]:
    """The fields of a HASH as RESP2 has them."""
    return zip(flat[::2], flat[1::2], strict=True)
