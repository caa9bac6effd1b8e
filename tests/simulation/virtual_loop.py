# SPDX-License-Identifier: Apache-2.0
"""An asyncio event loop without sockets, threads or waiting: its clock jumps, and its order comes from a seed.

The loop runs several simulated processes. Each has a queue of ready callbacks, and the context of a callback says to
which process it belongs, so a process can be paused (its callbacks wait while time goes on) or killed (its callbacks
never run, and nothing cleans up). A step runs one callback of a process that the generator picks. Within a process,
callbacks run in asyncio's order; with `shuffles`, any ready one may be next.

Whatever is not product code (network, store, engines) runs in system events, which belong to no process.
"""

from __future__ import annotations

import asyncio
import contextvars
import enum
import heapq
import random
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from tests.simulation.tcp import connect_tcp

# A step takes this much virtual time, so that a busy process is late for its timers.
STEP_S = 10e-6
# A blocking call in an executor thread takes up to this long.
THREAD_S = 0.02


class Stuck(Exception):
    """A simulation that took more steps than allowed."""


class Standing(enum.Enum):
    """The standing of a process: its callbacks run, wait, or are dropped."""

    RUNS = "runs"
    PAUSED = "paused"
    DEAD = "dead"


class Process:
    """A simulated operating-system process: the callbacks of one asyncio program."""

    def __init__(self, name: str, loop: VirtualLoop) -> None:
        self.name = name
        self.standing = Standing.RUNS
        self.ready: deque[asyncio.Handle] = deque()
        self.steps = 0
        # Everything that a killed process still had: it must not be freed, because freeing runs `finally` blocks.
        self.remains: list[object] = []
        self._loop = loop
        self._context = contextvars.copy_context()
        self._context.run(PROCESS.set, self)

    def start(self, coroutine: Coroutine[Any, Any, Any], name: str = "main") -> asyncio.Task[Any]:
        """Run a coroutine as a task of this process."""
        task: asyncio.Task[Any] = self._context.copy().run(self._loop.create_task, coroutine, name=name)
        return task

    def run(self, call: Callable[..., Any], *args: object) -> Any:
        """Call a function at once, as if a callback of this process did."""
        return self._context.copy().run(call, *args)

    def call_soon(self, callback: Callable[..., object], *args: object) -> None:
        """Have a callback run as one of this process."""
        if self.standing is not Standing.DEAD:
            self.ready.append(_Timer(0.0, callback, args, self._loop, self._context))

    def kill(self) -> None:
        """End the process without any clean-up."""
        self.standing = Standing.DEAD
        self._loop.processes.remove(self)
        self._loop.dead.append(self)
        self.remains += self.ready
        self.remains += self._loop.tasks_of(self)
        self.ready.clear()


PROCESS: contextvars.ContextVar[Process | None] = contextvars.ContextVar("PROCESS", default=None)


class NumberedTask(asyncio.Task[Any]):
    """A task whose hash is a number, so that sets of tasks have the same order in every run."""

    def __new__(cls, *args: Any, loop: VirtualLoop, **kwargs: Any) -> NumberedTask:
        task = super().__new__(cls)
        task.number = loop.next_number()
        task.process = PROCESS.get()
        return task

    number: int
    process: Process | None

    def __hash__(self) -> int:
        return self.number


class _Timer(asyncio.TimerHandle):
    """A callback, at a time or as soon as possible, without what asyncio does for its debug mode."""

    __slots__ = ()

    def __init__(
        self,
        when: float,
        callback: Callable[..., object],
        args: Any,
        loop: VirtualLoop,
        context: contextvars.Context | None,
    ) -> None:
        self._context = contextvars.copy_context() if context is None else context
        self._loop, self._callback, self._args = loop, callback, args
        self._cancelled, self._repr, self._source_traceback = False, None, None
        self._when, self._scheduled = when, False

    def cancel(self) -> None:
        """Do nothing when the time comes."""
        if not self._cancelled:
            self._cancelled = True
            # As asyncio does, so that a cancelled callback keeps nothing alive.
            self._callback = self._args = None  # type: ignore[assignment]

    def __lt__(self, other: object) -> bool:
        raise TypeError("timers are ordered by their numbers")


