# SPDX-License-Identifier: Apache-2.0
"""Routers in the test's process with their own discovery sources, on a real store."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import aiohttp
import zmq

from kvrouter.router.app.core.core_metrics import CoreMetrics
from kvrouter.router.app.core.router_core import Core
from kvrouter.router.base.telemetry.metric_registry import MetricRegistry
from kvrouter.router.follow.discovery.candidate import Candidate, candidate_of
from kvrouter.router.follow.discovery.discovery import Discovery
from kvrouter.router.follow.discovery.discovery_metrics import DiscoveryMetrics
from kvrouter.router.follow.discovery.source import Source
from kvrouter.router.index.store.store import IndexStore
from kvrouter.router.model.config.settings import Config
from kvrouter.router.model.workers.allow_list import AllowList
from kvrouter.router.model.workers.engine_key import EngineKey
from kvrouter.router.model.workers.listed_worker import listed_worker

TIMEOUT_S = 20.0
LOOK_S = 0.05
# Twenty looks, after which the test is sure that nothing happens.
STILL_S = 20 * LOOK_S


class Listed:
    """A discovery source that lists the workers that the test sets."""

    def __init__(self, name: str, *specs: str) -> None:
        self.name = name
        self.problem = ""
        self.shown: Sequence[Candidate] | None = None
        self.show(*specs)

    def show(self, *specs: str) -> None:
        """List these workers, with model and events endpoint, so that no engine is queried."""
        self.shown = [
            candidate_of(listed_worker(f"{spec},model=m,events=tcp://127.0.0.1:1"), self.name) for spec in specs
        ]

    async def run(self, changed: Callable[[], None]) -> None:
        """Return at once, as only the test changes the list."""


class Router:
    def __init__(self, core: Core, discovery: Discovery, registry: MetricRegistry) -> None:
        self.core = core
        self.discovery = discovery
        self._registry = registry

    @property
    def owners(self) -> dict[str, str]:
        """The source that each registered worker comes from, by the worker's id."""
        return {registration.worker.worker_id: registration.source for registration in self.core.registrations()}

    def url(self, worker_id: str) -> str | None:
        return next(
            registration.url for registration in self.core.registrations() if registration.worker.worker_id == worker_id
        )

    async def owners_are(self, **expected: str) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while self.owners != expected:
                await asyncio.sleep(0.01)

    async def owners_stay(self, **expected: str) -> None:
        until_s = time.monotonic() + STILL_S
        while time.monotonic() < until_s:
            assert self.owners == expected
            await asyncio.sleep(0.01)

    def metric(self, name: str, **labels: str) -> float:
        return self._registry.get_sample_value(f"kvrouter_{name}", labels) or 0.0


@asynccontextmanager
async def routing(
    url: str, *sources: Source, allow: tuple[str, ...] = (), asks_engines: bool = False
) -> AsyncIterator[Router]:
    """Run a router with these discovery sources.

    Args:
        url: The store.
        *sources: The discovery sources.
        allow: Hosts and networks that workers may have.
        asks_engines: Whether the core queries engines over HTTP, in addition to the queries of discovery.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    registry = MetricRegistry()
    async with AsyncExitStack() as stack:
        stack.callback(context.destroy, linger=0)
        store = await IndexStore.open(url)
        stack.push_async_callback(store.close)
        session = await stack.enter_async_context(aiohttp.ClientSession())
        core = Core(
            store=store,
            config=Config(health_interval_s=0.0, lease_ttl_s=0.5, allow_hosts=allow),
            metrics=CoreMetrics(registry),
            zmq_context=context,
            clock=time.monotonic,
            rng=random.Random(),
            http=session if asks_engines else None,
        )
        await core.start()
        stack.push_async_callback(core.stop)
        discovery = Discovery(
            core.fleet,
            core.registrations,
            sources,
            session=session,
            engine_key=EngineKey(None, AllowList()),
            allowed=AllowList(allow),
            metrics=DiscoveryMetrics(registry),
            clock=time.monotonic,
            rng=random.Random(),
            look_s=LOOK_S,
        )
        stack.push_async_callback(discovery.stop)
        await discovery.start()
        yield Router(core, discovery, registry)
