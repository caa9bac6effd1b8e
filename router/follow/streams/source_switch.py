# SPDX-License-Identifier: Apache-2.0
"""The choice of the worker's stream that is read under a lease.

The patch's reports are read if the engine has the patch, else the engine's own topic. `stream_machine.py` decides; this
module opens the sockets and reads.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine

from kvrouter.events.patch.hello import ClientRefused, greet
from kvrouter.events.patch.items import PatchHeard, PatchSilent, ReportItem
from kvrouter.events.patch.subscriber import ReportSubscriber
from kvrouter.events.transport.curve import CurveClient, public_key
from kvrouter.events.vllm.settings import SubscriberSettings
from kvrouter.events.vllm.stream_items import Connected, StreamItem
from kvrouter.events.vllm.subscriber import Subscriber
from kvrouter.router.base.common.event_wait import set_within
from kvrouter.router.base.redis_client.errors import StoreError
from kvrouter.router.follow.streams.commit_loop import CommitLoop
from kvrouter.router.follow.streams.engine_poller import EnginePoller
from kvrouter.router.follow.streams.lease_holder import HandedOver, LeaseHolder, LeaseLost
from kvrouter.router.follow.streams.stream_machine import Action, Event
from kvrouter.router.follow.streams.stream_services import StreamServices
from kvrouter.router.follow.streams.worker_record import WorkerRecord

log = logging.getLogger("kvrouter.stream")

# How long a patched engine may take to answer the greeting before its own topic is followed: some round trips. An engine
# whose reports are in Redis already gets longer, because continuing from there saves loading everything.
GREET_FIRST_S = 0.25
GREET_KNOWN_S = 3.0

# While the engine's own topic is followed, the router looks for the patch again and again. Each look lasts PROBE_S, and
# each pause between two looks is sixteen times the one before. A new connection starts the pauses over, because the
# engine may have restarted with the patch. The longest pause, PROBE_PAUSE_LAST_S, therefore only bounds how late a
# patch is found that is added to a running engine.
PROBE_S = 1.0
PROBE_PAUSE_FIRST_S = 1.0
PROBE_PAUSE_LAST_S = 300.0
PROBE_PAUSE_GROWTH = 16

# A patch that is silent for this long is given up, and the engine's own topic followed. The time is longer than an
# engine stalls while it compiles.
REPORTS_LOST_S = 15.0

PAUSED = "followed again in a moment; the last known residency is shown"


class SourceChanged(Exception):
    """The end of reading one of the worker's two streams, because the other one should be followed."""


