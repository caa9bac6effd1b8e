# SPDX-License-Identifier: Apache-2.0
"""Rounds of looks at lease holders, and at the store for them.

A holder is looked at once under each assignment, and repeatedly while one waits to hand its worker over. The store is
looked at for some holders in turn, and for all of them where something may have been missed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

from kvrouter.router.base.redis_client.errors import StoreError, StoreUnavailable
from kvrouter.router.follow.streams.lease_rounds import LOOKS_PER_TTL, ROUNDS_PER_CYCLE, LeaseRounds
from kvrouter.router.index.store.commit import LeaseValue
from kvrouter.router.index.store.leases import LOOKS_PER_REQUEST, LeaseLook, Seen


class Leases:
    """Store with one router's lease alone, which records the looks at it."""

    def __init__(self) -> None:
        self.count: int | None = None
        self.away = False
        self.looks: list[list[LeaseLook]] = []

    async def renew(self, token: str, count: int, ttl_s: float) -> int | None:
        if self.away:
            raise StoreUnavailable("away")
        previous, self.count = self.count, count
        return previous

    async def look(self, looks: Sequence[LeaseLook]) -> list[Seen | StoreError | None]:
        self.looks.append(list(looks))
        return [Seen(b"t:1", [])] * len(looks)


class Member:
    def __init__(self, lease: LeaseValue | None = None) -> None:
        self.looks = 0
        self.settled = True
        self.lease = lease
        self.failures = 0
        self.request = cast(Any, self)

    def look(self) -> bool:
        self.looks += 1
        return self.settled

    def offer(self) -> tuple[LeaseValue, LeaseLook] | None:
        return None if self.lease is None else (self.lease, cast(Any, self))

    def take_reply(self, lease: LeaseValue, holder: bytes | None, fields: list[bytes | None]) -> None:
        assert holder == lease.value

    def take_failure(self, lease: LeaseValue, reason: str) -> None:
        assert reason == "away"
        self.failures += 1


TTL_S = 0.02
WAIT_S = 10.0


async def test_members_are_checked_once_under_each_assignment() -> None:
    assignment = 0
    rounds = LeaseRounds(cast(Any, Leases()), "t", TTL_S, lambda: assignment)
    still, moving = Member(), Member()

    async def look() -> None:
        """Wait for some more rounds."""
        looks_before = moving.looks
        async with asyncio.timeout(WAIT_S):
            while moving.looks < looks_before + 5:
                await asyncio.sleep(TTL_S / LOOKS_PER_TTL)

    running = asyncio.ensure_future(rounds.run())
    rounds.join(cast(Any, still))
    rounds.join(cast(Any, moving))
    moving.settled = False
    await look()
    assert still.looks == 1
    assignment += 1
    await look()
    assert still.looks == 2
    late = Member()
    rounds.join(cast(Any, late))
    await look()
    assert (still.looks, late.looks) == (2, 1)
    rounds.leave(cast(Any, late))
    assignment += 1
    await look()
    assert (still.looks, late.looks) == (3, 1)
    running.cancel()


async def test_the_store_is_checked_in_turns_and_wholly_after_a_failure() -> None:
    leases = Leases()
    rounds = LeaseRounds(cast(Any, leases), "t", TTL_S, lambda: 0)
    members = [Member(LeaseValue("t", 1)) for _ in range(2 * LOOKS_PER_REQUEST * ROUNDS_PER_CYCLE + 3)]
    for member in members:
        rounds.join(cast(Any, member))

    async def renew(times: int = 1) -> list[list[Member]]:
        leases.looks.clear()
        for _ in range(times):
            await rounds._renew()
        return cast(Any, list(leases.looks))

    assert not rounds.begun.is_set()
    assert await renew() == [members]
    assert rounds.begun.is_set()
    for _ in range(2):
        cycle = await renew(ROUNDS_PER_CYCLE)
        # The cycle has each member once, and no round has many more members than another.
        assert [member for part in cycle for member in part] == members
        assert max(map(len, cycle)) <= 2 * LOOKS_PER_REQUEST + 1
    for lost in (None, leases.count - 1 if leases.count else 0):
        leases.count = lost
        assert await renew() == [members]
        assert len((await renew())[0]) < len(members)
    leases.away = True
    assert await renew() == [] and {member.failures for member in members} == {1}
    leases.away = False
    assert await renew() == [members]
    # Some members leave, and no turn is empty afterwards.
    for member in members[5:]:
        rounds.leave(cast(Any, member))
    assert await renew(2) == [members[:5]] * 2
