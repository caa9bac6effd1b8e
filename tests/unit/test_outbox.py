# SPDX-License-Identifier: Apache-2.0
"""Items between sockets and a consumer: the consumer does not count as caught up while an item waits."""

from __future__ import annotations

import asyncio

from kvrouter.events.transport.outbox import Outbox
from kvrouter.events.transport.progress import CaughtUp, FellBehind


def outbox() -> Outbox[object]:
    return Outbox(10, 1_000, size_bytes=lambda item: 1, on_room=lambda: None)


async def test_caught_up_is_handed_out_alone_when_nothing_else_waits() -> None:
    box = outbox()
    box.put([FellBehind(), 1, 2, CaughtUp()])
    assert await box.take(2) == [FellBehind(), 1]
    # The consumer takes its time, and more items come meanwhile.
    box.put([3])
    assert await box.take(9) == [2, 3]
    assert await box.take(9) == [CaughtUp()]
    box.put([4])
    assert await box.take(9) == [4]


async def test_caught_up_wakes_a_waiting_consumer() -> None:
    box = outbox()
    taking = asyncio.ensure_future(box.take(9))
    await asyncio.sleep(0)
    box.put([CaughtUp()])
    assert await taking == [CaughtUp()]


async def test_falling_behind_again_revokes_caught_up() -> None:
    box = outbox()
    box.put([1, CaughtUp(), FellBehind(missing=True), 2])
    assert await box.take(9) == [1, FellBehind(missing=True), 2]
    taking = asyncio.ensure_future(box.take(9))
    await asyncio.sleep(0)
    assert not taking.done()
    box.put([CaughtUp()])
    assert await taking == [CaughtUp()]