class VirtualLoop(asyncio.BaseEventLoop):
    """The event loop of all simulated processes."""

    def __init__(self, rng: random.Random, *, shuffles: bool = False) -> None:
        super().__init__()
        self.rng = rng
        self.shuffles = shuffles
        self.processes: list[Process] = []
        # Killed processes, which are kept with all that they had.
        self.dead: list[Process] = []
        self.steps = 0
        # The process whose callback ran last.
        self.last: Process | None = None
        # Connects to simulated servers; set by the world.
        self.network: Any = None
        # Errors that asyncio would log: a callback failed, or a task's error was never retrieved.
        self.errors: list[dict[str, Any]] = []
        self._now_s = 1_000.0
        self._numbers = 0
        # (time, number, process or None, handle or function)
        self._timers: list[tuple[float, int, Process | None, Any]] = []
        self._readers: dict[int, asyncio.Handle] = {}
        self.set_exception_handler(lambda _, context: self.errors.append(context))

    # -- processes

    def add_process(self, name: str) -> Process:
        """Return a new process."""
        process = Process(name, self)
        self.processes.append(process)
        return process

    def tasks_of(self, process: Process) -> list[NumberedTask]:
        """Return the tasks of a process that have not ended."""
        tasks = asyncio.all_tasks(self)
        return [task for task in tasks if isinstance(task, NumberedTask) and task.process is process]

    def next_number(self) -> int:
        """Return the next of the numbers that order equal things."""
        self._numbers += 1
        return self._numbers

    def __enter__(self) -> VirtualLoop:
        self._thread_id = threading.get_ident()
        asyncio._set_running_loop(self)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio._set_running_loop(None)
        self._thread_id = None  # type: ignore[assignment]

    # -- time

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self._now_s

    def at(self, when_s: float, call: Callable[[], object]) -> None:
        """Have a system event happen at this time."""
        heapq.heappush(self._timers, (when_s, self.next_number(), None, call))

    def after(self, delay_s: float, call: Callable[[], object]) -> None:
        """Have a system event happen after this time."""
        self.at(self._now_s + delay_s, call)

    def run_for(self, seconds: float, *, after_step: Callable[[], None], most_steps: int) -> None:
        """Run callbacks for some virtual time, after the system events that are due. Raises Stuck after too many steps."""
        end_s = self._now_s + seconds
        # There is a timer until the end.
        self.at(end_s, lambda: None)
        timers, shuffles, randrange = self._timers, self.shuffles, self.rng.randrange
        last = self.steps + most_steps
        while True:
            if timers[0][0] <= self._now_s:
                self._fire()
            if self._now_s >= end_s:
                return
            able = [process for process in self.processes if process.ready and process.standing is Standing.RUNS]
            if not able:
                self._now_s = max(self._now_s, timers[0][0])
                continue
            process = able[0] if len(able) == 1 else able[randrange(len(able))]
            ready = process.ready
            if shuffles and len(ready) > 1:
                index = randrange(len(ready))
                handle = ready[index]
                del ready[index]
            else:
                handle = ready.popleft()
            if handle._cancelled:
                continue
            self.last = process
            self.steps += 1
            process.steps += 1
            self._now_s += STEP_S
            handle._run()
            after_step()
            if self.steps > last:
                raise Stuck(f"{most_steps} steps in {seconds:g} s of virtual time")

    def _fire(self) -> None:
        """Run the system events that are due, and move the timers that are due to their processes."""
        timers, pop = self._timers, heapq.heappop
        while timers and timers[0][0] <= self._now_s:
            _, _, process, what = pop(timers)
            if process is None:
                what()
            elif process.standing is Standing.DEAD:
                process.remains.append(what)
            elif not what._cancelled:
                what._scheduled = False
                process.ready.append(what)

    # -- asyncio's interface

    def call_soon(  # type: ignore[override]
        self, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        handle = _Timer(0.0, callback, args, self, context)
        process = handle._context.get(PROCESS)  # type: ignore[attr-defined]
        if process is None:
            raise RuntimeError(f"{callback} belongs to no process")
        (process.ready if process.standing is not Standing.DEAD else process.remains).append(handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        timer = _Timer(when, callback, args, self, context)
        process = timer._context.get(PROCESS)  # type: ignore[attr-defined]
        if process is None:
            raise RuntimeError(f"{callback} belongs to no process")
        timer._scheduled = True  # type: ignore[attr-defined]
        heapq.heappush(self._timers, (when, self.next_number(), process, timer))
        return timer

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now_s + delay, callback, *args, context=context)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Do nothing: a cancelled timer is skipped when it is due."""

    def create_task(self, coro: Any, *, name: Any = None, context: contextvars.Context | None = None) -> Any:
        return NumberedTask(coro, loop=self, name=name, context=context)

    def run_in_executor(  # type: ignore[override]
        self, executor: object, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        future = self.create_future()
        context = contextvars.copy_context()

        def work() -> None:
            if future.done():
                return
            try:
                result = func(*args)
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        self.call_at(self._now_s + self.rng.uniform(0.0, THREAD_S), work, context=context)
        return future

    def add_reader(self, fd: Any, callback: Any, *args: Any) -> None:  # type: ignore[override]
        self._readers[fd] = asyncio.Handle(callback, args, self, None)

    def remove_reader(self, fd: Any) -> bool:
        return self._readers.pop(fd, None) is not None

    def notify(self, fd: int, is_wanted: Callable[[], bool]) -> None:
        """Have the reader of a simulated descriptor called, unless the notice is taken meanwhile."""
        if (reader := self._readers.get(fd)) is None:
            return
        process = reader._context.get(PROCESS)  # type: ignore[attr-defined]

        def call() -> None:
            if self._readers.get(fd) is reader and is_wanted():
                reader._callback(*reader._args)  # type: ignore[attr-defined]

        process.call_soon(call)

    async def create_connection(self, protocol_factory: Any, host: Any = None, port: Any = None, **_: Any) -> Any:
        return await connect_tcp(self, protocol_factory, host, port)

    async def sock_connect(self, sock: object, address: Any) -> None:
        transport, _ = await connect_tcp(self, asyncio.Protocol, *address)
        transport.abort()
