# SPDX-License-Identifier: Apache-2.0
"""A replica in real time: steps follow one another in an asyncio task and last as long as the timing model says.

Requests and aborts that arrive during a step take effect before the next one, as in vLLM's engine core. All of this
belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

from kvrouter.simulator.cache.job import Handover, Job
from kvrouter.simulator.cache.peer import PeerWish
from kvrouter.simulator.cache.text import Text
from kvrouter.simulator.engine.replica import Replica, Stuck
from kvrouter.simulator.engine.scheduler import Step
from kvrouter.simulator.engine.timing import Timing
from kvrouter.simulator.engine.transfers import TransferTimes

log = logging.getLogger(__name__)


class EngineStopped(RuntimeError):
    """An end of the engine before the end of the request."""


class Generation:
    """One request and the queue of its sampled tokens."""

    def __init__(self, job: Job) -> None:
        self.job = job
        # At most max_tokens tokens, and None if the engine ends first, so the queue needs no bound.
        self.tokens: asyncio.Queue[int | None] = asyncio.Queue()


class Engine:
    """The driver of one replica. `run` steps it for as long as the engine lives."""

    def __init__(
        self,
        replica: Replica,
        timing: Timing,
        *,
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Create a driver; `clock` is monotonic, in seconds."""
        self.replica = replica
        self.timing = timing
        self.slowdown = 1.0
        self._stalled_until_s = 0.0
        self._transfers = TransferTimes(timing)
        self._clock = clock
        self._sleep = sleep
        self._arrived = asyncio.Event()
        self._submitted: list[Generation] = []
        self._aborted: list[Job] = []
        self._live: dict[int, Generation] = {}
        self.prompt_tokens = 0
        self.generated_tokens = 0

    @property
    def num_running(self) -> int:
        """Requests that the scheduler runs."""
        return len(self.replica.scheduler.running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for the scheduler, including new ones that the next step takes in."""
        return self.replica.scheduler.num_waiting + len(self._submitted)

    def stall(self, seconds: float) -> None:
        """Let no step end for this many seconds, as when a collective hangs. HTTP keeps answering."""
        self._stalled_until_s = self._clock() + seconds

    @contextlib.asynccontextmanager
    async def generate(
        self, text: Text, max_tokens: int, handover: Handover = Handover.NONE, peer: PeerWish | None = None
    ) -> AsyncIterator[tuple[Job, AsyncIterator[int]]]:
        """Submit a request and yield it with its tokens; leaving the block early aborts it. Raises RequestRefused."""
        generation = Generation(self.replica.prepare(text, max_tokens, handover=handover, peer=peer))
        self._submitted.append(generation)
        self._arrived.set()
        try:
            yield generation.job, _tokens(generation)
        finally:
            if not generation.job.finished:
                self._aborted.append(generation.job)
                self._arrived.set()

    async def run(self) -> None:
        """Step until cancelled. Then every request that is left ends with EngineStopped."""
        try:
            while True:
                self._take_in()
                if not self.replica.busy:
                    await self._wait()
                else:
                    await self._step()
        finally:
            for generation in [*self._live.values(), *self._submitted]:
                generation.tokens.put_nowait(None)

    def _take_in(self) -> None:
        for generation in self._submitted:
            self._live[id(generation.job)] = generation
            self.replica.scheduler.add(generation.job)
        self._submitted.clear()
        for job in self._aborted:
            if self._live.pop(id(job), None) is not None:
                self.replica.abort(job)
        self._aborted.clear()

    async def _wait(self, timeout_s: float | None = None) -> None:
        """Wait until a request or an abort arrives, or the timeout has passed."""
        self._arrived.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._arrived.wait(), timeout_s)

    async def _step(self) -> None:
        step = self.replica.begin_step()
        self._transfers.begin(step, self._clock())
        if step.jobs:
            await self._sleep(self.slowdown * self.timing.step_s(step.prefill_tokens, step.decodes))
            while (left_s := self._stalled_until_s - self._clock()) > 0:
                await self._sleep(left_s)
        ended = self._transfers.ended(self._clock())
        self.replica.end_step(step, ended)
        self._hand_out(step)
        next_load_s = self._transfers.next_load_s
        if not step.jobs and not ended and not self._transfers.has_stores:
            if next_load_s is None and not self.replica.scheduler.idle:
                log.warning("stuck", extra={"reason": str(Stuck(self.replica.scheduler.num_waiting))})
            # Nothing to do until a load has ended or a request arrives or is aborted.
            await self._wait(None if next_load_s is None else max(next_load_s - self._clock(), 0))

    def _hand_out(self, step: Step) -> None:
        self.generated_tokens += len(step.sampled)
        for job in step.sampled:
            if job.sampled == 1:
                self.prompt_tokens += job.prompt_tokens
            self._live[id(job)].tokens.put_nowait(job.last_token)
        for job in step.finished:
            del self._live[id(job)]


async def _tokens(generation: Generation) -> AsyncIterator[int]:
    for _ in range(generation.job.max_tokens):
        token = await generation.tokens.get()
        if token is None:
            raise EngineStopped("the engine stopped before this request was done; send it again")
        yield token
