# SPDX-License-Identifier: Apache-2.0
"""The leases of one router process, renewed together: a round is one request to each server, however many workers are
followed. What a round cannot confirm each holder judges by itself."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any, Protocol

from kvrouter.router.index.commit import Lease
from kvrouter.router.index.leases import Leases, Renewal, RenewalBatch
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

    def take_reply(self, lease: Lease, holder: bytes | None, fields: list[bytes | None]) -> bool:
        """Who has the lease in the store, and the head of `meta`; whether that confirms `lease`."""

    def doubt(self, lease: Lease) -> None:
        """The store refused to answer."""

    def take_failure(self, lease: Lease, reason: str) -> None:
        """Why the store could not be reached."""


class _Part:
    """What is renewed with one request. confirmed: the replies of a round in which each of them confirmed its lease,
    when `writes` had been made; as long as neither changes, so do they again."""

    def __init__(self, members: list[tuple[RoundMember, Lease]], batch: RenewalBatch) -> None:
        self.members = members
        self.batch = batch
        self.confirmed: list[Any] | None = None
        self.writes = 0


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
        # What is renewed, until an offer changes; and how often a member wrote to the store.
        self._parts: list[_Part] | None = None
        self._writes = 0

    def join(self, member: RoundMember) -> None:
        """`member` takes part until it leaves."""
        self._members[member] = self._unsettled[member] = None
        self.offers_changed()

    def leave(self, member: RoundMember) -> None:
        del self._members[member]
        self._unsettled.pop(member, None)
        self.offers_changed()

    def offers_changed(self) -> None:
        """Some member has another lease, or none."""
        self._parts = None

    def written(self) -> None:
        """What some member knows of the store changed."""
        self._writes += 1

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
        if self._parts is None:
            offers = [(member, *offer) for member in self._members if (offer := member.offer()) is not None]
            batches = self._leases.batch([offer[1:] for offer in offers], LEASES_PER_REQUEST)
            self._parts = [_Part([offers[at][:2] for at in ats], batch) for ats, batch in batches]
        await asyncio.gather(*map(self._renew_part, self._parts))

    async def _renew_part(self, part: _Part) -> None:
        try:
            replies = await self._leases.renew_all(part.batch)
        except StoreError as error:
            for member, lease in part.members:
                member.take_failure(lease, str(error))
            return
        if replies is None:
            # Another server may have some of them now.
            self._parts = None
            for member, lease in part.members:
                member.doubt(lease)
            return
        if replies == part.confirmed and part.writes == self._writes:
            return
        part.writes, is_confirmed = self._writes, True
        for (member, lease), holder, fields in zip(part.members, replies[::2], replies[1::2], strict=True):
            is_confirmed &= member.take_reply(lease, holder, fields)
        part.confirmed = replies if is_confirmed else None
