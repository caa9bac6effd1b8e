# SPDX-License-Identifier: Apache-2.0
"""Direct tasks: each resumes within the callback that it waits for, and looks like any task to the code it awaits."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from kvrouter.router.base.common.direct_task import DirectTask, Signal


class Run:
    """Direct task of `work`, with its result."""

    def __init__(self, work: Callable[[], Awaitable[None]]) -> None:
        self.result = ""
        self.ends = 0
        self.task = DirectTask(self._watch(work), asyncio.get_running_loop(), self._ended)

    async def _watch(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
            self.result = "done"
        except asyncio.CancelledError:
            self.result = "cancelled"
            raise

    def _ended(self, task: DirectTask) -> None:
        assert task is self.task
        self.ends += 1


def in_callback(test: Callable[[asyncio.AbstractEventLoop], Awaitable[None] | None]) -> None:
    """Run a test outside any task, as the loop runs a protocol's callback, and then await its result."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        over: asyncio.Future[Any] = loop.create_future()

        def call() -> None:
            try:
                over.set_result(test(loop))
            except BaseException as error:
                over.set_exception(error)

        loop.call_soon(call)
        awaitable = await over
        if awaitable is not None:
            await awaitable

    asyncio.run(main())


def test_it_begins_at_once_and_continues_within_the_signal() -> None:
    def test(loop: asyncio.AbstractEventLoop) -> None:
        signal: Signal[int] = Signal()
        received: list[int] = []

        async def work() -> None:
            received.append(0)
            received.append(await signal)

        run = Run(work)
        run.task.resume()
        assert received == [0]
        signal.set(7)
        signal.set(8)
        assert (received, run.result, run.ends) == ([0, 7], "done", 1)
        assert not run.task.cancel()

    in_callback(test)


def test_a_signal_that_is_set_before_is_not_waited_for_and_an_error_is_raised() -> None:
    def test(loop: asyncio.AbstractEventLoop) -> None:
        early: Signal[None] = Signal()
        early.set(None)
        late: Signal[None] = Signal()

        async def work() -> None:
            await early
            with pytest.raises(ValueError, match="no"):
                await late

        run = Run(work)
        run.task.resume()
        late.fail(ValueError("no"))
        assert (run.result, run.ends) == ("done", 1)

    in_callback(test)


@pytest.mark.parametrize("what", ["signal", "future", "sleep", "task"])
def test_it_is_cancelled_wherever_it_waits(what: str) -> None:
    def test(loop: asyncio.AbstractEventLoop) -> Awaitable[None]:
        async def work() -> None:
            if what == "signal":
                await Signal[None]()
            elif what == "future":
                await loop.create_future()
            elif what == "task":
                await loop.create_task(asyncio.sleep(3_600))
            while True:
                await asyncio.sleep(0)

        run = Run(work)
        run.task.resume()
        assert run.task.cancel()
        assert run.ends == 0

        async def rest() -> None:
            for _ in range(5):
                await asyncio.sleep(0)
            assert (run.result, run.ends) == ("cancelled", 1)

        return rest()

    in_callback(test)


def test_asyncio_takes_it_for_a_task() -> None:
    def test(loop: asyncio.AbstractEventLoop) -> Awaitable[None]:
        async def work() -> None:
            assert asyncio.current_task() is run.task  # type: ignore[comparison-overlap]
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.001):
                    await Signal[None]()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.001):
                    await loop.create_future()
            assert await asyncio.to_thread(lambda: 5) == 5

        run = Run(work)
        run.task.resume()
        assert asyncio.current_task() is None

        async def rest() -> None:
            while not run.ends:
                await asyncio.sleep(0.001)
            assert run.result == "done"

        return rest()

    in_callback(test)


def test_within_another_task_it_waits_for_its_turn() -> None:
    async def main() -> None:
        signal: Signal[None] = Signal()

        async def work() -> None:
            await signal

        run = Run(work)
        run.task.resume()
        signal.set(None)
        assert run.ends == 0
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert (run.result, run.ends) == ("done", 1)

    asyncio.run(main())


def test_an_error_that_leaves_it_is_the_loop_s() -> None:
    def test(loop: asyncio.AbstractEventLoop) -> None:
        errors: list[Any] = []
        loop.set_exception_handler(lambda _, context: errors.append(context["exception"]))
        error = ValueError("a defect")

        async def work() -> None:
            raise error

        run = Run(work)
        run.task.resume()
        assert (errors, run.ends) == ([error], 1)

    in_callback(test)
