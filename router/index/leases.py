# SPDX-License-Identifier: Apache-2.0
"""Who may write a worker: leases that expire, with numbers that only grow."""

from __future__ import annotations

from kvrouter.router.common.ids import WorkerKey
from kvrouter.router.index import keys
from kvrouter.router.index.commit import Head, Lease, hset
from kvrouter.router.index.transactions import Transactions
from kvrouter.router.redis_client.resp import command


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
