# SPDX-License-Identifier: Apache-2.0
"""A worker that is unregistered leaves nothing in memory, even if no full garbage collection runs for hours."""

from __future__ import annotations

import asyncio
import gc
import random
import time
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest
import zmq

from kvrouter.events.vllm.publisher import EventPublisher
from kvrouter.router.app.core.core_metrics import CoreMetrics
from kvrouter.router.app.core.router_core import Core
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.base.telemetry.metric_registry import MetricRegistry
from kvrouter.router.index.store.store import IndexStore
from kvrouter.router.model.config.settings import Config
from kvrouter.router.model.upstream.engine_client import EngineClient
from kvrouter.router.model.workers.allow_list import AllowList
from kvrouter.router.model.workers.engine_key import EngineKey
from kvrouter.router.model.workers.registration import NO_PATCH, Registration
from tests.support.engine_http import EngineHttp
from tests.support.fake_reporter import FakeReporter

pytestmark = pytest.mark.slow

Context = zmq.Context[zmq.Socket[bytes]]
ANY = "tcp://127.0.0.1:0"
TIMEOUT_S = 30.0


@asynccontextmanager
async def stock(context: Context, http: EngineHttp) -> AsyncIterator[Registration]:
    with EventPublisher(ANY, ANY, context=context) as publisher:
        publisher.publish(b"\x93\xcb?\xf0\x00\x00\x00\x00\x00\x00\x90\x00")
        yield Registration(
            WorkerKey("m", "gone"),
            events=publisher.endpoint,
            replay=publisher.replay_endpoint,
            url=http.url,
            patch=NO_PATCH,
        )


@asynccontextmanager
async def patched(context: Context, http: EngineHttp) -> AsyncIterator[Registration]:
    async with FakeReporter(context) as reporter:
        yield Registration(WorkerKey("m", "gone"), patch=reporter.requests_endpoint, url=http.url)


@pytest.mark.parametrize("engine", [stock, patched])
def test_a_removed_worker_leaves_nothing_behind(
    engine: Callable[[Context, EngineHttp], AbstractAsyncContextManager[Registration]], embedded_url: str
) -> None:
    async def until_live(core: Core) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while next(core.statuses()).state != "live":
                await asyncio.sleep(0.01)

    async def main() -> None:
        context: Context = zmq.Context()
        http = EngineHttp()
        store = await IndexStore.open(embedded_url)
        client = EngineClient(asyncio.get_running_loop(), EngineKey(None, AllowList()))
        async with engine(context, http) as registration:
            core = Core(
                store=store,
                config=Config(health_interval_s=0.05),
                metrics=CoreMetrics(MetricRegistry()),
                zmq_context=context,
                clock=time.monotonic,
                rng=random.Random(1),
                engine_client=client,
            )
            await core.start()
            await core.register(registration)
            await until_live(core)
            (follower,) = core.registry.followers.values()
            references: list[weakref.ref[Any]] = [weakref.ref(follower), weakref.ref(follower.state.ingest)]
            del follower
            await core.unregister("gone")
            # Callbacks that wait in the loop keep references for a moment.
            async with asyncio.timeout(TIMEOUT_S):
                while any(reference() for reference in references):
                    await asyncio.sleep(0.01)
            await core.stop()
            client.close()
        await store.close()
        http.stop()
        context.destroy(linger=0)

    gc.collect()
    gc.disable()
    try:
        asyncio.run(main())
    finally:
        gc.enable()
