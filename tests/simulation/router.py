# SPDX-License-Identifier: Apache-2.0
"""A simulated router process: the real core and placement on the virtual loop, wired as `assembly.py` wires them.

A router may be of an older version (`old_router.py`), and may have a list of workers in place of the file of the setting
`workers_file`.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvrouter.events.transport.flood_watch import FloodWatch
from kvrouter.router.app.core.router_core import Core
from kvrouter.router.app.server.router_metrics import RouterMetrics
from kvrouter.router.base.common.random_ids import RandomIds
from kvrouter.router.base.common.task_supervisor import TaskSupervisor
from kvrouter.router.base.redis_client.errors import StoreError
from kvrouter.router.base.telemetry.metric_registry import MetricRegistry
from kvrouter.router.follow.discovery.candidate import Candidate
from kvrouter.router.follow.discovery.discovery import Discovery
from kvrouter.router.follow.feed.event_feed import EventFeed
from kvrouter.router.index.store.store import IndexStore
from kvrouter.router.model.config.live_settings import LiveSettings
from kvrouter.router.model.config.settings import Config
from kvrouter.router.model.upstream.engine_client import EngineClient
from kvrouter.router.model.workers.allow_list import AllowList
from kvrouter.router.model.workers.engine_key import EngineKey
from kvrouter.router.model.workers.source_precedence import FILE
from kvrouter.router.observe.decisions.decision_log import DecisionLog
from kvrouter.router.route.placement.placer import Placer
from kvrouter.router.serve.access.access import Access
from kvrouter.router.serve.api.http.fastapi_app import build_api
from kvrouter.router.serve.api.http.http_api import HttpApi
from kvrouter.router.serve.proxy.admission import Admission
from tests.simulation.http import serve_http
from tests.simulation.network import Host
from tests.simulation.old_router import OldStore
from tests.simulation.router_settings import FleetSettings
from tests.simulation.store.store import PORT
from tests.simulation.virtual_loop import Process, Standing
from tests.simulation.zmq_network import SimulatedContext

if TYPE_CHECKING:
    from tests.simulation.virtual_loop import VirtualLoop

# How soon a process that could not start is started again.
RESTART_S = 1.0


class ListSource:
    """The workers of a list that an operator changes while the router runs."""

    name = FILE
    problem = ""

    def __init__(self, shown: Sequence[Candidate]) -> None:
        self.shown: Sequence[Candidate] | None = shown
        self.notify: Callable[[], None] = lambda: None

    async def run(self, changed: Callable[[], None]) -> None:
        """Wait until cancelled; `notify` calls `changed`."""
        self.notify = changed
        await asyncio.get_running_loop().create_future()


class Router:
    """One router. Each start is a new process with a new token."""

    def __init__(
        self,
        name: str,
        loop: VirtualLoop,
        host: Host,
        store_address: str,
        rng: random.Random,
        note: Callable[[str, str], None],
        settings: FleetSettings,
    ) -> None:
        self.name, self.host, self.settings = name, host, settings
        self._loop, self._rng, self._note = loop, rng, note
        self._url = f"redis://{store_address}:{PORT}"
        self.process: Process | None = None
        # None while the process starts or is down.
        self.core: Core | None = None
        self.placer: Placer | None = None
        self.token = ""
        self.tokens: list[str] = []
        # The metrics of all its processes, by token.
        self.registries: dict[str, MetricRegistry] = {}
        self.started_s = 0.0
        # Until when it was paused last.
        self.resumed_s = 0.0
        # Whether the next process is of an older version, and the list of its source of workers, None without a source.
        self.is_old = False
        self.listed: Sequence[Candidate] | None = None
        self._source: ListSource | None = None
        # Whether clients reach it over HTTP; otherwise they call its parts.
        self.has_http = False
        self._ended: list[object] = []
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def is_down(self) -> bool:
        """Whether there is no process."""
        return self.process is None

    @property
    def answers(self) -> bool:
        """Whether clients get answers now."""
        return self.core is not None and self.process is not None and self.process.standing is Standing.RUNS

    def show(self, listed: Sequence[Candidate]) -> None:
        """Replace the list of workers, which a running process notices."""
        self.listed = listed
        if self._source is not None and self.process is not None:
            self._source.shown = listed
            self.process.call_soon(self._source.notify)

    def apply(self, config: Config) -> None:
        """Apply changed settings to the running process."""
        if self.core is not None and self.placer is not None and self.process is not None:
            self._config = config
            for apply in (self.core.apply, self.placer.apply):
                self.process.call_soon(apply, config)

    @property
    def config(self) -> Config:
        """The settings of the last process."""
        return self._config

    def start(self) -> None:
        """Start a process."""
        if self.process is not None:
            return
        self.host.is_up = True
        self.token = f"{self._rng.getrandbits(64):016x}"
        self.tokens.append(self.token)
        self.process = self._loop.add_process(self.name)
        self.started_s = self._loop.time()
        self._note(self.name, f"starts as {self.token}{', an older version' if self.is_old else ''}")
        self._tasks.append(self.process.start(self._open(self.process)))

    async def _open(self, process: Process) -> None:
        """Join and start the parts."""
        rng = self._rng
        offset_s = rng.uniform(0.0, 1e6)
        clock = lambda: self._loop.time() + offset_s  # noqa: E731
        config = self._config = self.settings.of_router()
        registry = self.registries[self.token] = MetricRegistry()
        metrics = RouterMetrics(registry)
        supervisor = TaskSupervisor(clock=clock, rng=self._new_rng(), failures=registry.task_failures)
        feed = EventFeed(life=f"{rng.getrandbits(32):08x}", wall_clock=self._loop.time, metrics=metrics.core.watch)
        decisions = DecisionLog(config.decisions_kept, feed, clock, metrics.core.watch)
        self.context = SimulatedContext(self._loop, self.host, self._new_rng())
        try:
            kind = OldStore if self.is_old else IndexStore
            store = await kind.open(self._url, log_entries=self.settings.log_entries, wall_clock=self._loop.time)
            core = Core(
                store=store,
                config=config,
                metrics=metrics.core,
                zmq_context=self.context,  # type: ignore[arg-type]
                clock=clock,
                rng=self._new_rng(),
                engine_client=EngineClient(self._loop, EngineKey(None, AllowList(config.allow_hosts))),
                token=self.token,
                supervisor=supervisor,
                feed=feed,
                watch=FloodWatch(lambda: 0),
            )
            if self.is_old:
                # The entry of a writer that is not named is no news.
                core.peers._membership._is_news = lambda *_: False  # type: ignore[method-assign]
            admission = Admission(core.registry.drains, clock, metrics.proxy)
            placer = Placer(
                core.finder,
                config=config,
                metrics=metrics.placement,
                clock=clock,
                rng=self._new_rng(),
                new_id=RandomIds(self._new_rng().randbytes),
                unavailable=admission.problem,
                prefillers=core.registry.prefill_workers,
                record=decisions.record,
                noticed=decisions.take_notice,
                servers=store.servers,
                process=core.peers.token,
                supervisor=supervisor,
            )
            decisions.send_notice = placer.send_notice
            core.registry.subscribe(
                view=admission.on_view, load=placer.take_engine_load, life=placer.weights.prompts.forget
            )
            core.registry.subscribe(view=placer.on_view, life=admission.refused.forget)
            await core.start()
            placer.start()
            discovery = await self._discover(core, metrics, clock, supervisor)
        except StoreError as error:
            self._note(self.name, f"does not start: {error}")
            self._loop.after(0.0, lambda: self._fail(process))
            return
        self._store, self._metrics, self._supervisor, self._discovery = store, registry, supervisor, discovery
        self.core, self.placer = core, placer
        if self.has_http:
            serve_http(self.host, process, self._api(core, placer, discovery, metrics, clock), self.token)
        self._note(self.name, "serves")

    def _api(
        self, core: Core, placer: Placer, discovery: Discovery, metrics: RouterMetrics, clock: Callable[[], float]
    ) -> HttpApi:
        """Return the HTTP API of a process, without what proxied requests and texts need."""
        config, http = self._config, metrics.http
        settings = LiveSettings(config, metrics=http.access.files)
        access = Access(settings, http.access, clock=clock, wall_clock=self._loop.time)
        return build_api(core, placer, config, http, clock, sources=discovery, access=access)

    async def _discover(
        self, core: Core, metrics: RouterMetrics, clock: Callable[[], float], supervisor: TaskSupervisor
    ) -> Discovery:
        """Start the reconciliation with the list of workers. Raises StoreError."""
        allowed = AllowList(self._config.allow_hosts)
        self._source = None if self.listed is None else ListSource(self.listed)
        discovery = Discovery(
            core.fleet,
            core.registrations,
            [] if self._source is None else [self._source],
            # The list names models and events, so no engine is queried.
            session=None,  # type: ignore[arg-type]
            engine_key=EngineKey(None, allowed),
            allowed=allowed,
            metrics=metrics.discovery,
            clock=clock,
            rng=self._new_rng(),
            supervisor=supervisor,
        )
        await discovery.start()
        return discovery

    def _fail(self, process: Process) -> None:
        if self.process is process:
            self.kill()
            self._loop.after(RESTART_S, self.start)

    def _new_rng(self) -> random.Random:
        return random.Random(self._rng.getrandbits(64))

    def kill(self, *, silently: bool = False) -> None:
        """End the process without any clean-up, and its host with it if that is to be silent."""
        process = self.process
        if process is None:
            return
        self._note(self.name, f"is killed{' without a word' if silently else ''}")
        process.kill()
        self._ended += (process, self.core, self.placer)
        self._loop.network.fell(self.host, silently=silently)
        self.host.is_up = not silently
        self.process = self.core = self.placer = None

    def stop(self) -> None:
        """End the process in order, as after SIGTERM."""
        process, core, placer = self.process, self.core, self.placer
        if process is None:
            return
        if core is None or placer is None or process.standing is not Standing.RUNS:
            self.kill()
            return
        self._note(self.name, "stops")
        self.host.listeners.clear()
        self.core = self.placer = None

        async def close() -> None:
            await self._discovery.stop()
            await placer.stop()
            await core.stop()
            await self._store.close()
            self._loop.after(0.0, self._ended_well)

        self._tasks.append(process.start(close()))

    def _ended_well(self) -> None:
        if self.process is not None and self.core is None:
            self.kill()

    def pause(self) -> None:
        """Let the process stand still while time goes on."""
        if self.process is not None and self.process.standing is Standing.RUNS:
            self._note(self.name, "stands still")
            self.process.standing = Standing.PAUSED

    def resume(self) -> None:
        """Let the process go on."""
        if self.process is not None and self.process.standing is Standing.PAUSED:
            self._note(self.name, "goes on")
            self.process.standing = Standing.RUNS
            self.resumed_s = self._loop.time()


class HistoryHandler(logging.Handler):
    """The log lines of all simulated processes, as lines of the history."""

    def __init__(self, note: Callable[[str, str], None]) -> None:
        super().__init__()
        self._note_line = note
        self._plain = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "taskName"}

    def emit(self, record: logging.LogRecord) -> None:
        """Note a line with all that it says."""
        from tests.simulation.virtual_loop import PROCESS

        process = PROCESS.get()
        extra = " ".join(f"{name}={value}" for name, value in vars(record).items() if name not in self._plain)
        error = "" if record.exc_info is None else f" {record.exc_info[1]!r}"
        self._note_line("?" if process is None else process.name, f"{record.getMessage()} {extra}{error}".strip())
