# SPDX-License-Identifier: Apache-2.0
"""Turns of streams: however many have news, they delay everything else by at most one pass and one turn."""

from __future__ import annotations

import asyncio

import pytest

from kvrouter.router.follow.streams.ingest_turns import PASS_S, IngestTurns

STREAMS = 50
TURNS = 3


class Streams:
    """Streams whose turns take a fixed time, beside another task that wants to run in each pass of the loop."""

    def __init__(self, took_s: float) -> None:
        self.turns = IngestTurns()
        self.took_s = took_s
        self.order: list[int] = []
        self.held_s = self.longest_s = 0.0
        self.passes = 0

    async def follow(self, name: int) -> None:
        for _ in range(TURNS):
            await self.turns.wait()
            self.order.append(name)
            self.held_s += self.took_s
            self.turns.spend(self.took_s)

    async def other(self) -> None:
        while len(self.order) < STREAMS * TURNS:
            await asyncio.sleep(0)
            self.passes += 1
            self.longest_s, self.held_s = max(self.longest_s, self.held_s), 0.0

    async def run(self) -> None:
        async with asyncio.timeout(10.0), asyncio.TaskGroup() as group:
            group.create_task(self.other())
            for name in range(STREAMS):
                group.create_task(self.follow(name))


@pytest.mark.parametrize("took_s", [PASS_S / 8, PASS_S / 2, PASS_S, 3 * PASS_S])
def test_all_streams_together_hold_the_loop_for_one_pass_and_one_turn(took_s: float) -> None:
    streams = Streams(took_s)
    asyncio.run(streams.run())
    assert streams.longest_s <= PASS_S + took_s
    assert sorted(streams.order) == sorted([*range(STREAMS)] * TURNS)


def test_each_stream_gets_one_turn_before_any_gets_two() -> None:
    streams = Streams(PASS_S)
    asyncio.run(streams.run())
    # The first stream had its turn before the others wanted theirs.
    for turn in range(TURNS - 1):
        assert sorted(streams.order[1 + turn * STREAMS :][:STREAMS]) == [*range(STREAMS)]


async def test_a_stream_that_ends_while_it_waits_keeps_nobody_waiting() -> None:
    turns = IngestTurns()
    turns.spend(PASS_S)
    waiting = [asyncio.ensure_future(turns.wait()) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[1].cancel()
    async with asyncio.timeout(10.0):
        await waiting[0]
        # This stream ends when its turn has already come.
        waiting[0].cancel()
        turns.spend(0.0)
        await waiting[2]


async def test_a_turn_that_its_stream_no_longer_wants_goes_to_the_next() -> None:
    turns = IngestTurns()
    turns.spend(PASS_S)
    first, second = (asyncio.ensure_future(turns.wait()) for _ in range(2))
    await asyncio.sleep(0)
    # The turn comes and the stream ends in the same pass.
    asyncio.get_running_loop().call_soon(first.cancel)
    async with asyncio.timeout(10.0):
        await second
