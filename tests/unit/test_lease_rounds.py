# SPDX-License-Identifier: Apache-2.0
"""When holders are looked at: once under each assignment, and again and again while one waits to hand its worker over."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from kvrouter.router.streams.lease_rounds import LOOKS_PER_TTL, LeaseRounds


class Member:
    def __init__(self) -> None:
        self.looks = 0
        self.settled = True

    def look(self) -> bool:
        self.looks += 1
        return self.settled

    def offer(self) -> None:
        return None

    def take_reply(self, lease: Any, reply: Any) -> None:
        raise AssertionError("nothing was offered")

    def take_failure(self, lease: Any, reason: str) -> None:
        raise AssertionError("nothing was offered")


TTL_S = 0.02


def test_members_are_looked_at_once_under_each_assignment() -> None:
    assignment = 0
    rounds = LeaseRounds(cast(Any, None), TTL_S, lambda: assignment)
    still, moving = Member(), Member()

    async def look() -> None:
        """Some more rounds."""
        await asyncio.sleep(TTL_S / LOOKS_PER_TTL)
        before = moving.looks
        while moving.looks < before + 5:
            await asyncio.sleep(0)

    async def main() -> None:
        nonlocal assignment
        running = asyncio.ensure_future(rounds.run())
        rounds.join(still)
        rounds.join(moving)
        moving.settled = False
        await look()
        assert still.looks == 1
        assignment += 1
        await look()
        assert still.looks == 2
        late = Member()
        rounds.join(late)
        await look()
        assert (still.looks, late.looks) == (2, 1)
        rounds.leave(late)
        assignment += 1
        await look()
        assert (still.looks, late.looks) == (3, 1)
        running.cancel()

    asyncio.run(main())
