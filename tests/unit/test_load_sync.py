# SPDX-License-Identifier: Apache-2.0
"""The shared load while the store refuses messages: what is kept for the next one, and for how long."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvrouter.router.base.common.errors import StoreDown
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.base.redis_client.errors import StoreError
from kvrouter.router.route.load import load_sync
from kvrouter.router.route.load.load_messages import (
    MAX_COUNT,
    RELEASE,
    LoadMessage,
    ReservationEnd,
    WorkerTotals,
    decode,
    encode,
)
from kvrouter.router.route.load.load_sync import (
    ALL_HEARD_S,
    ALL_READ_S,
    ENDING_ANSWER_S,
    MAX_READ_GAP_S,
    SILENT_S,
    LoadSync,
)
from kvrouter.router.route.load.load_table import LoadTable, Totals
from kvrouter.router.route.load.worker_load import LoadModel

# Long enough for any machine; a passing test does not wait for it.
TIMEOUT_S = 30.0


class Share(LoadSync):
    """A share whose first `failures` messages the store refuses; `sent` has the others."""

    def __init__(self, failures: int, clock: Callable[[], float]) -> None:
        super().__init__(
            LoadModel(LoadTable(), 10_000),
            cast(Any, SimpleNamespace()),
            process="p",
            clock=clock,
            rng=random.Random(1),
            end_here=lambda selection_id, how: selection_id == "ours",
            changed=lambda: None,
        )
        self.failures = failures
        self.sent: list[LoadMessage] = []
        self.tries = asyncio.Condition()

    async def _send(self, message: LoadMessage) -> None:
        async with self.tries:
            self.tries.notify_all()
            if self.failures:
                self.failures -= 1
                raise StoreError("no answer")
            self.sent.append(message)

    def ask(self, *endings: ReservationEnd) -> None:
        self._take(LoadMessage("q", True, endings=list(endings)))

    async def until(self, holds: Callable[[], bool]) -> None:
        """Publish until the condition holds."""
        writing = asyncio.create_task(self._write())
        try:
            async with asyncio.timeout(TIMEOUT_S), self.tries:
                await self.tries.wait_for(holds)
            # The last message is dealt with.
            await asyncio.sleep(0)
        finally:
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)


def answers(share: Share) -> list[tuple[str, int, bool]]:
    return [answer for message in share.sent for answer in message.answers]


async def test_an_answer_that_could_not_be_sent_goes_with_the_next_message() -> None:
    share = Share(2, asyncio.get_running_loop().time)
    share.ask(ReservationEnd(1, "ours", RELEASE), ReservationEnd(2, "theirs", RELEASE))
    await share.until(lambda: len(share.sent) == 1)
    assert answers(share) == [("q", 1, True), ("q", 2, False)]
    share.ask(ReservationEnd(3, "ours", RELEASE))
    await share.until(lambda: len(share.sent) == 2)
    assert answers(share)[2:] == [("q", 3, True)], "each is sent once"


async def test_an_answer_for_which_nobody_waits_is_dropped() -> None:
    now = 100.0
    share = Share(1, lambda: now)
    share.ask(ReservationEnd(1, "ours", RELEASE))
    await share.until(lambda: not share.failures)
    now += ENDING_ANSWER_S
    share.ask(ReservationEnd(2, "ours", RELEASE))
    await share.until(lambda: len(share.sent) == 1)
    assert answers(share) == [("q", 2, True)]


async def test_answers_that_cannot_be_sent_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_sync, "MAX_ENDINGS", 3)
    share = Share(0, lambda: 100.0)
    share.ask(*(ReservationEnd(number, "ours", RELEASE) for number in range(9)))
    await share.until(lambda: len(share.sent) == 1)
    assert [number for _, number, _ in answers(share)] == [0, 1, 2]


def test_loads_of_any_size_are_read_by_others() -> None:
    # As many answers to the longest prompts as clients of /select_and_reserve may name.
    totals = Totals(2**31, 300 * 16_384 * 2**31, 2**70)
    message = LoadMessage("p", True, [WorkerTotals.of(WorkerKey("m", "w0"), totals)])
    read = decode(encode(message))
    assert read is not None and read.totals[0].totals == Totals(2**31, MAX_COUNT, MAX_COUNT)


class Reader:
    """A connection that brings one message of a process."""

    def __init__(self, process: str) -> None:
        self.process = process

    async def run(self, request: bytes, replies: int, timeout_s: float) -> list[Any]:
        return [[(b"loads", [(b"1-0", [b"m", encode(LoadMessage(self.process, True))])])]]


class SteppedTime:
    """A clock that moves only while a share pauses; `during` is called in the middle and at the end."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        self.pauses: list[float] = []
        self.during: Callable[[], Awaitable[None]] | None = None
        monkeypatch.setattr(asyncio, "sleep", self._sleep)

    async def _sleep(self, pause_s: float) -> None:
        self.pauses.append(pause_s)
        for _ in range(2):
            self.now_s += pause_s / 2
            if self.during is not None:
                await self.during()


