# SPDX-License-Identifier: Apache-2.0
"""The lease of one router process, and the checks of its workers' leases.

One command renews the process's lease, however many workers it follows. A look checks whether the workers' own leases,
and their data in the store, are as this process left them. Each round looks at some workers, or at all of them if the
store or this process may have missed something. If a look cannot confirm a worker, the worker's `Lease` judges it.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable
from typing import Protocol

from kvrouter.router.base.common import ticks
from kvrouter.router.base.redis_client.errors import StoreError
from kvrouter.router.index.store.commit import LeaseValue
from kvrouter.router.index.store.leases import LOOKS_PER_REQUEST, LeaseLook, Leases

# How often per lease TTL it is checked whether a worker should change hands. This bounds the delay of a takeover beyond
# the lease.
LOOKS_PER_TTL = 10

# The lease is renewed with every second look, so four renewals within its life may be late or lost.
LOOKS_PER_RENEWAL = 2

# The number of rounds in which the store is looked at once for each worker, if one request does not suffice for all. It
# only bounds how late this process notices that the store lost writes of a worker that writes nothing.
ROUNDS_PER_CYCLE = 8


class RoundMember(Protocol):
    """The lease of one worker, as a round sees it: the periodic request for the leases of all workers.

    A protocol, because a `Lease` joins the rounds, so the two modules would import each other.
    """

    def look(self) -> bool:
        """Judge whether the worker should change hands; return True if only another assignment can change the answer."""

    def offer(self) -> tuple[LeaseValue, LeaseLook] | None:
        """Return the member's lease and the request that reads it from the store, or None to skip the member."""

    def take_reply(self, lease: LeaseValue, holder: bytes | None, fields: list[bytes | None]) -> None:
        """Take the store's answer.

        Args:
            lease: The lease that was offered.
            holder: The value of the worker's lease in the store, None if it has none.
            fields: The head of the worker's `meta`.
        """

    def doubt(self, lease: LeaseValue) -> None:
        """Note that the server refused the request, or a request with which it was sent."""

    def take_failure(self, lease: LeaseValue, reason: str) -> None:
        """Note that the store could not be reached, for this reason."""


class LeaseRounds:
    """The rounds in which one process renews its lease and reads the leases of other routers' workers.

    It belongs to one event loop; `run` is a task of the process.
    """

    def __init__(self, leases: Leases, token: str, ttl_s: float, assignment: Callable[[], int]) -> None:
        """Begin without members.

        Args:
            leases: The leases in the store.
            token: Identifies this process.
            ttl_s: How long the process's lease lasts without renewal.
            assignment: Returns the number of the current assignment of workers to processes. The answer to which
                process should follow a worker changes only with this number.
        """
        self._leases = leases
        self._token = token
        self._ttl_s = ttl_s
        self._assignment = assignment
        self._members: dict[RoundMember, None] = {}
        # The assignment of the last look.
        self._seen = -1
        # The members whose answer can still change under this assignment.
        self._unsettled: dict[RoundMember, None] = {}
        # The number of renewals so far.
        self._count = 0
        # Whether the store has answered for all members that the last round looked at.
        self._is_known = False
        # The index of the member with which the next round begins.
        self._next = 0
        # Set by the first renewal. Before it, this process has no lease of its own, so any other process could take
        # over the lease of a worker that this process has taken.
        self.begun = asyncio.Event()

    def join(self, member: RoundMember) -> None:
        """Include `member` in the rounds until it leaves."""
        self._members[member] = self._unsettled[member] = None

    def leave(self, member: RoundMember) -> None:
        """Take `member` out of the rounds."""
        del self._members[member]
        self._unsettled.pop(member, None)

    async def run(self) -> None:
        """Renew the lease and look at the members, until cancelled."""
        for look in itertools.count():
            if look % LOOKS_PER_RENEWAL == 0:
                await self._renew()
            await ticks.sleep(self._ttl_s / LOOKS_PER_TTL)
            self._look()

    def _look(self) -> None:
        # This is not part of `run`, where the loop variable would keep the last member alive until the next look.
        if (assignment := self._assignment()) != self._seen:
            self._seen, self._unsettled = assignment, dict.fromkeys(self._members)
        for member in list(self._unsettled):
            if member.look():
                del self._unsettled[member]

    async def _renew(self) -> None:
        """Renew the process's lease, then look at the members whose turn it is; if data may be lost, look at all."""
        try:
            before = await self._leases.renew(self._token, self._count + 1, self._ttl_s)
        except StoreError as error:
            self._is_known = False
            for member in self._members:
                if (offer := member.offer()) is not None:
                    member.take_failure(offer[0], str(error))
            return
        # With another count, or none, the lease had ended and others may have taken workers, or the store lost writes.
        is_whole = self._is_known and before == self._count
        self._count += 1
        self.begun.set()
        self._is_known = await self._look_at_store(self._slice() if is_whole else list(self._members))

    def _slice(self) -> list[RoundMember]:
        """Return the members whose turn it is."""
        members = list(self._members)
        first = self._next if self._next < len(members) else 0
        self._next = first + max(LOOKS_PER_REQUEST, math.ceil(len(members) / ROUNDS_PER_CYCLE))
        return members[first : self._next]

    async def _look_at_store(self, members: list[RoundMember]) -> bool:
        """Look at the members' leases in the store; return whether it could be reached for all of them."""
        offers = [(member, *offer) for member in members if (offer := member.offer()) is not None]
        replies = await self._leases.look([look for _, _, look in offers])
        answered = True
        for (member, lease, _), seen in zip(offers, replies, strict=True):
            if isinstance(seen, StoreError):
                answered = False
                member.take_failure(lease, str(seen))
            elif seen is None:
                member.doubt(lease)
            else:
                member.take_reply(lease, seen.holder, seen.fields)
        return answered
