# SPDX-License-Identifier: Apache-2.0
"""The history of one process: takes its counts step by step, shares them through Redis, and answers from memory.

Steps follow the clock of Redis, which all routers read; between two readings each process uses its monotonic clock. So
a machine's wrong clock does not move steps, and steps continue while Redis is away. Counts are taken in a task of their
own, which never waits for Redis.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

from kvrouter.contract.history import HistoryReply, SavingsReply
from kvrouter.router.base.common.task_supervisor import TaskSupervisor
from kvrouter.router.base.redis_client.errors import StoreError
from kvrouter.router.base.redis_client.servers import Servers
from kvrouter.router.observe.history.history import FINE_STEP_S, History
from kvrouter.router.observe.history.history_entry import HistoryEntry, ModelStep
from kvrouter.router.observe.history.history_log import HistoryLog
from kvrouter.router.observe.history.history_metrics import HistoryMetrics
from kvrouter.router.observe.history.round_robin_shadow import RoundRobinShadow
from kvrouter.router.observe.history.saved_days import columns_of, day_of, last_days
from kvrouter.router.observe.history.shadow_cache import WorkerCache
from kvrouter.router.observe.history.unwritten import STREAMS, Unwritten
from kvrouter.router.route.load.traffic_sums import MAX_PROMPTS, AnsweredPrompt, TrafficSums

log = logging.getLogger("kvrouter.history")

# All processes write at the end of a step, and each reads the others' entries this long afterwards.
READ_DELAY_S = 1.0
# How often old entries are dropped from Redis.
TRIM_S = 60.0
# How often answered prompts are replayed in the shadow, and for how long without giving other tasks a turn.
FOLLOW_S = 1.0
FOLLOW_TURN_S = 0.002
# Longer prompts (over 262,144 tokens) are not replayed, because one of them would hold the loop for longer than a turn.
MAX_PIECES_FOLLOWED = 2_048


class HistoryKeeper:
    """The history of one process, from `start` on. Without servers it is the history of this process alone."""

    def __init__(
        self,
        traffic: TrafficSums,
        *,
        writer: str,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        caches: Callable[[], Mapping[str, Sequence[WorkerCache]]] = dict,
        metrics: HistoryMetrics | None = None,
        servers: Servers | None = None,
        supervisor: TaskSupervisor | None = None,
    ) -> None:
        """Prepare an empty history.

        Args:
            traffic: The counts of this process.
            writer: A name for this run of the process, which no other run ever has.
            clock: Returns the monotonic time.
            wall_clock: Returns the time of day, which is used until Redis has answered with its own.
            caches: Returns the caches of each model's workers that are not down.
            metrics: The metrics; None only without servers.
            servers: The servers of Redis; None: nothing is shared.
            supervisor: Runs the tasks; None only if `start` is never called.
        """
        self._traffic = traffic
        self._clock = clock
        self._caches = caches
        self._metrics = metrics
        self._supervisor = supervisor
        self._history = History()
        self._shadow = RoundRobinShadow()
        # Answered prompts that were taken and not followed yet. Room for those of a follower that was stopped halfway, too.
        self._prompts: deque[AnsweredPrompt] = deque(maxlen=2 * MAX_PROMPTS)
        self._unwritten = Unwritten(writer)
        # The time of Redis less the monotonic time.
        self._ahead_s = wall_clock() - clock()
        self._ended = asyncio.Event()
        # The end of the last step that was taken.
        self._taken_s = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._log: HistoryLog | None = None
        if metrics is not None:
            metrics.bytes.set_function(lambda: self._history.bytes)
        if servers is not None and metrics is not None:
            self._log = HistoryLog(servers, self._unwritten, self._take_entry, metrics, clock, self._hear_time)

    def now(self) -> float:
        """Return the time on the clock of Redis in seconds since 1970, extrapolated from its last answer."""
        return self._clock() + self._ahead_s

    def start(self) -> None:
        """Begin to keep the history."""
        assert self._supervisor is not None
        runs = {"history_steps": self._keep_steps, "history_shadow": self._keep_shadow}
        if self._log is not None:
            runs["history_store"] = self._keep_store
        self._tasks = [self._supervisor.start(name, run) for name, run in runs.items()]

    async def stop(self) -> None:
        """End the tasks, and write the last counts."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for _ in self._follow_prompts():
            await asyncio.sleep(0)
        self.take(int(self.now() // FINE_STEP_S) * FINE_STEP_S)
        if self._log is not None:
            await self._log.leave()

    # -- counting

    def take(self, start_s: int) -> None:
        """Add the counts since the last call to the step that began at `start_s`."""
        now_s = self.now()
        for model, sums in self._traffic.take().items():
            step = ModelStep.of(self._history.name(model, now_s), sums)
            if not step.is_empty:
                for step_s in STREAMS:
                    step_start_s = start_s // step_s * step_s
                    self._history.add(step_s, step_start_s, step, now_s)
                    self._unwritten.add(step_s, step_start_s, step)
            if any(columns := columns_of(sums)):
                self._unwritten.add_day(day_of(start_s), step.model, columns)
        if self._metrics is not None and self._unwritten.dropped:
            self._metrics.lost["unwritten"].inc(self._unwritten.dropped)
            self._unwritten.dropped = 0

    async def _keep_steps(self) -> None:
        while True:
            await asyncio.sleep(FINE_STEP_S - self.now() % FINE_STEP_S)
            # A timer may be some milliseconds early or late.
            self._taken_s = round(self.now() / FINE_STEP_S) * FINE_STEP_S
            self.take(self._taken_s - FINE_STEP_S)
            self._ended.set()

    # -- the shadow

    async def _keep_shadow(self) -> None:
        while True:
            await asyncio.sleep(FOLLOW_S)
            for _ in self._follow_prompts():
                await asyncio.sleep(0)

    def _follow_prompts(self) -> Iterator[None]:
        """Count the tokens of the answered prompts that round robin would have reused, in turns of FOLLOW_TURN_S.

        For a prompt where that cannot be estimated, the tokens that were really reused count.
        """
        self._prompts += self._traffic.take_prompts()
        if not self._prompts:
            return
        caches = self._caches()
        self._shadow.keep({cache.worker for workers in caches.values() for cache in workers})
        until_s = self._clock() + FOLLOW_TURN_S
        while self._prompts:
            prompt = self._prompts.popleft()
            workers = caches.get(prompt.model) if 0 < len(prompt.names) <= MAX_PIECES_FOLLOWED else None
            reused_tokens = prompt.reused_tokens
            if workers:
                reused_tokens = self._shadow.sent(prompt.model, workers, prompt.names, prompt.num_tokens)
            self._traffic.of(prompt.model).round_robin_tokens += reused_tokens
            if self._clock() >= until_s:
                yield
                until_s = self._clock() + FOLLOW_TURN_S

    # -- Redis

    async def _keep_store(self) -> None:
        assert self._log is not None
        trim_due_s, is_heard, is_read = 0.0, True, False
        while True:
            try:
                if is_read:
                    await self._ended.wait()
                    self._ended.clear()
                await self._log.hear_time()
                if is_read:
                    await self._log.write(self._taken_s)
                    await asyncio.sleep(READ_DELAY_S)
                await self._log.read()
                is_read = True
                if self._clock() >= trim_due_s:
                    await self._log.trim(self.now())
                    trim_due_s = self._clock() + TRIM_S
                if not is_heard:
                    log.info("the history is shared again")
                is_heard = True
            except StoreError as error:
                if is_heard:
                    log.warning("the history is not shared for now", extra={"reason": str(error)})
                is_heard = False
                await asyncio.sleep(READ_DELAY_S)

    def _take_entry(self, step_s: int, entry: HistoryEntry) -> bool:
        """Add an entry of another process that is in range, and return False if its time is ahead of the range."""
        now_s = self.now()
        added = [self._history.add(step_s, entry.start_s, sums, now_s) for sums in entry.models]
        return all(added) or entry.start_s < now_s

    def _hear_time(self, store_s: float, clock_s: float) -> None:
        self._ahead_s = store_s - clock_s

    # -- answers

    def reply(self, range_s: int, model: str | None) -> HistoryReply:
        """Return the traffic of a range that ends now, of one model or of all."""
        return self._history.reply(range_s, model, self.now())

    async def savings(self, days: int, model: str | None) -> SavingsReply:
        """Return the savings of the last days, of one model or of each. Raises StoreError."""
        if self._log is None:
            return SavingsReply([])
        rows = await self._log.savings(last_days(self.now(), days))
        return SavingsReply([row for row in rows if model in (None, row.model)])
