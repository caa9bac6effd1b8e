# SPDX-License-Identifier: Apache-2.0
"""Whole routers without their HTTP on one store, and an engine that they follow."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import numpy as np
import zmq

from kvrouter.router.app.core.core_metrics import CoreMetrics
from kvrouter.router.app.core.router_core import Core
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.base.telemetry.metric_registry import MetricRegistry
from kvrouter.router.index.matching.question import Question
from kvrouter.router.index.store import keys
from kvrouter.router.index.store.store import IndexStore
from kvrouter.router.model.config.settings import Config
from kvrouter.router.model.upstream.engine_client import EngineClient
from kvrouter.router.model.workers.allow_list import AllowList
from kvrouter.router.model.workers.engine_key import EngineKey
from kvrouter.router.model.workers.registration import NO_PATCH, Registration
from tests.support.fake_engine import FakeEngine, hashes, prompt, stored
from tests.support.store_server import StoreServer
from tests.support.stored_residency import read_residency

WORKER = WorkerKey("m", "w")
TOKENS = prompt(1, 12)
CHAIN = hashes(TOKENS)
WAIT_S = 30.0
SUSPECT_CREDIT_S = 2.0
FIRST, SECOND = "first-router", "second-router"


def registration(engine: FakeEngine, **more: Any) -> Registration:
    return Registration(WORKER, events=engine.endpoint, replay=engine.replay_endpoint, patch=NO_PATCH, **more)


@asynccontextmanager
async def router(
    server: StoreServer, token: str, watch: Callable[[Core], None] = lambda core: None, **settings: Any
) -> AsyncIterator[Core]:
    """Run one router's core on the store; `watch` gets the core before it starts."""
    async with AsyncExitStack() as stack:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        stack.push_async_callback(asyncio.to_thread, context.destroy, linger=0)
        store = await IndexStore.open(server.url)
        stack.push_async_callback(store.close)
        client = EngineClient(asyncio.get_running_loop(), EngineKey(None, AllowList()))
        stack.callback(client.close)
        core = Core(
            store=store,
            config=Config(suspect_credit_s=SUSPECT_CREDIT_S, health_interval_s=0.1, **settings),
            metrics=CoreMetrics(MetricRegistry()),
            zmq_context=context,
            clock=time.monotonic,
            rng=random.Random(token),
            engine_client=client,
            token=token,
        )
        watch(core)
        await core.start()
        stack.push_async_callback(core.stop)
        yield core


async def until(reached: Callable[[], Any], what: str, timeout_s: float = WAIT_S) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (result := reached()):
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.005)
    return result


async def until_taken_in(core: Core, seq: int) -> None:
    """Wait until the router has taken in a batch, and fail if it takes in none for a while, however busy it is."""
    while (before := status(core).seq) != seq:
        await until(lambda before=before: status(core).seq != before, f"nothing is taken in after {before}")  # type: ignore[misc]


def shows(core: Core, seq: int) -> bool:
    return status(core).seq == seq


def reused(core: Core) -> int:
    """Return how many blocks of the prompt the router predicts that the worker will reuse."""
    (hit,) = core.ask(Question("m", len(TOKENS), token_ids=np.array(TOKENS, np.int64)))
    return hit.on_gpu // 16


def status(core: Core) -> Any:
    (worker_status,) = core.statuses()
    return worker_status


def is_well(core: Core, blocks: int) -> bool:
    row = status(core)
    return row.state == "live" and row.credited and reused(core) == blocks and not core.health()


def held_in_store(server: StoreServer) -> set[int]:
    return read_residency(server.client, f"{keys.PREFIX}{keys.worker_tag(WORKER)}").get("g0:GPU", set())


@asynccontextmanager
async def following(
    server: StoreServer, engine: FakeEngine, url: str | None = None, **settings: Any
) -> AsyncIterator[Core]:
    """Run the first router, which follows the engine and has applied the 12 blocks that it published."""
    async with router(server, FIRST, **settings) as core:
        await core.register(registration(engine, url=url))
        engine.publish(stored(TOKENS, 0, 12))
        await until(lambda: is_well(core, 12), "the worker is not live")
        yield core
