# SPDX-License-Identifier: Apache-2.0
"""A worker's stream ends when it is told to, also when its hold is lost at that very moment."""

from __future__ import annotations

import asyncio
import random
import time

import zmq
from prometheus_client import CollectorRegistry

from kvrouter.events.transport.permits import Permits
from kvrouter.router.common.ids import WorkerKey
from kvrouter.router.common.task_supervisor import TaskSupervisor
from kvrouter.router.config.settings import Config
from kvrouter.router.fleet.mirror_sync import MirrorSync
from kvrouter.router.fleet.store_contact import StoreContact
from kvrouter.router.fleet.worker_registry import WorkerRegistry
from kvrouter.router.index.store import IndexStore
from kvrouter.router.streams.lease_holder import LeaseLost
from kvrouter.router.streams.worker_stream import WorkerStream
from kvrouter.router.telemetry.metrics import Metrics
from kvrouter.router.workers.allow_list import AllowList
from kvrouter.router.workers.registration import Registration


def test_a_hold_lost_while_stopping_does_not_keep_it_going(embedded_url: str) -> None:
    async def main() -> None:
        store = await IndexStore.open(embedded_url)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        metrics, supervisor = Metrics(CollectorRegistry()), TaskSupervisor(clock=time.monotonic, rng=random.Random(1))
        mirror = MirrorSync(
            WorkerRegistry(), store=store, contact=StoreContact(metrics=metrics, clock=time.monotonic),
            metrics=metrics, clock=time.monotonic, rng=random.Random(1), supervisor=supervisor, budget_bytes=1 << 24,
        )  # fmt: skip
        stream = WorkerStream(
            Registration(WorkerKey("m", "stopping")), store=store, token="t", config=Config(), mirror=mirror,
            metrics=metrics, context=context, clock=time.monotonic, rng=random.Random(1), http=None,
            new_epoch=lambda: "e", allowed=AllowList(), permits=Permits(rng=random.Random(1)),
            supervisor=supervisor,
            mine=lambda worker: True, changed=lambda: None,
            engine_load=lambda said: None,
        )  # fmt: skip
        lost = asyncio.Event()

        async def loses() -> None:
            await lost.wait()
            raise LeaseLost("at the same moment")

        following = stream._task = asyncio.ensure_future(stream._run_group(loses()))
        await asyncio.sleep(0)
        lost.set()
        await stream.stop()
        (ended,) = await asyncio.gather(following, return_exceptions=True)
        await store.close()
        context.destroy(linger=0)
        assert isinstance(ended, asyncio.CancelledError)

    asyncio.run(main())
