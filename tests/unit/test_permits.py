# SPDX-License-Identifier: Apache-2.0
"""How many replays and snapshots are under way at once, and who is next."""

from __future__ import annotations

import asyncio
from functools import partial
from random import Random

from kvrouter.events.transport.permits import Permit, Permits

LONG_S = 60.0


def test_so_many_at_once_and_the_next_when_one_ends() -> None:
    async def main() -> None:
        permits = Permits(rng=Random(1), at_once=2, longest_s=LONG_S)
        woken: list[int] = []
        taken = [permits.ask(partial(woken.append, number)) for number in range(5)]
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
        again = [permits.ask(lambda: None) for _ in range(3)]
        assert [one.granted for one in again] == [True, True, False]

    asyncio.run(main())


def test_who_waits_longest_is_not_always_next() -> None:
    async def main() -> None:
        firsts = set()
        for seed in range(20):
            permits = Permits(rng=Random(seed), at_once=1, longest_s=LONG_S)
            woken: list[int] = []
            running = permits.ask(lambda: None)
            for number in range(4):
                permits.ask(partial(woken.append, number))
            running.end()
            firsts.add(woken[0])
        assert firsts == {0, 1, 2, 3}

    asyncio.run(main())


def test_one_that_is_never_done_keeps_nobody_waiting_for_ever() -> None:
    async def main() -> None:
        permits = Permits(rng=Random(1), at_once=1, longest_s=0.01)
        permits.ask(lambda: None)
        woken = asyncio.Event()
        waiting: Permit = permits.ask(woken.set)
        await asyncio.wait_for(woken.wait(), LONG_S)
        assert waiting.granted

    asyncio.run(main())
