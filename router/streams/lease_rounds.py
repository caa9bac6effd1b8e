# SPDX-License-Identifier: Apache-2.0
"""The leases of one router process, renewed together: a round is one request to each server, however many workers are
followed. What a round cannot confirm each holder judges by itself."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Protocol

from kvrouter.router.index.commit import Lease
from kvrouter.router.index.leases import Leases, Renewal, RenewalReply
from kvrouter.router.redis_client.errors import StoreError

# Looks at whether a worker changes hands, per lease TTL; bounds takeover delay beyond the lease.
LOOKS_PER_TTL = 10

# A lease is renewed with every second look: four renewals of its life may be late or lost.
LOOKS_PER_RENEWAL = 2

# Leases renewed with one request: about a millisecond of work when the reply comes.
LEASES_PER_REQUEST = 256


class RoundMember(Protocol):
    """A holder, as the rounds see it."""

    def look(self) -> bool:
        """Judge whether the worker should change hands; True: nothing but another assignment can change the answer."""

    def offer(self) -> tuple[Lease, Renewal] | None:
        """What is to be renewed now, None when nothing is."""

    def take_reply(self, lease: Lease, reply: RenewalReply | None) -> None:
        """What the store said of `lease`; None: it refused to answer."""

    def take_failure(self, lease: Lease, reason: str) -> None:
        """Why the store could not be reached."""


class LeaseRounds:
    """Belongs to one event loop; `run` is a task of the process."""

    def __init__(self, leases: Leases, ttl_s: float, assignment: Callable[[], int]) -> None:
        """assignment: the number of the current one; which process should follow a worker changes only with it."""
        self._leases = leases
        self._ttl_s = ttl_s
        self._assignment = assignment
        self._members: dict[RoundMember, None] = {}
        # The assignment of the last look, and the members that are looked at again under it.
        self._seen = -1
        self._unsettled: dict[RoundMember, None] = {}

    def join(self, member: RoundMember) -> None:
        """`member` takes part until it leaves."""
        self._members[member] = self._unsettled[member] = None

    def leave(self, member: RoundMember) -> None:
        del self._members[member]
        self._unsettled.pop(member, None)

    async def run(self) -> None:
        for look in itertools.count(1):
            await asyncio.sleep(self._ttl_s / LOOKS_PER_TTL)
            self._look()
            if look % LOOKS_PER_RENEWAL == 0:
                await self._renew()

    def _look(self) -> None:
        # Not in `run`, where the last member would be held until the next look.
        if (assignment := self._assignment()) != self._seen:
            self._seen, self._unsettled = assignment, dict.fromkeys(self._members)
        for member in list(self._unsettled):
            if member.look():
                del self._unsettled[member]

    async def _renew(self) -> None:
        offers = [(member, *offer) for member in self._members if (offer := member.offer()) is not None]
        parts = (offers[at : at + LEASES_PER_REQUEST] for at in range(0, len(offers), LEASES_PER_REQUEST))
        await asyncio.gather(*map(self._renew_some, parts))

    async def _renew_some(self, offers: list[tuple[RoundMember, Lease, Renewal]]) -> None:
        try:
            replies = await self._leases.renew_all([(lease, renewal) for _, lease, renewal in offers])
        except StoreError as error:
            for member, lease, _ in offers:
                member.take_failure(lease, str(error))
            return
        for (member, lease, _), reply in zip(offers, replies, strict=True):
            member.take_reply(lease, reply)
