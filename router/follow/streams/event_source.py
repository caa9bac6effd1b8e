# SPDX-License-Identifier: Apache-2.0
"""The two streams of one worker's events: the reports of the engine's patch, and the engine's own topic.

`stream_machine.py` decides which of them is read; this module opens the sockets and reads.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager

from kvrouter.events.patch.hello import ClientRefused, greet
from kvrouter.events.patch.items import PatchHeard, PatchSilent, ReportItem
from kvrouter.events.patch.subscriber import ReportSubscriber
from kvrouter.events.transport.curve import CurveClient, public_key
from kvrouter.events.vllm.settings import SubscriberSettings
from kvrouter.events.vllm.stream_items import Connected, StreamItem
from kvrouter.events.vllm.subscriber import Subscriber
from kvrouter.router.base.common.event_wait import set_within
from kvrouter.router.follow.streams.commits import Commits
from kvrouter.router.follow.streams.engine_poller import EnginePoller
from kvrouter.router.follow.streams.stream_services import StreamServices
from kvrouter.router.follow.streams.worker_state import WorkerState

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


# The coroutines that read a stream. They end with an exception alone.
Reading = tuple[Coroutine[None, None, None], ...]


class SourceChanged(Exception):
    """The end of reading one of the worker's two streams, because the other one should be followed."""


class EventSource:
    """The reader of one worker's streams, while this process has the worker's lease."""

    def __init__(self, state: WorkerState, commits: Commits, engine: EnginePoller, services: StreamServices) -> None:
        self._state = state
        self._commits = commits
        self._engine = engine
        self._services = services
        # The patch's epoch as it answered the last greeting, and whether it refused this router then.
        self._epoch = ""
        self._is_refused = False

    async def greet(self) -> bool:
        """Greet the engine's patch; return False if no patch answers, or if the stock topic is to be used."""
        endpoints = self._state.endpoints
        if endpoints.patch is None:
            return False
        known = self._state.ingest.profile.patch.epoch is not None
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
            return False
        self._state.on_greeted(hello)
        self._epoch = "" if hello is None else hello.epoch
        return hello is not None and not (hello.withheld and endpoints.has_stock)

    def _curve(self) -> CurveClient | None:
        key = self._state.endpoints.key
        return None if key is None else CurveClient(key, self._services.patch_secret)

    def silence(self) -> str:
        """Return why no stream can be followed, after a greeting without an answer."""
        endpoints, secret = self._state.endpoints, self._services.patch_secret
        if not self._is_refused:
            return endpoints.silence
        return endpoints.refusal(None if secret is None else public_key(secret))

    @asynccontextmanager
    async def reports(self) -> AsyncIterator[Reading]:
        """Open the reports of the engine's patch."""
        state = self._state
        assert state.endpoints.patch is not None
        state.on_reports_followed(self._epoch)
        reports = ReportSubscriber(
            state.endpoints.patch,
            context=self._services.context,
            resume=state.ingest.reports.resume,
            refusal=self._services.allowed.problem,
            curve=self._curve(),
            permits=self._services.permits,
            watch=self._services.watch,
        )
        self._engine.expire = reports.expire
        try:
            await reports.start()
            lost = asyncio.Event()
            yield self._receive_reports(reports, lost), self._give_up(lost)
        finally:
            self._engine.expire = None
            await reports.close()

    @asynccontextmanager
    async def stock(self) -> AsyncIterator[Reading]:
        """Open the engine's own topic."""
        state, endpoints = self._state, self._state.endpoints
        assert endpoints.events is not None
        state.on_stock_followed()
        subscriber = Subscriber(
            endpoints.events,
            state.registration.replay,
            context=self._services.context,
            resume=state.ingest.resume_point,
            settings=SubscriberSettings(answer_timeout_s=self._services.config.replay_timeout_s),
            permits=self._services.permits,
            watch=self._services.watch,
        )
        self._engine.expire = subscriber.expire
        connected = asyncio.Event()
        try:
            await subscriber.start()
            looks = () if endpoints.patch is None else (self._look_for_patch(endpoints.patch, connected),)
            yield self._receive(subscriber, connected), *looks
        finally:
            self._engine.expire = None
            await subscriber.close()

    def can_move(self) -> bool:
        """Return whether another process could recover the events that are sent while the worker changes hands."""
        registration = self._state.registration
        patched = self._state.ingest.profile.patch.epoch is not None
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
            self._state.on_greeted(hello)

    async def _receive(self, subscriber: Subscriber, connected: asyncio.Event) -> None:
        def apply(items: deque[StreamItem], received_s: float) -> None:
            item = items[0]
            self._state.ingest.apply_next(items, received_s)
            if isinstance(item, Connected):
                connected.set()
                self._engine.ask_now()

        while True:
            await self._commits.take_in(await subscriber.next(), apply)

    async def _receive_reports(self, reports: ReportSubscriber, lost: asyncio.Event) -> None:
        giving_up: asyncio.TimerHandle | None = None

        def apply(items: deque[ReportItem], received_s: float) -> None:
            nonlocal giving_up
            item, ingest = items.popleft(), self._state.ingest
            ingest.apply(item, received_s)
            if isinstance(item, PatchSilent | PatchHeard) and giving_up is not None:
                giving_up.cancel()
            if isinstance(item, PatchSilent):
                giving_up = asyncio.get_running_loop().call_later(REPORTS_LOST_S, lost.set)
            if ingest.profile.patch.withheld and self._state.endpoints.has_stock:
                lost.set()
            if ingest.reports.wants_snapshot is not None:
                reports.request_snapshot(ingest.reports.wants_snapshot)
                self._state.on_snapshot_requested()

        while True:
            await self._commits.take_in(await reports.next(), apply)

    async def _give_up(self, lost: asyncio.Event) -> None:
        """Raise SourceChanged once the patch's reports count as lost."""
        await lost.wait()
        problem = self._state.ingest.profile.patch.problem
        raise SourceChanged(problem or f"the engine's patch was not heard for {REPORTS_LOST_S:.0f} s")
