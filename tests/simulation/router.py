# SPDX-License-Identifier: Apache-2.0
"""A simulated router process: the real core and placement on the virtual loop, wired as `assembly.py` wires them."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvrouter.events.transport.flood_watch import FloodWatch
from kvrouter.router.app.core.router_core import Core
from kvrouter.router.app.server.router_metrics import RouterMetrics
from kvrouter.router.base.common.random_ids import RandomIds
from kvrouter.router.base.common.task_supervisor import TaskSupervisor
from kvrouter.router.base.redis_client.errors import StoreError
from kvrouter.router.base.telemetry.metric_registry import MetricRegistry
from kvrouter.router.follow.feed.event_feed import EventFeed
from kvrouter.router.index.store.store import IndexStore
from kvrouter.router.model.config.settings import Config
from kvrouter.router.model.upstream.engine_client import EngineClient
from kvrouter.router.model.workers.allow_list import AllowList
from kvrouter.router.model.workers.engine_key import EngineKey
from kvrouter.router.observe.decisions.decision_log import DecisionLog
from kvrouter.router.route.placement.placer import Placer
from kvrouter.router.serve.proxy.admission import Admission
from tests.simulation.network import Host
from tests.simulation.store.store import PORT
from tests.simulation.virtual_loop import Process, Standing
from tests.simulation.zmq_network import SimulatedContext

if TYPE_CHECKING:
    from tests.simulation.virtual_loop import VirtualLoop

LEASE_S = 2.0
REPLAY_TIMEOUT_S = 2.0
MIRROR_BYTES = 16 << 20
HEALTH_INTERVAL_S = 1.0
# How soon a process that could not start is started again.
RESTART_S = 1.0


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
    ) -> None:
        self.name, self.host = name, host
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

    def start(self) -> None:
        """Start a process."""
        if self.process is not None:
            return
        self.host.is_up = True
        self.token = f"{self._rng.getrandbits(64):016x}"
        self.tokens.append(self.token)
        self.process = self._loop.add_process(self.name)
        self.started_s = self._loop.time()
        self._note(self.name, f"starts as {self.token}")
        self._tasks.append(self.process.start(self._open(self.process)))

    async def _open(self, process: Process) -> None:
        """Join and start the parts."""
        rng = self._rng
        offset_s = rng.uniform(0.0, 1e6)
        clock = lambda: self._loop.time() + offset_s  # noqa: E731
        config = Config(
            lease_ttl_s=LEASE_S,
            replay_timeout_s=REPLAY_TIMEOUT_S,
            mirror_budget_bytes=MIRROR_BYTES,
            segment_memory_bytes=0,
            health_interval_s=HEALTH_INTERVAL_S,
        )
        registry = self.registries[self.token] = MetricRegistry()
        metrics = RouterMetrics(registry)
        supervisor = TaskSupervisor(clock=clock, rng=self._new_rng(), failures=registry.task_failures)
        feed = EventFeed(life=f"{rng.getrandbits(32):08x}", wall_clock=self._loop.time, metrics=metrics.core.watch)
        decisions = DecisionLog(config.decisions_kept, feed, clock, metrics.core.watch)
        self.context = SimulatedContext(self._loop, self.host, self._new_rng())
        try:
            store = await IndexStore.open(self._url)
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
        except StoreError as error:
            self._note(self.name, f"does not start: {error}")
            self._loop.after(0.0, lambda: self._fail(process))
            return
        self._store, self._metrics, self._supervisor = store, registry, supervisor
        self.core, self.placer = core, placer
        self._note(self.name, "serves")

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
        self.core = self.placer = None

        async def close() -> None:
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
