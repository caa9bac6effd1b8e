# SPDX-License-Identifier: Apache-2.0
"""Who may write a worker: leases that expire, with numbers that only grow."""

from __future__ import annotations

import asyncio
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


class RenewalReply(msgspec.Struct, frozen=True):
    """Who has the lease now, and the fields of `meta` as `Head.of` takes them."""

    holder: bytes | None
    fields: list[bytes | None]


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

    async def renew_all(self, renewals: Sequence[tuple[Lease, Renewal]]) -> list[RenewalReply | None]:
        """Renews those that are held still, with two requests to each server; None: it refused a part of the first.

        No transaction: a lease that ends and is taken by another process between the two gets the time of this one."""
        servers = self._transactions.servers
        found: list[RenewalReply | None] = [None] * len(renewals)
        parts: dict[object, list[int]] = {}
        for at, (_, renewal) in enumerate(renewals):
            parts.setdefault(servers.address_of(renewal.key), []).append(at)

        async def renew(part: list[int]) -> None:
            looks = b"".join([renewals[at][1].look for at in part])

            async def work(connection: Connection) -> list[Any] | None:
                try:
                    replies = await connection.run(looks, _REPLIES_PER_LOOK * len(part))
                except ReplyError:
                    # Of one of many. Whose it is, and what it means, shows when they are renewed one by one.
                    return None
                pairs = zip(part, replies[::2], strict=True)
                held = [renewals[at][1].expire for at, holder in pairs if holder == renewals[at][0].value]
                if held:
                    await connection.run(b"".join(held), len(held))
                return replies

            replies = await servers.on(renewals[part[0]][1].key, work, urgent=True)
            if replies is not None:
                for at, holder, fields in zip(part, replies[::2], replies[1::2], strict=True):
                    found[at] = RenewalReply(holder, fields)

        await asyncio.gather(*map(renew, parts.values()))
        return found

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


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1_000))
