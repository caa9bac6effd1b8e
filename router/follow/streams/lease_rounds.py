# SPDX-License-Identifier: Apache-2.0
"""The lease of one router process, renewed with one command however many workers it follows, and looks at whether their
own leases and what the store holds of them are as this process left them: some each round, all where the store or this
process may have missed something. What a look cannot confirm each holder judges by itself."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable
from typing import Protocol

from kvrouter.router.base.redis_client.errors import StoreError
from kvrouter.router.index.store.commit import Lease
from kvrouter.router.index.store.leases import LOOKS_PER_REQUEST, LeaseLook, Leases

# Looks at whether a worker changes hands, per lease TTL; bounds takeover delay beyond the lease.
LOOKS_PER_TTL = 10

# The lease is renewed with every second look: four renewals of its life may be late or lost.
LOOKS_PER_RENEWAL = 2

# Rounds in which the store is looked at for each worker once, where one request does not do for all: bounds how late it
# is noticed that the store lost writes of a worker that writes nothing, and nothing else.
ROUNDS_PER_CYCLE = 8


class RoundMember(Protocol):
    """A holder, as the rounds see it."""

    def look(self) -> bool:
        """Judge whether the worker should change hands; True: nothing but another assignment can change the answer."""

    def offer(self) -> tuple[Lease, LeaseLook] | None:
        """What the store is to be looked at for now, None when for nothing."""

    def take_reply(self, lease: Lease, holder: bytes | None, fields: list[bytes | None]) -> None:
        """Who has the lease in the store, and the head of `meta`."""

    def doubt(self, lease: Lease) -> None:
        """The store may have lost it, or refused to answer."""

    def take_failure(self, lease: Lease, reason: str) -> None:
        """Why the store could not be reached."""


class LeaseRounds:
    """Belongs to one event loop; `run` is a task of the process."""

    def __init__(self, leases: Leases, token: str, ttl_s: float, assignment: Callable[[], int]) -> None:
        """token: names this process. assignment: the number of the current one; which process should follow a worker
        changes only with it."""
        self._leases = leases
        self._token = token
        self._ttl_s = ttl_s
        self._assignment = assignment
        self._members: dict[RoundMember, None] = {}
        # The assignment of the last look, and the members that are looked at again under it.
        self._seen = -1
        self._unsettled: dict[RoundMember, None] = {}
        # Renewals; and whether the store has said nothing since the last that this process had not written.
        self._count = 0
        self._is_known = False
        # The place among the members from which the next round looks.
        self._next = 0
        # Set from the first renewal on: before, what is taken would be free for all.
        self.begun = asyncio.Event()

    def join(self, member: RoundMember) -> None:
        """`member` takes part until it leaves."""
        self._members[member] = self._unsettled[member] = None

    def leave(self, member: RoundMember) -> None:
        del self._members[member]
        self._unsettled.pop(member, None)

    async def run(self) -> None:
        for look in itertools.count():
            if look % LOOKS_PER_RENEWAL == 0:
                await self._renew()
            await asyncio.sleep(self._ttl_s / LOOKS_PER_TTL)
            self._look()

    def _look(self) -> None:
        # Not in `run`, where the last member would be held until the next look.
        if (assignment := self._assignment()) != self._seen:
            self._seen, self._unsettled = assignment, dict.fromkeys(self._members)
        for member in list(self._unsettled):
            if member.look():
                del self._unsettled[member]

    async def _renew(self) -> None:
        try:
            before = await self._leases.renew(self._token, self._count + 1, self._ttl_s)
        except StoreError as error:
            self._is_known = False
            for member in self._members:
                if (offer := member.offer()) is not None:
                    member.take_failure(offer[0], str(error))
            return
        # Another count, or none: the lease had ended, so that others may have taken workers, or the store lost writes.
        is_whole = self._is_known and before == self._count
        self._count += 1
        self.begun.set()
        self._is_known = await self._look_at_store(self._slice() if is_whole else list(self._members))

    def _slice(self) -> list[RoundMember]:
        """The members whose turn it is."""
        members = list(self._members)
        first = self._next if self._next < len(members) else 0
        self._next = first + max(LOOKS_PER_REQUEST, math.ceil(len(members) / ROUNDS_PER_CYCLE))
        return members[first : self._next]

    async def _look_at_store(self, members: list[RoundMember]) -> bool:
        """Whether the store answered for all of them."""
        offers = [(member, *offer) for member in members if (offer := member.offer()) is not None]
        found = await self._leases.look([look for _, _, look in offers])
        answered = True
        for (member, lease, _), seen in zip(offers, found, strict=True):
            if isinstance(seen, StoreError):
                answered = False
                member.take_failure(lease, str(seen))
            elif seen is None:
                member.doubt(lease)
            else:
                member.take_reply(lease, seen.holder, seen.fields)
        return answered