async def test_a_process_that_reads_nothing_does_not_say_that_nobody_has_a_reservation() -> None:
    now_s = 100.0
    share = Share(0, lambda: now_s)
    with pytest.raises(StoreDown, match="nothing that routers publish"):
        await share.end_elsewhere("s", RELEASE)
    share._reading_since_s = now_s - ALL_HEARD_S
    await share._next(cast(Any, Reader("p")))
    assert not await share.end_elsewhere("s", RELEASE)
    # The store hangs: the reader has no error yet, and the other processes are not heard, of which some are forgotten
    # before SILENT_S, because they were heard some time before the last message.
    now_s += MAX_READ_GAP_S + 0.1
    with pytest.raises(StoreDown, match="nothing that routers publish"):
        await share.end_elsewhere("s", RELEASE)


async def ending_that_hears(owner: str, share: Share, time: SteppedTime) -> asyncio.Task[bool]:
    """Begin to end a reservation elsewhere, hear its owner in the pause, and return once the others are to be queried."""

    async def hear() -> None:
        await share._next(cast(Any, Reader(owner)))

    time.during = hear
    share._news.clear()
    ending = asyncio.create_task(share.end_elsewhere("s", RELEASE))
    async with asyncio.timeout(TIMEOUT_S):
        await share._news.wait()
    assert time.pauses == [ALL_READ_S]
    return ending


async def test_process_that_heard_some_others_asks_those_that_it_hears_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    time = SteppedTime(monkeypatch)
    share = Share(0, lambda: time.now_s)
    share._reading_since_s = time.now_s
    await share._next(cast(Any, Reader("q")))

    ending = await ending_that_hears("r", share, time)
    share._take(LoadMessage("q", False, answers=[("p", 1, False)]))
    share._take(LoadMessage("r", False, answers=[("p", 1, True)]))
    assert await ending, "the denial of one proves nothing about the other"


async def test_connection_that_hangs_soon_after_the_start_leaves_the_owner_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    time = SteppedTime(monkeypatch)
    share = Share(0, lambda: time.now_s)
    share._reading_since_s = time.now_s
    time.now_s += ALL_READ_S - MAX_READ_GAP_S
    # The own message is read, and nothing after it, as the connection hangs before the other processes are heard.
    await share._next(cast(Any, Reader("p")))
    with pytest.raises(StoreDown, match="too little"):
        await share.end_elsewhere("s", RELEASE)


async def test_gap_in_reading_counts_as_an_interruption(monkeypatch: pytest.MonkeyPatch) -> None:
    time = SteppedTime(monkeypatch)
    share = Share(0, lambda: time.now_s)
    share._reading_since_s = time.now_s
    await share._next(cast(Any, Reader("q")))
    time.now_s += SILENT_S + 0.1
    share.tick()
    assert not share.others
    # The first reply after the gap has the own message alone, and the other process publishes all the time.
    await share._next(cast(Any, Reader("p")))

    ending = await ending_that_hears("q", share, time)
    share._take(LoadMessage("q", False, answers=[("p", 1, True)]))
    assert await ending


async def test_interruption_during_the_wait_leaves_the_owner_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    time = SteppedTime(monkeypatch)
    share = Share(0, lambda: time.now_s)
    share._reading_since_s = time.now_s
    await share._next(cast(Any, Reader("q")))

    async def interrupt() -> None:
        share._reading_since_s += 0.5
        await share._next(cast(Any, Reader("q")))

    time.during = interrupt
    with pytest.raises(StoreDown, match="interrupted"):
        await share.end_elsewhere("s", RELEASE)


class SlowShare(Share):
    """A share whose messages get their replies only once `replies` is set."""

    def __init__(self) -> None:
        super().__init__(0, asyncio.get_running_loop().time)
        self.replies = asyncio.Event()
        self.under_way = asyncio.Event()

    async def _send(self, message: LoadMessage) -> None:
        self.under_way.set()
        await self.replies.wait()
        await super()._send(message)

    async def _read(self) -> None:
        await asyncio.Event().wait()


async def test_process_that_stops_says_so_after_the_message_under_way() -> None:
    share = SlowShare()
    share.start()
    async with asyncio.timeout(TIMEOUT_S):
        await share.under_way.wait()
        stopping = asyncio.create_task(share.stop())
        await asyncio.sleep(0)
        share.replies.set()
        await stopping
    assert [message.leaves for message in share.sent] == [False, True]


async def test_process_that_stops_does_not_wait_long_for_a_store_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_sync, "SILENT_S", 0.0)
    share = SlowShare()
    share.start()
    async with asyncio.timeout(TIMEOUT_S):
        await share.under_way.wait()
        share.under_way.clear()
        stopping = asyncio.create_task(share.stop())
        # The first message has no reply, and the last one is sent.
        await share.under_way.wait()
        share.replies.set()
        await stopping
    assert [message.leaves for message in share.sent] == [True]
