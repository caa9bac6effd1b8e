# SPDX-License-Identifier: Apache-2.0
"""Permits for replays and snapshots: how many are under way at once, and which request is next."""

from __future__ import annotations

import asyncio
from functools import partial
from random import Random

from kvrouter.events.transport.permits import Permit, Permits

LONG_S = 60.0


async def test_the_next_permit_is_granted_when_one_ends() -> None:
    permits = Permits(rng=Random(1), at_once=2, longest_s=LONG_S)
    woken: list[int] = []
    permitted = [permits.request(partial(woken.append, number)) for number in range(5)]
    assert [permit.granted for permit in permitted] == [True, True, False, False, False]
    assert (permits.waiting, woken) == (3, [])
    permitted[0].end()
    permitted[0].end()
    assert len(woken) == 1 and permits.waiting == 2
    assert sum(permit.granted for permit in permitted) == 3
    for permit in permitted:
        permit.end()
    # The requests that ended before they were granted were passed over: none is left, and two more fit again.
    assert permits.waiting == 0
    again = [permits.request(lambda: None) for _ in range(3)]
    assert [permit.granted for permit in again] == [True, True, False]


async def test_waiting_permits_are_granted_at_random() -> None:
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


async def test_a_permit_that_never_ends_expires() -> None:
    permits = Permits(rng=Random(1), at_once=1, longest_s=0.01)
    permits.request(lambda: None)
    woken = asyncio.Event()
    waiting: Permit = permits.request(woken.set)
    await asyncio.wait_for(woken.wait(), LONG_S)
    assert waiting.granted
