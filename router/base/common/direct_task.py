# SPDX-License-Identifier: Apache-2.0
"""A task that continues inside the callback that it waits for, not one turn of the event loop later.

For coroutines that mostly wait for sockets: between two reads nothing is scheduled and no future is made. It begins at
once, and may await whatever an asyncio task may await. asyncio treats it as a custom task (see "Extending" in its
documentation). It belongs to one loop.
"""

from __future__ import annotations

import asyncio
from asyncio.tasks import _enter_task, _leave_task
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Signal(Generic[T]):
    """A result or an error that one `DirectTask` waits for.

    The task continues inside `set` or `fail`; only the first call counts.
    """

    __slots__ = ("_error", "_result", "_waiter", "is_set")

    def __init__(self) -> None:
        self.is_set = False
        self._result: T | None = None
        self._error: BaseException | None = None
        self._waiter: DirectTask | None = None

    def set(self, result: T) -> None:
        """Set the result and resume the waiting task, unless the signal was set before."""
        if not self.is_set:
            self.is_set, self._result = True, result
            if self._waiter is not None:
                self._waiter.resume()

    def fail(self, error: BaseException) -> None:
        """Set an error, which is raised in the waiting task, and resume that task, unless the signal was set before."""
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
        """Register the task that `set` and `fail` resume."""
        self._waiter = waiter

    def leave(self) -> None:
        """Unregister the waiting task."""
        self._waiter = None


class DirectTask:
    """A coroutine that runs inside the callbacks that resume it. An error that leaves it goes to the loop's handler.

    `ended` is called once, when the coroutine has ended, for whatever reason.
    """

    __slots__ = ("_awaited", "_cancels", "_coroutine", "_ended", "_is_cancelled", "_loop")

    def __init__(
        self, coroutine: Coroutine[Any, Any, None], loop: asyncio.AbstractEventLoop, ended: Callable[[DirectTask], None]
    ) -> None:
        self._coroutine: Coroutine[Any, Any, None] | None = coroutine
        self._loop = loop
        self._ended = ended
        self._awaited: Signal[Any] | asyncio.Future[Any] | None = None
        # Whether CancelledError is still to be raised in the coroutine, and how often it was cancelled, which
        # `asyncio.timeout` needs.
        self._is_cancelled = False
        self._cancels = 0

    def resume(self, _: object = None) -> None:
        """Run the coroutine until it waits again. Call it when the awaited result exists."""
        loop, coroutine = self._loop, self._coroutine
        if coroutine is None:
            return
        self._awaited = None
        if asyncio.current_task(loop) is not None:
            # asyncio allows one current task at a time: let the running task continue, and resume after it.
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
            # The coroutine yielded None, as `asyncio.sleep(0)` does.
            self._loop.call_soon(self.resume)
        else:
            awaited._asyncio_future_blocking = False
            awaited.add_done_callback(self.resume)
        if self._is_cancelled:
            # The task was cancelled while it ran.
            self._interrupt()

    def cancel(self, msg: object = None) -> bool:
        """Raise CancelledError in the coroutine, one turn of the loop later; return False if it has ended already."""
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
            # The caller of `cancel` must run before the cancelled task does; `asyncio.timeout` relies on this order.
            self._loop.call_soon(self.resume)
        elif awaited is not None and awaited.cancel():
            # The awaited future raises the error itself.
            self._is_cancelled = False

    def cancelling(self) -> int:
        """Return how many cancellations are pending, like `asyncio.Task.cancelling`."""
        return self._cancels

    def uncancel(self) -> int:
        """Take back one cancellation and return how many remain, like `asyncio.Task.uncancel`."""
        self._cancels -= 1
        return self._cancels


async def directly(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine that only a `DirectTask` can run, for use in asyncio tasks.

    The coroutine is cancelled with its caller.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    async def run() -> None:
        try:
            result = await work
        except Exception as error:
            if not future.done():
                future.set_exception(error)
        else:
            if not future.done():
                future.set_result(result)

    def end(_: DirectTask) -> None:
        future.cancel()

    task = DirectTask(run(), loop, end)
    task.resume()
    try:
        return await future
    finally:
        task.cancel()
