# SPDX-License-Identifier: Apache-2.0
"""Health checks of many engines: they are bounded, and a router that is slow itself judges no engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.follow.streams.engine_poller import POLLS_AT_ONCE, TIMEOUT_S, EnginePoller
from kvrouter.router.follow.streams.worker_state import WorkerState
from kvrouter.router.model.upstream.failure import Failure, Kind
from kvrouter.router.model.upstream.origin import Target
from kvrouter.router.model.workers.registration import Registration
from kvrouter.router.model.workers.stream_state import StreamState
from tests.support.bare_services import bare_services


class Stage:
    """Pollers on a clock that the test moves; each request awaits `poll`, which may raise its failure."""

    def __init__(self, poll: Callable[[], Any]) -> None:
        self.now_s = 100.0
        self._poll = poll
        self.services = bare_services(lambda: self.now_s, http=self)
        self.metrics = self.services.metrics

    async def get(self, target: Target, path: str, most_bytes: int, timeout_s: float) -> tuple[int, bytes]:
        await self._poll()
        return 404, b""

    def poller(self, name: str) -> tuple[EnginePoller, WorkerState]:
        registration = Registration(WorkerKey("m", name), "tcp://h:1", url=f"http://{name}:8000")
        state = WorkerState(registration, self.services)
        return EnginePoller(state, cast(Any, None), self.services), state


@pytest.mark.parametrize("late_s", [0.0, 3.0], ids=["the engine is slow", "the router is slow"])
async def test_a_slow_router_never_marks_an_engine_down(late_s: float) -> None:
    polls = 0

    async def poll() -> None:
        nonlocal polls
        polls += 1
        if polls > 50:
            task.cancel()
        await asyncio.sleep(0)
        poller.ask_now()
        # The engine answers its first /health and /metrics.
        if polls > 2:
            stage.now_s += TIMEOUT_S + late_s
            raise TimeoutError

    stage = Stage(poll)
    poller, state = stage.poller("w")
    task = asyncio.ensure_future(poller.run())
    await asyncio.gather(task, return_exceptions=True)
    assert (state.ingest.state is StreamState.DOWN) == (not late_s)
    assert stage.metrics.polls_unjudged.labels().value == (48 if late_s else 0)


async def test_a_bounded_number_of_engines_is_polled_at_once() -> None:
    running, asked, most = 0, 0, 0
    done = asyncio.Event()

    async def poll() -> None:
        nonlocal running, asked, most
        running, asked = running + 1, asked + 1
        most = max(most, running)
        for _ in range(3):
            await asyncio.sleep(0)
        running -= 1
        if asked == 2 * 5 * POLLS_AT_ONCE:
            done.set()

    stage = Stage(poll)
    tasks = [asyncio.ensure_future(stage.poller(f"w{i}")[0].run()) for i in range(5 * POLLS_AT_ONCE)]
    await done.wait()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert most == POLLS_AT_ONCE


@pytest.mark.parametrize("answered", [2, 0], ids=["it hung", "nobody was there yet"])
async def test_an_engine_that_was_away_when_a_hold_ended_is_seen_to_be_back_under_the_next(answered: int) -> None:
    left = answered

    async def poll() -> None:
        nonlocal left
        left -= 1
        await asyncio.sleep(0)
        poller.ask_now()
        if left < -9:
            task.cancel()
        elif left < 0:
            raise Failure(Kind.REFUSED, "refused") from ConnectionRefusedError()

    stage = Stage(poll)
    poller, state = stage.poller("w")
    states = []
    # The second run has another lease, or follows the other stream.
    for left in (answered, 20):
        task = asyncio.ensure_future(poller.run())
        while not task.done() and left != 5:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        state.on_paused("the hold ended")
        states.append(state.view.state)
    assert states == [StreamState.DOWN, StreamState.CONNECTING], state.view.reason


async def test_a_return_names_the_time_since_the_former_process_answered() -> None:
    """A connection that is older than that may lead to a machine that died without a word."""
    polls = 0
    ages_s: list[float] = []

    async def poll() -> None:
        nonlocal polls
        polls += 1
        stage.now_s += 1.0
        await asyncio.sleep(0)
        poller.ask_now()
        if ages_s or polls > 50:
            task.cancel()
        # The first two polls, each of /health and /metrics, are answered, three are not, and all others are.
        elif 4 < polls <= 7:
            raise Failure(Kind.REFUSED, "refused") from ConnectionRefusedError()

    stage = Stage(poll)
    poller, _ = stage.poller("w")
    poller.expire = lambda reason, age_s: ages_s.append(age_s)
    task = asyncio.ensure_future(poller.run())
    await asyncio.gather(task, return_exceptions=True)
    # Each request takes a second. The former process answered the third one, and the return is known with the ninth.
    assert ages_s == [6.0]
