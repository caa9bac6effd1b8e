# SPDX-License-Identifier: Apache-2.0
"""Leases on workers: the right to write a worker, which one router process has at a time.

The numbers of a worker's leases only grow, and a new log of a worker begins with the time in ms. So no two logs share a
number, even if a removed worker is registered again, or the store lost its data: a heartbeat that vouches for one log
by the number of its lease vouches for no other. A lease stays valid until another process takes it. Another process may take
it once the holder's router has no lease of its own, which expires, or shows that it gave the lease up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.base.redis_client.connection import Connection
from kvrouter.router.base.redis_client.errors import ReplyError, StoreError
from kvrouter.router.base.redis_client.resp import command
from kvrouter.router.index.store import keys
from kvrouter.router.index.store.commit import Head, LeaseValue, hset
from kvrouter.router.index.store.transactions import Transactions

# The replies to GET and HMGET.
_REPLIES_PER_LOOK = 2
# Workers whose leases are read with one request: about half a millisecond of work when the reply comes.
LOOKS_PER_REQUEST = 128


class LeaseLook(msgspec.Struct, frozen=True, eq=False):
    """The prepared request that reads the holder of a worker's lease and the head of its `meta`."""

    # The key that decides which server gets the request.
    key: str
    request: bytes

    @classmethod
    def of(cls, worker: WorkerKey) -> LeaseLook:
        """Prepare the request for a worker."""
        meta = keys.meta(worker)
        return cls(meta, command("GET", keys.lease(worker)) + command("HMGET", meta, *keys.META_FIELDS))


class Seen(msgspec.Struct, frozen=True):
    """The answer to a look."""

    # The value of the worker's lease, None if nobody has it.
    holder: bytes | None
    # The fields of `meta`, as `Head.of` takes them.
    fields: list[bytes | None]


class Leases:
    """The leases of one store. The methods raise StoreUnavailable and StoreError."""

    def __init__(self, transactions: Transactions, wall_clock: Callable[[], float]) -> None:
        """Begin without connections.

        Args:
            transactions: Run the requests.
            wall_clock: Returns the seconds since 1970.
        """
        self._transactions = transactions
        self._wall_clock = wall_clock

    # -- leases of routers

    async def renew(self, token: str, count: int, ttl_s: float) -> int | None:
        """Renew the lease of router `token`, and return the count that its last renewal wrote.

        Return None if the lease had ended or the store lost it.

        Args:
            token: The router process.
            count: The count of this renewal.
            ttl_s: How long the lease lasts from now on.
        """
        key = keys.router_lease(token)
        orders = command("GET", key) + command("SET", key, count, "PX", _milliseconds(ttl_s))
        try:
            before, _ = await self._transactions.servers.on(
                key, lambda connection: connection.run(orders, 2), urgent=True
            )
            return None if before is None else keys.parse_number(before)
        except ReplyError as error:
            if error.code != "WRONGTYPE":
                raise
        except ValueError:
            pass
        # The value was another program's, and the SET replaced it.
        return None

    async def _lives(self, token: str) -> bool:
        """Return whether the router of this token has a lease."""
        # PTTL is negative if there is no key, and for a key that never expires, which no router writes.
        key = keys.router_lease(token)
        return int(await self._transactions.reply(key, command("PTTL", key))) > 0

    # -- leases of workers

    async def take(
        self,
        worker: WorkerKey,
        token: str,
        *,
        above: int = 0,
        is_given_up: Callable[[bytes], bool] = lambda value: False,
    ) -> tuple[LeaseValue, Head] | None:
        """Take the lease of `worker`; return it and the head of `meta` before it, or None if another router has it.

        The new lease replaces an older one of the same token, of a router without a lease, or one that was given up.

        Args:
            worker: The worker.
            token: The router process that takes the lease.
            above: The highest number that this process had. If the head has no higher one, no other process had the lease
                since, or the store lost the number of the one that had it.
            is_given_up: Returns whether another router does not hold its lease of this value any longer, although the
                store has it.
        """
        taken: tuple[LeaseValue, Head] | None = None
        other: bytes | None = None

        def write(holder: bytes | None, head: Head) -> list[bytes] | bool:
            nonlocal taken, other
            if holder not in (None, other) and LeaseValue.token_of(holder) not in (None, token):
                other = holder
                return False
            number = max(head.lease, above) + 1
            lease = LeaseValue(token, number if head.lease else max(number, _milliseconds(self._wall_clock())))
            taken = lease, head
            return [
                command("SET", keys.lease(worker), lease.value),
                hset(keys.meta(worker), {keys.META_LEASE: b"%d" % lease.number}),
            ]

        # Retry once: the holder may have been replaced by a router that started after we checked it.
        for _ in range(2):
            if await self._transactions.run(worker, write) is None:
                return taken
            if other is None or (not is_given_up(other) and await self._lives(LeaseValue.token_of(other) or "")):
                return None
        return None

    async def confirm(self, worker: WorkerKey, lease: LeaseValue) -> Head | None:
        """Check that the lease is held; return the head of the worker's `meta`, or None if the lease was lost."""
        return await self._if_leased(worker, lease)

    async def look(self, looks: Sequence[LeaseLook]) -> list[Seen | StoreError | None]:
        """Send many looks with few requests, and return the answers in the order of `looks`.

        None stands for a look whose request the server refused in part, possibly because of another worker.
        """
        servers: dict[object, list[int]] = {}
        for index, look in enumerate(looks):
            servers.setdefault(self._transactions.servers.address_of(look.key), []).append(index)
        parts = [
            indices[first : first + LOOKS_PER_REQUEST]
            for indices in servers.values()
            for first in range(0, len(indices), LOOKS_PER_REQUEST)
        ]
        answers: list[Seen | StoreError | None] = [None] * len(looks)

        async def read(part: list[int]) -> None:
            try:
                replies = await self._read([looks[index] for index in part])
            except StoreError as error:
                for index in part:
                    answers[index] = error
                return
            for index, holder, fields in zip(part, replies[::2], replies[1::2], strict=False):
                answers[index] = Seen(holder, fields)

        await asyncio.gather(*map(read, parts))
        return answers

    async def _read(self, looks: list[LeaseLook]) -> list[Any]:
        """Return the replies of one server, or none if the server refused a part of the request."""
        request = b"".join([look.request for look in looks])

        async def work(connection: Connection) -> list[Any]:
            return await connection.run(request, _REPLIES_PER_LOOK * len(looks))

        try:
            return await self._transactions.servers.on(looks[0].key, work, urgent=True)
        except ReplyError:
            # The error is one of many replies. The worker that it belongs to, and its meaning, show when each worker is
            # read alone.
            return []

    async def release(self, worker: WorkerKey, lease: LeaseValue) -> bool:
        """Give the lease back, and return whether it still counted."""
        return await self._if_leased(worker, lease, command("DEL", keys.lease(worker))) is not None

    async def _if_leased(self, worker: WorkerKey, lease: LeaseValue, *orders: bytes) -> Head | None:
        """Execute `orders` if `lease` counts; return the head of `meta` before them, or None if it does not count."""
        leased: Head | None = None

        def write(holder: bytes | None, head: Head) -> list[bytes] | bool:
            nonlocal leased
            leased = head if holder == lease.value else None
            return list(orders) if orders and leased is not None else False

        done = await self._transactions.run(worker, write)
        return leased if done is None or not orders else None


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1_000))
