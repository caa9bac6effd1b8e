# SPDX-License-Identifier: Apache-2.0
"""Who may write a worker: leases with numbers that only grow, each valid as long as nobody takes it. Another process
may once the holder's router has no lease of its own, which expires."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec

from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.base.redis_client.connection import Connection
from kvrouter.router.base.redis_client.errors import ReplyError, StoreError
from kvrouter.router.base.redis_client.resp import command
from kvrouter.router.index.store import keys
from kvrouter.router.index.store.commit import HEAD_FIELDS, Head, Lease, hset
from kvrouter.router.index.store.transactions import Transactions

# GET, HMGET.
_REPLIES_PER_LOOK = 2
# Workers looked at with one request: about half a millisecond of work when the reply comes.
LOOKS_PER_REQUEST = 128


class LeaseLook(msgspec.Struct, frozen=True, eq=False):
    """The request that reads who has a worker's lease, and the head of its `meta`; made once. key: routes it."""

    key: str
    request: bytes

    @classmethod
    def of(cls, worker: WorkerKey) -> LeaseLook:
        meta = keys.meta(worker)
        return cls(meta, command("GET", keys.lease(worker)) + command("HMGET", meta, *HEAD_FIELDS))


class Seen(msgspec.Struct, frozen=True):
    """What a look found. fields: of `meta`, as `Head.of` takes them."""

    holder: bytes | None
    fields: list[bytes | None]


class Leases:
    """Raises StoreUnavailable and StoreError."""

    def __init__(self, transactions: Transactions) -> None:
        self._transactions = transactions

    # -- of a router

    async def renew(self, token: str, count: int, ttl_s: float) -> int | None:
        """The lease of router `token` lasts ttl_s from now. Returns the count of its last renewal; None: it had ended,
        or the store lost it."""
        key = keys.router_lease(token)
        orders = command("GET", key) + command("SET", key, count, "PX", _milliseconds(ttl_s))
        try:
            before, _ = await self._transactions.servers.on(key, lambda one: one.run(orders, 2), urgent=True)
            return None if before is None else keys.parse_number(before)
        except ReplyError as error:
            if error.code != "WRONGTYPE":
                raise
        except ValueError:
            pass
        # Another program's value, which the SET replaced.
        return None

    async def _lives(self, token: str) -> bool:
        # PTTL is negative where there is no key, and for one that never ends, which no router writes.
        key = keys.router_lease(token)
        return int(await self._transactions.reply(key, command("PTTL", key))) > 0

    # -- of a worker

    async def take(self, worker: WorkerKey, token: str, *, above: int = 0) -> tuple[Lease, Head] | None:
        """A new lease, in place of an older one of the same token or of a router without a lease, and the head of
        `meta` before it. None: another router has one.

        above: the highest number that this process had. A number of above + 1 says that nobody else had the lease
        since, or that the store lost who had."""
        taken: tuple[Lease, Head] | None = None
        other: bytes | None = None

        def write(holder: bytes | None, head: Head) -> list[bytes] | bool:
            nonlocal taken, other
            if holder not in (None, other) and Lease.token_of(holder) not in (None, token):
                other = holder
                return False
            lease = Lease(token, max(head.lease, above) + 1)
            taken = lease, head
            return [
                command("SET", keys.lease(worker), lease.value),
                hset(keys.meta(worker), {keys.META_LEASE: b"%d" % lease.number}),
            ]

        # The second time, in place of what the first found: who has it now began after the look at its router.
        for _ in range(2):
            if await self._transactions.run(worker, write) is None:
                return taken
            if other is None or await self._lives(Lease.token_of(other) or ""):
                return None
        return None

    async def confirm(self, worker: WorkerKey, lease: Lease) -> Head | None:
        """What the store holds of the worker. None: the lease was lost."""
        return await self._if_leased(worker, lease)

    async def look(self, looks: Sequence[LeaseLook]) -> list[Seen | StoreError | None]:
        """What the store holds of many workers, with few requests, in their order. None: the server refused a part of a
        request, whosever it was."""
        servers: dict[object, list[int]] = {}
        for at, one in enumerate(looks):
            servers.setdefault(self._transactions.servers.address_of(one.key), []).append(at)
        parts = [
            ats[first : first + LOOKS_PER_REQUEST]
            for ats in servers.values()
            for first in range(0, len(ats), LOOKS_PER_REQUEST)
        ]
        found: list[Seen | StoreError | None] = [None] * len(looks)

        async def read(part: list[int]) -> None:
            try:
                replies = await self._read([looks[at] for at in part])
            except StoreError as error:
                for at in part:
                    found[at] = error
                return
            for at, holder, fields in zip(part, replies[::2], replies[1::2], strict=False):
                found[at] = Seen(holder, fields)

        await asyncio.gather(*map(read, parts))
        return found

    async def _read(self, looks: list[LeaseLook]) -> list[Any]:
        """Empty: the server refused a part of it."""
        request = b"".join([one.request for one in looks])

        async def work(connection: Connection) -> list[Any]:
            return await connection.run(request, _REPLIES_PER_LOOK * len(looks))

        try:
            return await self._transactions.servers.on(looks[0].key, work, urgent=True)
        except ReplyError:
            # Of one of many. Whose it is, and what it means, shows when each is looked at by itself.
            return []

    async def release(self, worker: WorkerKey, lease: Lease) -> bool:
        """Gives the lease back, if it still counts."""
        return await self._if_leased(worker, lease, command("DEL", keys.lease(worker))) is not None

    async def _if_leased(self, worker: WorkerKey, lease: Lease, *orders: bytes) -> Head | None:
        seen: Head | None = None

        def write(holder: bytes | None, head: Head) -> list[bytes] | bool:
            nonlocal seen
            seen = head if holder == lease.value else None
            return list(orders) if orders and seen is not None else False

        done = await self._transactions.run(worker, write)
        return seen if done is None or not orders else None


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1_000))