class SourceSwitch:
    """The reader of one worker's streams, while this process has the worker's lease."""

    def __init__(
        self,
        record: WorkerRecord,
        lease: LeaseHolder,
        commits: CommitLoop,
        engine: EnginePoller,
        services: StreamServices,
    ) -> None:
        self._record = record
        self._lease = lease
        self._commits = commits
        self._engine = engine
        self._services = services
        # Whether the patch refused this router at the last greeting.
        self._is_refused = False

    async def follow(self, action: Action) -> None:
        """Follow the worker until its lease ends, which raises LeaseLost."""
        while True:
            try:
                await self._follow(action)
            except SourceChanged as change:
                action = self._record.step(Event.SOURCE_CHANGED)
                self._record.pause(PAUSED)
                log.info("stream changed", extra={"worker": self._record.registration.worker, "reason": str(change)})

    async def _follow(self, action: Action) -> None:
        """Follow one stream. Raises SourceChanged if the other one should be followed, and LeaseLost."""
        epoch = ""
        if action is Action.GREET:
            hello = await self._greet()
            action = self._record.step(Event.PATCH_SILENT if hello is None else Event.PATCH_ANSWERED)
            epoch = hello or ""
        if action is Action.FOLLOW_REPORTS:
            await self._follow_reports(epoch)
        elif action is Action.FOLLOW_STOCK:
            await self._follow_stock()
        elif action is Action.HOLD:
            await self.hold()
        else:
            endpoints = self._record.endpoints
            problem = endpoints.silence
            if self._is_refused:
                secret = self._services.patch_secret
                problem = endpoints.refusal(None if secret is None else public_key(secret))
            if endpoints.key is not None:
                self._record.facts.key_problem = problem
            raise LeaseLost(problem)

    async def _greet(self) -> str | None:
        """Greet the engine's patch; return its epoch, or None if no patch answers or the stock topic is to be used."""
        endpoints = self._record.endpoints
        if endpoints.patch is None:
            return None
        known = self._record.ingest.profile.patch.epoch is not None
        self._is_refused = False
        try:
            hello = await greet(
                endpoints.patch,
                context=self._services.context,
                timeout_s=GREET_KNOWN_S if known else GREET_FIRST_S,
                curve=self._curve(),
                waits=known or endpoints.key is not None,
                watch=self._services.watch,
            )
        except ClientRefused:
            self._is_refused = True
            return None
        if hello is None:
            self._record.ingest.profile.patch.withheld = ""
            return None
        self._record.facts.key_problem = None
        self._record.ingest.profile.patch.withheld = hello.withheld
        return None if hello.withheld and endpoints.has_stock else hello.epoch

    def _curve(self) -> CurveClient | None:
        key = self._record.endpoints.key
        return None if key is None else CurveClient(key, self._services.patch_secret)

    async def _follow_reports(self, epoch: str) -> None:
        record, endpoints = self._record, self._record.endpoints
        assert endpoints.patch is not None
        record.ingest.follow_reports(epoch)
        record.refresh()
        reports = ReportSubscriber(
            endpoints.patch,
            context=self._services.context,
            resume=record.ingest.reports.resume,
            refusal=self._services.allowed.problem,
            curve=self._curve(),
            permits=self._services.permits,
            watch=self._services.watch,
        )
        self._engine.expire = reports.expire
        try:
            await reports.start()
            lost = asyncio.Event()
            await self.hold(self._receive_reports(reports, lost), self._give_up(lost))
        finally:
            self._engine.expire = None
            await reports.close()

    async def _follow_stock(self) -> None:
        record, endpoints = self._record, self._record.endpoints
        assert endpoints.events is not None
        record.ingest.follow_stock()
        record.refresh()
        subscriber = Subscriber(
            endpoints.events,
            record.registration.replay,
            context=self._services.context,
            resume=record.ingest.resume_point,
            settings=SubscriberSettings(answer_timeout_s=self._services.config.replay_timeout_s),
            permits=self._services.permits,
            watch=self._services.watch,
        )
        self._engine.expire = subscriber.expire
        connected = asyncio.Event()
        try:
            await subscriber.start()
            looks = [] if endpoints.patch is None else [self._look_for_patch(endpoints.patch, connected)]
            await self.hold(self._receive(subscriber, connected), *looks)
        finally:
            self._engine.expire = None
            await subscriber.close()

    async def hold(self, *work: Coroutine[None, None, None]) -> None:
        """Keep the lease, commit and poll while `work` runs; the first failure ends all of them.

        Raises SourceChanged, HandedOver or LeaseLost, or CancelledError if the worker is being stopped.
        """
        # A new worker has an empty epoch to announce before its stream brings anything.
        self._record.schedule_write()
        try:
            async with asyncio.TaskGroup() as group:
                for coroutine in (
                    self._lease.keep(self._can_move),
                    self._commits.run(),
                    self._engine.run(),
                    *work,
                ):
                    group.create_task(coroutine)
        except ExceptionGroup as group:
            if self._record.facts.stopping:
                # A failure at the same moment swallows the cancellation, and the task that awaits the end would wait
                # forever.
                raise asyncio.CancelledError from None
            expected, others = group.split((LeaseLost, StoreError, SourceChanged))
            if others is not None or expected is None:
                raise
            first = _first_of(expected)
            raise first if isinstance(first, SourceChanged | HandedOver) else LeaseLost(str(first)) from None

    def _can_move(self) -> bool:
        """Return whether another process could recover the events that are sent while the worker changes hands."""
        registration = self._record.registration
        patched = self._record.ingest.profile.patch.epoch is not None
        return registration.events is None or registration.replay is not None or patched

    async def _look_for_patch(self, patch: str, connected: asyncio.Event) -> None:
        """Greet the patch now and then, and raise SourceChanged once it answers."""
        pause_s = PROBE_PAUSE_FIRST_S
        while True:
            is_connected = await set_within(connected, pause_s)
            pause_s = PROBE_PAUSE_FIRST_S if is_connected else min(PROBE_PAUSE_GROWTH * pause_s, PROBE_PAUSE_LAST_S)
            connected.clear()
            hello = await greet(
                patch, context=self._services.context, timeout_s=PROBE_S, waits=False, watch=self._services.watch
            )
            if hello is not None and not hello.withheld:
                raise SourceChanged(f"a patched engine answers at {patch}")
            withheld = "" if hello is None else hello.withheld
            if withheld != self._record.ingest.profile.patch.withheld:
                self._record.ingest.profile.patch.withheld = withheld
                self._record.refresh()

    async def _receive(self, subscriber: Subscriber, connected: asyncio.Event) -> None:
        def apply(item: StreamItem, received_s: float) -> None:
            self._record.ingest.apply(item, received_s)
            if isinstance(item, Connected):
                connected.set()
                self._engine.ask_now()

        while True:
            await self._commits.take_in(await subscriber.next(), apply)

    async def _receive_reports(self, reports: ReportSubscriber, lost: asyncio.Event) -> None:
        giving_up: asyncio.TimerHandle | None = None

        def apply(item: ReportItem, received_s: float) -> None:
            nonlocal giving_up
            ingest = self._record.ingest
            ingest.apply(item, received_s)
            if isinstance(item, PatchSilent | PatchHeard) and giving_up is not None:
                giving_up.cancel()
            if isinstance(item, PatchSilent):
                giving_up = asyncio.get_running_loop().call_later(REPORTS_LOST_S, lost.set)
            if ingest.profile.patch.withheld and self._record.endpoints.has_stock:
                lost.set()
            if ingest.reports.wants_snapshot is not None:
                reports.request_snapshot(ingest.reports.wants_snapshot)
                ingest.reports.wants_snapshot = None

        while True:
            await self._commits.take_in(await reports.next(), apply)

    async def _give_up(self, lost: asyncio.Event) -> None:
        """Raise SourceChanged once the patch's reports count as lost."""
        await lost.wait()
        problem = self._record.ingest.profile.patch.problem
        raise SourceChanged(problem or f"the engine's patch was not heard for {REPORTS_LOST_S:.0f} s")


def _first_of(error: BaseException) -> BaseException:
    """Return the first exception that is no group, at any depth."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
