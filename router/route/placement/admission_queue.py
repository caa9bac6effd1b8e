# SPDX-License-Identifier: Apache-2.0
"""Queues prompts while every worker that may take them is saturated, and places them when there is room. The async
shell.

Belongs to one asyncio loop. `load/wait_queue.py` decides who is next and who may wait.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from kvrouter.router.base.common.errors import RouterError, Saturated
from kvrouter.router.base.common.task_supervisor import TaskSupervisor
from kvrouter.router.model.config.settings import Config
from kvrouter.router.route.load.wait_queue import Waiter, WaitQueue
from kvrouter.router.route.placement.placement_metrics import PlacementMetrics
from kvrouter.router.route.placement.placement_request import Placement, PlacementRequest

# How often queued prompts are tried without any signal: engines' reports and expiry free workers, too.
LINE_LOOK_S = 0.05
TICK_S = 1.0
# The Retry-After if there is no better estimate.
RETRY_AFTER_S = 1.0


class AdmissionQueue:
    """The waiting prompts. reserve: places one or raises Saturated; tick: periodic housekeeping."""

    def __init__(
        self,
        reserve: Callable[[PlacementRequest], Placement],
        tick: Callable[[], None],
        config: Config,
        metrics: PlacementMetrics,
        clock: Callable[[], float],
        supervisor: TaskSupervisor,
    ) -> None:
        self._reserve = reserve
        self._tick = tick
        self._deadline_s = config.queue_deadline_s
        self._metrics = metrics
        self._clock = clock
        self._supervisor = supervisor
        self._waiting: WaitQueue[tuple[PlacementRequest, float, asyncio.Future[Placement]]] = WaitQueue(
            config.queue_size
        )
        self._looking = False
        # Somebody waits.
        self._joined = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = self._supervisor.start("queue", self._tend)

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def of(self, model: str) -> tuple[int, int]:
        """How many wait for a model, and the tokens of their prompts."""
        return self._waiting.of(model)

    async def place(self, ask: PlacementRequest) -> Placement:
        """A placement, when there is room. Raises what `reserve` raises, QueueFull, and Saturated when the time is
        over."""
        began_s, model = self._clock(), ask.question.model
        retry_after_s = RETRY_AFTER_S
        if not self._waiting.waits_for(model):
            try:
                return self._placed(self._reserve(ask), began_s)
            except Saturated as error:
                retry_after_s = error.retry_after_s or RETRY_AFTER_S
        future: asyncio.Future[Placement] = asyncio.get_running_loop().create_future()
        waiter = Waiter(model, ask.question.num_tokens, (ask, began_s, future))
        try:
            self._waiting.join(waiter, retry_after_s)
            self._joined.set()
        except RouterError:
            self._metrics.queue_refused(model)["full"].inc()
            raise
        self._metrics.queue_requests(model).set(self._waiting.of(model)[0])
        try:
            async with asyncio.timeout(self._deadline_s):
                return await future
        except BaseException as error:
            if future.done() and not future.cancelled() and future.exception() is None:
                # Served just when its wait ended.
                if isinstance(error, TimeoutError):
                    return future.result()
                future.result().done()
            if not isinstance(error, TimeoutError):
                raise
        finally:
            self._waiting.leave(waiter)
            self._metrics.queue_requests(model).set(self._waiting.of(model)[0])
        self._metrics.queue_refused(model)["deadline"].inc()
        raise Saturated(
            f"every worker that may take this prompt was saturated for {self._deadline_s:g} s: try again, add workers, or raise "
            "queue_deadline_s",
            retry_after_s=retry_after_s,
        )

    def _placed(self, placement: Placement, began_s: float) -> Placement:
        placement.queued_s = placement.placed_s - began_s
        self._metrics.queue_seconds(placement.worker.model).observe(placement.queued_s)
        return placement

    def look_soon(self) -> None:
        """There may be room: serves the queue after the current events."""
        if len(self._waiting) and not self._looking:
            self._looking = True
            asyncio.get_running_loop().call_soon(self.look)

    def look(self) -> None:
        """Serve those for whom there is room."""
        self._looking = False
        self._waiting.serve(self._attempt)

    def _attempt(self, waiting: tuple[PlacementRequest, float, asyncio.Future[Placement]]) -> bool:
        ask, began_s, future = waiting
        if future.done():
            return True
        try:
            future.set_result(self._placed(self._reserve(ask), began_s))
        except Saturated:
            return False
        except RouterError as error:
            future.set_exception(error)
        return True

    async def _tend(self) -> None:
        tick_s = 0.0
        while True:
            if len(self._waiting):
                self.look()
            now = self._clock()
            if now >= tick_s:
                tick_s = now + TICK_S
                self._tick()
            if len(self._waiting):
                await asyncio.sleep(LINE_LOOK_S)
                continue
            self._joined.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(tick_s - now):
                    await self._joined.wait()
