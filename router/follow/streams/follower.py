# SPDX-License-Identifier: Apache-2.0
"""The following of one worker: one task takes the lease, leads the worker's mirror, and reads the worker's streams.

While the process has the lease, it leads the mirror (`mirror_lead.py`), so its answers need no Redis. If the lease is
lost or the store was replaced, the task begins again: from memory if no other process followed the worker meanwhile,
else from the state in Redis. While another process follows the worker, `peer_view.py` provides the state, as long as
that process is heard. `stream_machine.py` makes the decisions, and `worker_state.py` holds the knowledge.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import assert_never

import zmq

from kvrouter.router.base.redis_client.errors import StoredValueError, StoreError
from kvrouter.router.follow.streams.commits import Commits
from kvrouter.router.follow.streams.engine_poller import RANKS_LATE, EnginePoller
from kvrouter.router.follow.streams.event_source import EventSource, SourceChanged
from kvrouter.router.follow.streams.lease import RETRY_FIRST_S, RETRY_LAST_S, HandedOver, Lease, LeaseLost
from kvrouter.router.follow.streams.stream_machine import Action, Event
from kvrouter.router.follow.streams.stream_services import StreamServices
from kvrouter.router.follow.streams.worker_state import WorkerState
from kvrouter.router.index.ingest.ingest import Copies
from kvrouter.router.index.store.checkpoint import LogTail
from kvrouter.router.index.store.commit import WorkerImage
from kvrouter.router.model.workers.registration import Registration

log = logging.getLogger("kvrouter.stream")

# If the lease is not taken within this fraction of a lease's life, another process is assumed to have it. A first
# taking of a free lease takes some round trips.
LOOKS_BEFORE_ELSEWHERE = 10

PAUSED = "followed again in a moment; the last known residency is shown"


class Follower:
    """The task that follows one worker, from `start` to `stop`; `state` is what it learns."""

    def __init__(self, registration: Registration, services: StreamServices) -> None:
        """Prepare to follow the worker; `start` begins.

        Args:
            registration: The worker's registration.
            services: The services that all streams of the process share.
        """
        self.worker = registration.worker
        self._services = services
        self.state = WorkerState(registration, services)
        self.lease = Lease(self.worker, services, self.state.on_store_problem)
        self.commits = Commits(self.state, self.lease, services)
        self._engine = EnginePoller(self.state, self.commits, services)
        self._source = EventSource(self.state, self.commits, self._engine, services)
        # The (epoch, seq) in Redis from which the ingest was prepared, None once the ingest is ahead of it.
        self._prepared: tuple[str | None, int | None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_stopping = False

    def judge(self, *, alone: bool, contradiction: str, note: str, refused: str = "") -> None:
        """Accept the verdict on this worker that follows from judging all registrations together; see `on_judged`."""
        if self.state.on_judged(alone=alone, contradiction=contradiction, note=note, refused=refused):
            self._engine.read_again(RANKS_LATE)

    def update(self, registration: Registration) -> None:
        """Take over a registration that differs only in fields on which following the worker does not depend."""
        if registration.url not in (None, self.state.registration.url):
            self._engine.move(registration.url)
        self.state.on_registration(registration)

    def prepare(self, image: WorkerImage, copies: Copies, problem: str = "") -> None:
        """Prepare the ingest from the worker's state in Redis, before the stream brings anything.

        Args:
            image: The state of the worker in Redis.
            copies: The number of copies of each block that has several.
            problem: Why the state cannot be read; empty if it can.
        """
        self._prepared = (image.epoch, image.seq)
        self.commits.tail = LogTail(image.tail_entries, image.tail_blocks)
        self.state.on_prepared(image, copies, problem)

    def start(self) -> None:
        """Start the task that follows the worker, unless this router may not follow it."""
        if refusal := self.state.facts.refusal:
            log.warning("worker not followed", extra={"worker": self.worker, "reason": refusal})
            return
        self._task = self._services.supervisor.start("stream", self._run, of=self.worker.route_name)

    async def stop(self) -> None:
        """End the task and give the lease back. Redis keeps all commits."""
        self._is_stopping = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        # The task may have ended between taking the lease and following.
        await self.lease.release()
        self.commits.end_lead()
        self.state.on_stopped()

    async def forget(self) -> None:
        """End the task, and delete the worker's index in Redis unless another process follows the worker."""
        await self.stop()
        await self.lease.forget()

    async def _run(self) -> None:
        try:
            await self._follow_always()
        except asyncio.CancelledError as error:
            # A frame of TaskGroup refers to the error, and the error's traceback to the frame. This cycle would keep all
            # of the worker's objects until a full garbage collection, for which a router rarely has reason.
            raise error.with_traceback(None) from None

    async def _follow_always(self) -> None:
        """Take the lease and follow the worker, again after each error."""
        retry_s = RETRY_FIRST_S
        while True:
            try:
                await self._take_lease()
                retry_s = RETRY_FIRST_S
                await self._follow()
            except HandedOver as change:
                log.info("worker handed over", extra={"worker": self.worker, "reason": str(change)})
            except (LeaseLost, StoreError) as error:
                self.state.on_not_held(str(error))
                log.warning("worker not held", extra={"worker": self.worker, "reason": str(error)})
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, RETRY_LAST_S)
            except zmq.ZMQError as error:
                self.state.on_not_held(f"cannot subscribe to {self.state.registration.events}: {error}")
                await asyncio.sleep(RETRY_LAST_S)
            except Exception:
                # The error must not end the worker's task unseen. The next try begins from the state in Redis.
                await self._on(Event.DEFECT)
                self._services.metrics.internal_errors.labels("stream").inc()
                log.exception("stream failed", extra={"worker": self.worker})
                self.state.on_not_held(
                    "internal error while following this worker: a bug in the router; its log has the details"
                )
                await asyncio.sleep(RETRY_LAST_S)

    async def _take_lease(self) -> None:
        """Wait for the lease, and bring mirror and memory to the point from which commits can go on."""
        self.commits.sending = None
        if not self.lease.wanted:
            await self._on(Event.LEASE_ELSEWHERE)
        taking = asyncio.ensure_future(self.lease.take())
        try:
            pause_s = self._services.config.lease_ttl_s / LOOKS_BEFORE_ELSEWHERE
            done, _ = await asyncio.wait({taking}, timeout=pause_s)
            if not done:
                await self._on(Event.LEASE_ELSEWHERE)
            alone = await taking
        finally:
            taking.cancel()
        await self._on(Event.LEASE_REGAINED if alone else Event.LEASE_TAKEN)

    async def _follow(self) -> None:
        """Follow the worker under one lease until an exception ends it. The lease is given back."""
        self.commits.begin_lead()
        held = self.state.ingest.held
        log.info("worker held", extra={"worker": self.worker, "epoch": held.epoch, "seq": held.seq})
        action = self.state.on_lead_begun()
        try:
            while True:
                try:
                    await self._take(action)
                except SourceChanged as change:
                    action = self.state.step(Event.SOURCE_CHANGED)
                    self.state.on_paused(PAUSED)
                    log.info("stream changed", extra={"worker": self.worker, "reason": str(change)})
        except (asyncio.CancelledError, HandedOver):
            await self.commits.write_rest()
            raise
        finally:
            await self._on(Event.HOLD_ENDED)
            await self.lease.release()

    async def _on(self, event: Event) -> None:
        await self._take(self.state.step(event))

    async def _take(self, action: Action) -> None:
        """Take the action; one that follows the worker lasts until an exception ends it.

        Raises SourceChanged if the other of the two streams should be followed, StoreError and LeaseLost.
        """
        match action:
            case Action.NOTHING:
                pass
            case Action.SHOW_OTHERS:
                self._prepared = None
                self.commits.end_lead()
                self.state.on_elsewhere()
                if not self.state.facts.log_loaded:
                    await self._services.mirror.follow_log(self.worker)
            case Action.CONTINUE:
                self.commits.go_on()
            case Action.REBUILD:
                await self._rebuild()
            case Action.GREET:
                answered = await self._source.greet()
                await self._on(Event.PATCH_ANSWERED if answered else Event.PATCH_SILENT)
            case Action.FOLLOW_STOCK:
                async with self._source.stock() as reading:
                    await self.hold(*reading)
            case Action.FOLLOW_REPORTS:
                async with self._source.reports() as reading:
                    await self.hold(*reading)
            case Action.HOLD:
                await self.hold()
            case Action.GIVE_UP:
                problem = self._source.silence()
                self.state.on_silence(problem)
                raise LeaseLost(problem)
            case Action.PAUSE:
                self.state.on_paused(PAUSED)
            case _:
                assert_never(action)

    async def _rebuild(self) -> None:
        """Lead with the blocks in Redis: load them into the ingest and the mirror. Raises StoreError."""
        state, store = self.state, self._services.store
        has_log = state.on_log_left()
        await self._services.mirror.lead(self.worker)
        if self.lease.written != self._prepared:
            # Others have committed since, or the ingest is broken.
            try:
                image, copies = await store.load(self.worker), await store.load_copies(self.worker)
                self.prepare(image, copies)
            except StoredValueError as error:
                # An empty ingest opens a new epoch, which voids the stored values.
                log.warning("stored index void: it cannot be read", extra={"worker": self.worker, "reason": str(error)})
                self.prepare(WorkerImage.empty(self.worker), {}, str(error))
        state.on_mirror_taken(has_log=has_log)
        self._prepared = None

    async def hold(self, *reading: Coroutine[None, None, None]) -> None:
        """Keep the lease, commit and poll while `reading` runs; the first failure ends all of them.

        Raises SourceChanged, HandedOver or LeaseLost, or CancelledError if the worker is being stopped.
        """
        # A new worker has an empty epoch to announce before its stream brings anything.
        self.state.schedule_write()
        try:
            async with asyncio.TaskGroup() as group:
                for coroutine in (
                    self.lease.keep(self._source.can_move),
                    self.commits.run(),
                    self._engine.run(),
                    *reading,
                ):
                    group.create_task(coroutine)
        except ExceptionGroup as group:
            if self._is_stopping:
                # A failure at the same moment swallows the cancellation, and the task that awaits the end would wait
                # forever.
                raise asyncio.CancelledError from None
            expected, others = group.split((LeaseLost, StoreError, SourceChanged))
            if others is not None or expected is None:
                raise
            first = _first_of(expected)
            raise first if isinstance(first, SourceChanged | HandedOver) else LeaseLost(str(first)) from None


def _first_of(error: BaseException) -> BaseException:
    """Return the first exception that is no group, at any depth."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
