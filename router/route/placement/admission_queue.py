# SPDX-License-Identifier: Apache-2.0
"""The queue of prompts that wait while every worker that may take them is saturated. The async shell.

Belongs to one asyncio loop. `wait_queue.py` decides which prompt is next and which may wait.
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

# How often queued prompts are tried without any signal, because engines' reports and expiry free workers, too.
LINE_LOOK_S = 0.05
TICK_S = 1.0
# The Retry-After if there is no better estimate.
RETRY_AFTER_S = 1.0


class AdmissionQueue:
    """The waiting prompts, and the task that places them."""

    def __init__(
        self,
        reserve: Callable[..., Placement],
        tick: Callable[[], None],
        config: Config,
        metrics: PlacementMetrics,
        clock: Callable[[], float],
        supervisor: TaskSupervisor,
    ) -> None:
        # Places a request, or raises Saturated; with `records_later`, the receiver of the placement records it.
        self._reserve = reserve
        # Does periodic work; called every TICK_S.
        self._tick = tick
        self._deadline_s = config.queue_deadline_s
        self._metrics = metrics
        self._clock = clock
        self._supervisor = supervisor
        self._waiting: WaitQueue[tuple[PlacementRequest, float, asyncio.Future[Placement]]] = WaitQueue(
            config.queue_size
        )
        self._looking = False
        # Set when a prompt joins.
        self._joined = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def apply(self, config: Config) -> None:
        """Apply changed limits of the settings."""
        self._deadline_s = config.queue_deadline_s
        self._waiting.places = config.queue_size
        self.look_soon()

    def start(self) -> None:
        """Start the task that tries waiting prompts and does the periodic work."""
        self._task = self._supervisor.start("queue", self._tend)

    async def stop(self) -> None:
        """Stop the task."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def of(self, model: str) -> tuple[int, int]:
        """Return how many prompts wait for a model, and the sum of their tokens."""
        return self._waiting.of(model)

    async def place(self, request: PlacementRequest) -> Placement:
        """Place a request as soon as there is room.

        All errors of `reserve` but Saturated are raised as soon as they occur.

        Raises:
            QueueFull: Too many prompts wait already.
            Saturated: No worker had room before the deadline.
        """
        began_s, model = self._clock(), request.question.model
        retry_after_s = RETRY_AFTER_S
        if not self._waiting.waits_for(model):
            try:
                return self._placed(self._reserve(request, records_later=True), began_s)
            except Saturated as error:
                retry_after_s = error.retry_after_s or RETRY_AFTER_S
        future: asyncio.Future[Placement] = asyncio.get_running_loop().create_future()
        waiter = Waiter(model, request.question.num_tokens, (request, began_s, future))
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
                # The prompt was placed at the moment when its wait ended.
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
        """Record how long the request waited, and return its placement."""
        placement.queued_s = placement.placed_s - began_s
        self._metrics.queue_seconds(placement.worker.model).observe(placement.queued_s)
        return placement

    def look_soon(self) -> None:
        """Try the waiting prompts after the current events of the loop, because there may be room."""
        if len(self._waiting) and not self._looking:
            self._looking = True
            asyncio.get_running_loop().call_soon(self.look)

    def look(self) -> None:
        """Place the waiting prompts for which there is room."""
        self._looking = False
        self._waiting.serve(self._attempt)

    def _attempt(self, waiting: tuple[PlacementRequest, float, asyncio.Future[Placement]]) -> bool:
        """Try to place one waiting prompt; return False if there is no room for it."""
        request, began_s, future = waiting
        if future.done():
            return True
        try:
            future.set_result(self._placed(self._reserve(request), began_s))
        except Saturated:
            return False
        except RouterError as error:
            future.set_exception(error)
        return True

    async def _tend(self) -> None:
        """Try the waiting prompts every LINE_LOOK_S, and do the periodic work."""
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
