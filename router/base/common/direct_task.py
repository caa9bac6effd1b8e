# SPDX-License-Identifier: Apache-2.0
"""A task that goes on in the callback that it waits for, and not a turn of the loop later.

For coroutines that mostly wait for sockets: between two reads nothing is scheduled and no future is made. It begins at
once, and may wait for whatever an asyncio task may. To asyncio it is a task of its own make (see "Extending" in its
documentation). For one loop."""

from __future__ import annotations

import asyncio
from asyncio.tasks import _enter_task, _leave_task
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Signal(Generic[T]):
    """A result, or an error, that one `DirectTask` waits for: it goes on within `set` and `fail`, of which the first
    call counts."""

    __slots__ = ("_error", "_result", "_waiter", "is_set")

    def __init__(self) -> None:
        self.is_set = False
        self._result: T | None = None
        self._error: BaseException | None = None
        self._waiter: DirectTask | None = None

    def set(self, result: T) -> None:
        if not self.is_set:
            self.is_set, self._result = True, result
            if self._waiter is not None:
                self._waiter.resume()

    def fail(self, error: BaseException) -> None:
        if not self.is_set:
            self.is_set, self._error = True, error
            if self._waiter is not None:
                self._waiter.resume()

    def __await__(self) -> Generator[Signal[T], None, T]:
        if not self.is_set:
            yield self
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]

    def wait(self, waiter: DirectTask) -> None:
        self._waiter = waiter

    def leave(self) -> None:
        """Nobody waits any longer."""
        self._waiter = None


class DirectTask:
    """ended: called once, when the coroutine has ended, however it did; an error that leaves it goes to the loop's
    handler."""

    __slots__ = ("_awaited", "_cancels", "_coroutine", "_ended", "_is_cancelled", "_loop")

    def __init__(
        self, coroutine: Coroutine[Any, Any, None], loop: asyncio.AbstractEventLoop, ended: Callable[[DirectTask], None]
    ) -> None:
        self._coroutine: Coroutine[Any, Any, None] | None = coroutine
        self._loop = loop
        self._ended = ended
        self._awaited: Signal[Any] | asyncio.Future[Any] | None = None
        # Whether it was cancelled and does not know it yet; and how often, as `asyncio.timeout` wants to know.
        self._is_cancelled = False
        self._cancels = 0

    def resume(self, _: object = None) -> None:
        """Goes on until it waits again. What it waited for is there."""
        loop, coroutine = self._loop, self._coroutine
        if coroutine is None:
            return
        self._awaited = None
        if asyncio.current_task(loop) is not None:
            # Within another task, which is to go on first.
            loop.call_soon(self.resume)
            return
        _enter_task(loop, self)  # type: ignore[arg-type]
        try:
            if self._is_cancelled:
                self._is_cancelled = False
                awaited = coroutine.throw(asyncio.CancelledError())
            else:
                awaited = coroutine.send(None)
        except (StopIteration, asyncio.CancelledError):
            self._coroutine = None
        except BaseException as error:
            self._coroutine = None
            if not isinstance(error, Exception):
                raise
            loop.call_exception_handler({"message": "unhandled error of a request", "exception": error})
        finally:
            _leave_task(loop, self)  # type: ignore[arg-type]
        if self._coroutine is None:
            self._ended(self)
        else:
            self._await(awaited)

    def _await(self, awaited: Any) -> None:
        self._awaited = awaited
        if type(awaited) is Signal:
            awaited.wait(self)
        elif awaited is None:
            # `asyncio.sleep(0)`.
            self._loop.call_soon(self.resume)
        else:
            awaited._asyncio_future_blocking = False
            awaited.add_done_callback(self.resume)
        if self._is_cancelled:
            # While it ran.
            self._interrupt()

    def cancel(self, msg: object = None) -> bool:
        """Raises CancelledError where it waits, a turn of the loop later. False: it has ended."""
        if self._coroutine is None:
            return False
        self._cancels += 1
        self._is_cancelled = True
        self._interrupt()
        return True

    def _interrupt(self) -> None:
        awaited = self._awaited
        if isinstance(awaited, Signal):
            awaited.leave()
            self._awaited = None
            # Who cancels is not to be overtaken, as `asyncio.timeout` relies on.
            self._loop.call_soon(self.resume)
        elif awaited is not None and awaited.cancel():
            # It raises the error itself.
            self._is_cancelled = False

    def cancelling(self) -> int:
        return self._cancels

    def uncancel(self) -> int:
        self._cancels -= 1
        return self._cancels


async def directly(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that only a `DirectTask` can run, for tasks of asyncio. Cancelled with its caller."""
    loop = asyncio.get_running_loop()
    found: asyncio.Future[T] = loop.create_future()

    async def run() -> None:
        try:
            result = await work
        except Exception as error:
            if not found.done():
                found.set_exception(error)
        else:
            if not found.done():
                found.set_result(result)

    def end(_: DirectTask) -> None:
        found.cancel()

    task = DirectTask(run(), loop, end)
    task.resume()
    try:
        return await found
    finally:
        task.cancel()
