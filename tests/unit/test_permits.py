# SPDX-License-Identifier: Apache-2.0
"""How many replays and snapshots are under way at once, and who is next."""

from __future__ import annotations

import asyncio
from functools import partial
from random import Random

from kvrouter.events.transport.permits import Permit, Permits

LONG_S = 60.0


def test_the_next_permit_is_granted_when_one_ends() -> None:
    async def main() -> None:
        permits = Permits(rng=Random(1), at_once=2, longest_s=LONG_S)
        woken: list[int] = []
        taken = [permits.request(partial(woken.append, number)) for number in range(5)]
        assert [one.granted for one in taken] == [True, True, False, False, False]
        assert (permits.waiting, woken) == (3, [])
        taken[0].end()
        taken[0].end()
        assert len(woken) == 1 and permits.waiting == 2
        assert sum(one.granted for one in taken) == 3
        for one in taken:
            one.end()
        # Whoever ended unserved was passed over: nobody is left, and there is room for two again.
        assert permits.waiting == 0
        again = [permits.request(lambda: None) for _ in range(3)]
        assert [one.granted for one in again] == [True, True, False]

    asyncio.run(main())


def test_waiting_permits_are_granted_at_random() -> None:
    async def main() -> None:
        firsts = set()
        for seed in range(20):
            permits = Permits(rng=Random(seed), at_once=1, longest_s=LONG_S)
            woken: list[int] = []
            running = permits.request(lambda: None)
            for number in range(4):
                permits.request(partial(woken.append, number))
            running.end()
            firsts.add(woken[0])
        assert firsts == {0, 1, 2, 3}

    asyncio.run(main())


def test_a_permit_that_never_ends_expires() -> None:
    async def main() -> None:
        permits = Permits(rng=Random(1), at_once=1, longest_s=0.01)
        permits.request(lambda: None)
        woken = asyncio.Event()
        waiting: Permit = permits.request(woken.set)
        await asyncio.wait_for(woken.wait(), LONG_S)
        assert waiting.granted

    asyncio.run(main())
