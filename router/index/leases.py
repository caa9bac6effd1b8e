# SPDX-License-Identifier: Apache-2.0
"""Who may write a worker: leases that expire, with numbers that only grow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from kvrouter.router.common.ids import WorkerKey
from kvrouter.router.index import keys
from kvrouter.router.index.commit import HEAD_FIELDS, Head, Lease, hset
from kvrouter.router.index.transactions import Transactions
from kvrouter.router.redis_client.connection import Connection
from kvrouter.router.redis_client.errors import ReplyError
from kvrouter.router.redis_client.resp import command

# GET, HMGET.
_REPLIES_PER_LOOK = 2


class Renewal(msgspec.Struct, frozen=True, eq=False):
    """One worker's part of a request that renews many leases; made once. key: routes it."""

    key: str
    look: bytes
    expire: bytes

    @classmethod
    def of(cls, worker: WorkerKey, ttl_s: float) -> Renewal:
        lease, meta = keys.lease(worker), keys.meta(worker)
        expire = command("PEXPIRE", lease, _milliseconds(ttl_s))
        return cls(meta, command("GET", lease) + command("HMGET", meta, *HEAD_FIELDS), expire)


class RenewalBatch(msgspec.Struct, frozen=True, eq=False):
    """Renewals on one server, which go with one request; made once for many rounds. values: what the leases are where
    they are held."""

    key: str
    values: list[bytes]
    looks: bytes
    expires: list[bytes]
    all_expires: bytes


class Leases:
    """Raises StoreUnavailable and StoreError."""

    def __init__(self, transactions: Transactions) -> None:
        self._transactions = transactions

    async def take(self, worker: WorkerKey, token: str, ttl_s: float, *, above: int = 0) -> Lease | None:
        """A new lease for ttl_s from now, in place of an older one of the same token. None: another token has one.

        above: the highest number that this process had. A number of above + 1 says that nobody else had the lease
        since, or that the store lost who had."""
        taken: Lease | None = None

        def write(holder: bytes | None, head: Head) -> list[bytes] | bool:
            nonlocal taken
            if holder is not None and Lease.token_of(holder) not in (None, token):
                return False
            taken = Lease(token, max(head.lease, above) + 1)
            return [
                command("SET", keys.lease(worker), taken.value, "PX", _milliseconds(ttl_s)),
                hset(keys.meta(worker), {keys.META_LEASE: b"%d" % taken.number}),
            ]

        return taken if await self._transactions.run(worker, write) is None else None

    async def renew(self, worker: WorkerKey, lease: Lease, ttl_s: float) -> Head | None:
        """What the store holds of the worker, and the lease now ends in ttl_s. None: it was lost, and nothing
        changed."""
        return await self._if_leased(worker, lease, command("PEXPIRE", keys.lease(worker), _milliseconds(ttl_s)))

    def batch(self, offers: Sequence[tuple[Lease, Renewal]], most: int) -> list[tuple[list[int], RenewalBatch]]:
        """The offers as batches of at most `most`, each with the places of its own among them."""
        servers: dict[object, list[int]] = {}
        for at, (_, renewal) in enumerate(offers):
            servers.setdefault(self._transactions.servers.address_of(renewal.key), []).append(at)
        parts = [ats[first : first + most] for ats in servers.values() for first in range(0, len(ats), most)]
        return [(part, _batch([offers[at] for at in part])) for part in parts]

    async def renew_all(self, batch: RenewalBatch) -> list[Any] | None:
        """Renews those that are held still, with two requests. For each, who has the lease now and the fields of `meta`
        as `Head.of` takes them, one behind the other; None: the server refused a part of the first request.

        No transaction: a lease that ends and is taken by another process between the two gets the time of this one."""
        count = len(batch.values)

        async def work(connection: Connection) -> list[Any] | None:
            try:
                replies = await connection.run(batch.looks, _REPLIES_PER_LOOK * count)
            except ReplyError:
                # Of one of many. Whose it is, and what it means, shows when they are renewed one by one.
                return None
            holders, expires, held = replies[::_REPLIES_PER_LOOK], batch.all_expires, count
            if holders != batch.values:
                pairs = zip(holders, batch.values, batch.expires, strict=True)
                ours = [expire for holder, value, expire in pairs if holder == value]
                expires, held = b"".join(ours), len(ours)
            if held:
                await connection.run(expires, held)
            return replies

        return await self._transactions.servers.on(batch.key, work, urgent=True)

    async def release(self, worker: WorkerKey, lease: Lease) -> bool:
        """Gives the lease back, if it still counts."""
        return await self._if_leased(worker, lease, command("DEL", keys.lease(worker))) is not None

    async def _if_leased(self, worker: WorkerKey, lease: Lease, order: bytes) -> Head | None:
        seen: Head | None = None

        def write(holder: bytes | None, head: Head) -> list[bytes] | bool:
            nonlocal seen
            seen = head
            return [order] if holder == lease.value else False

        return seen if await self._transactions.run(worker, write) is None else None


def _batch(offers: list[tuple[Lease, Renewal]]) -> RenewalBatch:
    expires = [renewal.expire for _, renewal in offers]
    looks = b"".join([renewal.look for _, renewal in offers])
    return RenewalBatch(offers[0][1].key, [lease.value for lease, _ in offers], looks, expires, b"".join(expires))


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1_000))
