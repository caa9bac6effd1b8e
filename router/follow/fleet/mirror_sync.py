# SPDX-License-Identifier: Apache-2.0
"""The mirror and its two kinds of writers.

The follower of a worker that this process follows writes the worker's part of the mirror (its lead). The parts of all
other workers are written from their logs in Redis.

Invariant: each worker has exactly one writer. `lead` ends the reading of the worker's log before its follower may write.
`follow_log` ends the lead, loads the worker from Redis, and continues with its log. A write by any other writer is a
defect, and is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvrouter.router.base.common import ticks
from kvrouter.router.base.common.event_wait import set_within
from kvrouter.router.base.common.ids import Place, WorkerKey
from kvrouter.router.base.common.task_supervisor import TaskSupervisor
from kvrouter.router.base.redis_client.errors import StoredValueError, StoreError
from kvrouter.router.follow.fleet.fleet_metrics import FleetMetrics
from kvrouter.router.follow.fleet.store_contact import StoreContact
from kvrouter.router.follow.fleet.worker_registry import WorkerRegistry
from kvrouter.router.follow.streams.follower import Follower
from kvrouter.router.index.ingest.net_changes import ResidencyDelta
from kvrouter.router.index.matching.mirror import Mirror, MirrorFull
from kvrouter.router.index.store.commit import WorkerImage
from kvrouter.router.index.store.log_entry import LogEntry
from kvrouter.router.index.store.log_follower import FollowerItem, LogFollower, Reload, StoreBack, StoreLost
from kvrouter.router.index.store.store import IndexStore

log = logging.getLogger("kvrouter.mirror")

# How many log entries, and how many transitions (a block became resident or stopped being so), are applied before the
# event loop gets to answer requests again. This takes about a millisecond at 2,048 transitions an entry, and some
# milliseconds for the largest possible entry (MAX_PENDING_BLOCKS of a worker).
ENTRIES_PER_TURN = 8
BLOCKS_PER_TURN = 32_768

# The pause between looks for ended epochs, whose memory must be freed.
SWEEP_INTERVAL_S = 0.25
# The pause before a worker that could not be loaded is tried again, doubled from the first to the last.
RELOAD_FIRST_S = 0.5
RELOAD_LAST_S = 4.0


class _Reloading(msgspec.Struct):
    """A worker that must be loaded from Redis."""

    # When to try next.
    due_s: float
    # Why the worker's stored values could not be read at the last try.
    reason: str = ""
    # The pause after the next failure.
    pause_s: float = RELOAD_FIRST_S

    def put_off(self, now: float) -> None:
        """Schedule the next try after a failure."""
        self.due_s = now + self.pause_s
        self.pause_s = min(2 * self.pause_s, RELOAD_LAST_S)


class MirrorSync:
    """The component that writes the mirror; the registry's followers use it as their `MirrorSource`.

    Invariant: each worker's part of the mirror has exactly one writer, as the module's docstring explains.
    """

    def __init__(
        self,
        registry: WorkerRegistry,
        *,
        store: IndexStore,
        contact: StoreContact,
        metrics: FleetMetrics,
        clock: Callable[[], float],
        rng: random.Random,
        supervisor: TaskSupervisor,
        budget_bytes: int,
    ) -> None:
        """Begin with an empty mirror.

        Args:
            registry: The workers, and their followers.
            store: Reads workers from Redis.
            contact: Learns which logs cannot be read.
            metrics: Counts refused blocks and errors.
            clock: Returns the time in seconds, monotonic.
            rng: Varies the pauses before reconnections.
            supervisor: Runs the tasks that read the logs.
            budget_bytes: The most memory that the mirror may take.
        """
        self._followers = registry.followers
        self._store = store
        self._contact = contact
        self._metrics = metrics
        self._clock = clock
        self._budget_bytes = budget_bytes
        self.mirror = Mirror(budget_bytes)
        self._follower = LogFollower(store.servers, rng=rng, supervisor=supervisor)
        # Workers whose log cannot be continued from the position read so far, until they are loaded again.
        self._reloads: dict[WorkerKey, _Reloading] = {}
        self._reload_wanted = asyncio.Event()
        # Whether `follow` applies the entries of the logs.
        self._follows = False
        # Workers whose follower in this process writes the mirror.
        self._led: set[WorkerKey] = set()
        # Workers whose remaining items in the present batch must be skipped, because they come from an old log position.
        self._moved: set[WorkerKey] = set()

    async def close(self) -> None:
        """Stop reading the logs."""
        await self._follower.close()

    async def forget(self, worker: WorkerKey) -> None:
        """Remove a worker that is gone."""
        self._reloads.pop(worker, None)
        await self._leave_log(worker)
        self._led.discard(worker)
        self.mirror.forget(worker)

    async def lead(self, worker: WorkerKey) -> None:
        """Stop reading the worker's log, so that the caller may write the worker's part of the mirror."""
        self._led.add(worker)
        self._reloads.pop(worker, None)
        await self._leave_log(worker)
        if (follower := self._followers.get(worker)) is not None:
            follower.state.on_image_problem("")

    async def _leave_log(self, worker: WorkerKey) -> None:
        self._moved.add(worker)
        await self._follower.remove(worker)
        self._regain_store([worker])

    async def follow_log(self, worker: WorkerKey) -> None:
        """End the lead, load the worker from the store, and follow its log from there. Raises StoreError."""
        try:
            image = await self._store.load(worker)
            problem = "" if worker not in self._followers else self._followers[worker].state.unreadable(image)
        except StoredValueError as error:
            problem = str(error)
        if worker in self._followers:
            self._led.discard(worker)
            if problem:
                self.take_unreadable(worker, problem)
            else:
                self.take_image(image)

    def begin_epoch(self, worker: WorkerKey, epoch: str) -> None:
        """Void a led worker's blocks in the mirror, and begin an empty epoch."""
        self._check_lead(worker)
        self.mirror.begin_epoch(worker, epoch)

    def load(self, worker: WorkerKey, epoch: str, places: Mapping[Place, NDArray[np.uint64]]) -> None:
        """Begin an epoch of a led worker with the blocks that it holds already."""
        self.begin_epoch(worker, epoch)
        self._load(worker, places)

    def rename_epoch(self, worker: WorkerKey, epoch: str) -> None:
        """Give the epoch of a led worker another name, and keep its blocks."""
        self._check_lead(worker)
        self.mirror.rename_epoch(worker, epoch)

    def change(self, worker: WorkerKey, changes: Sequence[ResidencyDelta]) -> None:
        """Apply changes of a led worker's residency."""
        self._check_lead(worker)
        self._change(worker, changes)

    def _check_lead(self, worker: WorkerKey) -> None:
        if worker not in self._led:
            raise RuntimeError(
                f"{worker} is not led here, so only its log in the store may change its part of the mirror"
            )

    def take_image(self, image: WorkerImage) -> None:
        """Replace the worker's blocks in the mirror with those of its stored image, and follow its log from there."""
        worker = image.worker
        if worker in self._led:
            raise RuntimeError(f"{worker} is led here, so only its follower may change its part of the mirror")
        self._moved.add(worker)
        self._reloads.pop(worker, None)
        self.mirror.begin_epoch(worker, image.epoch or "")
        self._load(worker, image.places)
        self._follower.add_image(image)
        self._followers[worker].state.on_image(image)
        self._followers[worker].state.on_image_problem("")

    def take_unreadable(self, worker: WorkerKey, problem: str) -> None:
        """Begin a new worker empty, because its values in Redis cannot be read, and retry the loading."""
        self.mirror.begin_epoch(worker, "")
        self._want_reload(worker, problem)

    def _load(self, worker: WorkerKey, places: Mapping[Place, NDArray[np.uint64]]) -> None:
        for place, hashes in places.items():
            self._add(worker, place, hashes, is_news=False)

    def _add(self, worker: WorkerKey, place: Place, hashes: NDArray[np.uint64], *, is_news: bool = True) -> None:
        """Add blocks to the mirror; count and log the blocks for which it has no room."""
        try:
            self.mirror.add(worker, place, hashes, is_news=is_news)
        except MirrorFull as error:
            self._metrics.mirror_refused_blocks(worker).inc(len(hashes))
            if self.refused(worker) == len(hashes):
                log.warning("mirror full", extra={"worker": worker, "reason": str(error)})

    def _change(self, worker: WorkerKey, changes: Sequence[ResidencyDelta]) -> None:
        for change in changes:
            self.mirror.discard(worker, change.place, change.removed)
            self._add(worker, change.place, change.added)

    def _reads_log(self, worker: WorkerKey) -> bool:
        return worker in self._followers and worker not in self._led

    def refused(self, worker: WorkerKey) -> int:
        """Return how many blocks of the worker's epoch found no room in the mirror."""
        slots = self.mirror.worker(worker)
        return 0 if slots is None else slots.refused_blocks

    def lost_credit(self, worker: WorkerKey) -> str:
        """Return why blocks of the worker earn no credit for lack of memory, or "" if none do."""
        refused = self.refused(worker)
        if not refused:
            return ""
        return (
            f"{refused} of its blocks found no room in memory and earn no credit until it begins again: raise mirror_budget_bytes "
            f"({self._budget_bytes}), or let this router follow fewer workers"
        )

    async def follow(self) -> None:
        """Apply the entries of the logs to the mirror, until cancelled."""
        self._follows = True
        try:
            await self._apply_all()
        except Exception:
            # Items were taken and not applied. Until `follow` runs again, no content of the logs is known here.
            self._follows = False
            for worker in self._followers:
                self._want_reload(
                    worker, "an internal error keeps the logs from being followed: they are again in a moment"
                )
            raise

    async def _apply_all(self) -> None:
        while True:
            entries = blocks = 0
            items = await self._follower.next()
            self._moved.clear()
            for item in in_turns(items):
                if isinstance(item, LogEntry | Reload) and item.worker in self._moved:
                    continue
                self._take(item)
                entries += 1
                blocks += _size_blocks(item)
                if entries >= ENTRIES_PER_TURN or blocks >= BLOCKS_PER_TURN:
                    entries = blocks = 0
                    await asyncio.sleep(0)
            await asyncio.sleep(0)

    def _take(self, item: FollowerItem) -> None:
        if isinstance(item, LogEntry):
            try:
                self._apply(item)
            except Exception:
                # A bug in the router costs this worker a reload, and affects no other worker.
                self._metrics.internal_errors.labels("mirror").inc()
                log.exception("log entry not applied to the mirror", extra={"worker": item.worker})
                self._want_reload(item.worker, "an internal error kept its changes from being applied")
        elif isinstance(item, Reload):
            log.warning("reload", extra={"worker": item.worker, "reason": item.reason})
            self._want_reload(item.worker, item.reason)
        elif isinstance(item, StoreLost):
            self._lose_store(item.workers, item.reason)
        elif isinstance(item, StoreBack):
            self._regain_store(item.workers)

    def _lose_store(self, workers: Collection[WorkerKey], reason: str) -> None:
        lost = [worker for worker in workers if self._reads_log(worker)]
        self._contact.lose_logs(lost, reason)
        for worker in lost:
            self._followers[worker].state.on_log_heard(False)

    def _regain_store(self, workers: Collection[WorkerKey]) -> None:
        self._contact.regain_logs(workers)
        for worker in workers:
            if (follower := self._followers.get(worker)) is not None:
                follower.state.on_log_heard(True)

    def _apply(self, entry: LogEntry) -> None:
        """Apply a log entry to the mirror and to the worker's state, unless the worker is about to be loaded again."""
        worker = entry.worker
        follower = self._followers.get(worker)
        if follower is None or worker in self._reloads:
            return
        slots = self.mirror.worker(worker)
        if slots is None or entry.opened_epoch or slots.epoch != entry.epoch:
            self.mirror.begin_epoch(worker, entry.epoch)
        self._change(worker, entry.changes)
        follower.state.on_entry(entry)

    def _want_reload(self, worker: WorkerKey, reason: str) -> None:
        """Have the worker loaded by `reload`. It earns no credit until then, as its changes are not known here."""
        if self._reads_log(worker):
            self._reloads[worker] = _Reloading(self._clock())
            self._followers[worker].state.on_image_problem(reason)
            self._reload_wanted.set()

    async def reload(self) -> None:
        """Load the workers whose log cannot be continued, until cancelled.

        This runs beside `follow`, so a worker that cannot be loaded delays no other.
        """
        while True:
            now = self._clock()
            # While the logs are not read, an image would be outdated at once.
            if self._follows and self._follower.reading:
                due = [worker for worker, reloading in self._reloads.items() if reloading.due_s <= now]
                await asyncio.gather(*map(self._load_again, due))
                pause_s = (
                    min((reloading.due_s for reloading in self._reloads.values()), default=now + RELOAD_LAST_S)
                    - self._clock()
                )
            else:
                pause_s = SWEEP_INTERVAL_S
            self._reload_wanted.clear()
            if pause_s > 0:
                await set_within(self._reload_wanted, min(pause_s, RELOAD_LAST_S))

    async def _load_again(self, worker: WorkerKey) -> None:
        """Try to load the worker from Redis and to follow its log; schedule another try after a failure."""
        reloading, follower = self._reloads[worker], self._followers.get(worker)
        try:
            await self._follower.remove(worker)
            image = await self._store.load(worker)
            problem = "" if follower is None else follower.state.unreadable(image)
        except StoredValueError as error:
            problem = str(error)
        except StoreError as error:
            reloading.put_off(self._clock())
            if self._reloads.get(worker) is reloading:
                self._lose_store([worker], str(error))
            return
        # The worker may have been dropped, or registered again, meanwhile.
        if (
            follower is None
            or self._reloads.get(worker) is not reloading
            or self._followers.get(worker) is not follower
        ):
            return
        if problem:
            reloading.put_off(self._clock())
            if reloading.reason != problem:
                reloading.reason = problem
                self._unreadable(follower, problem)
            with contextlib.suppress(StoreError):
                await self._store.report_unreadable(worker, problem)
        else:
            self.take_image(image)
            self._regain_store([worker])

    def _unreadable(self, follower: Follower, problem: str) -> None:
        self._metrics.unreadable_values["worker"].inc()
        log.error("stored values not readable", extra={"worker": follower.worker, "reason": problem})
        follower.state.on_image_problem(problem)

    async def sweep(self) -> None:
        """Free the memory of ended epochs, until cancelled."""
        while True:
            await ticks.sleep(0 if self.mirror.sweep() else SWEEP_INTERVAL_S)


def in_turns(items: list[FollowerItem]) -> Iterator[FollowerItem]:
    """Yield one item of each worker in turn, and each worker's items in their order.

    A worker with many items therefore does not keep the others waiting.
    """
    queues: dict[WorkerKey | None, deque[FollowerItem]] = {}
    for item in items:
        worker = item.worker if isinstance(item, LogEntry | Reload) else None
        queues.setdefault(worker, deque()).append(item)
    while queues:
        for worker in list(queues):
            yield queues[worker].popleft()
            if not queues[worker]:
                del queues[worker]


def _size_blocks(item: FollowerItem) -> int:
    changes = item.changes if isinstance(item, LogEntry) else ()
    return sum(len(change.added) + len(change.removed) for change in changes)
