# SPDX-License-Identifier: Apache-2.0
"""When holders are looked at: once under each assignment, and again and again while one waits to hand its worker over."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from kvrouter.router.streams.lease_rounds import LOOKS_PER_TTL, LeaseRounds


class Leases:
    def batch(self, offers: list[Any], most: int) -> list[Any]:
        assert not offers
        return []


class Member:
    """Without a lease."""

    def __init__(self) -> None:
        self.looks = 0
        self.settled = True

    def look(self) -> bool:
        self.looks += 1
        return self.settled

    def offer(self) -> None:
        return None


TTL_S = 0.02
WAIT_S = 10.0


def test_members_are_looked_at_once_under_each_assignment() -> None:
    assignment = 0
    rounds = LeaseRounds(cast(Any, Leases()), TTL_S, lambda: assignment)
    still, moving = Member(), Member()

    async def look() -> None:
        """Some more rounds."""
        before = moving.looks
        async with asyncio.timeout(WAIT_S):
            while moving.looks < before + 5:
                await asyncio.sleep(TTL_S / LOOKS_PER_TTL)

    async def main() -> None:
        nonlocal assignment
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

    asyncio.run(main())
