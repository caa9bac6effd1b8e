# SPDX-License-Identifier: Apache-2.0
"""A worker's stream ends when it is stopped, even if its lease is lost at that very moment."""

from __future__ import annotations

import asyncio
import random
import time

import pytest
import zmq

from kvrouter.events.transport.permits import Permits
from kvrouter.router.app.core.core_metrics import CoreMetrics
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.base.common.task_supervisor import TaskSupervisor
from kvrouter.router.base.telemetry.metric_registry import MetricRegistry
from kvrouter.router.follow.fleet.mirror_sync import MirrorSync
from kvrouter.router.follow.fleet.store_contact import StoreContact
from kvrouter.router.follow.fleet.worker_registry import WorkerRegistry
from kvrouter.router.follow.streams.commit_loop import CommitLoop
from kvrouter.router.follow.streams.engine_poller import EnginePoller
from kvrouter.router.follow.streams.held_workers import HeldWorkers
from kvrouter.router.follow.streams.ingest_turns import IngestTurns
from kvrouter.router.follow.streams.lease_holder import LeaseHolder, LeaseLost
from kvrouter.router.follow.streams.lease_rounds import LeaseRounds
from kvrouter.router.follow.streams.source_switch import SourceSwitch
from kvrouter.router.follow.streams.stream_services import StreamServices
from kvrouter.router.follow.streams.worker_record import WorkerRecord
from kvrouter.router.index.store.store import IndexStore
from kvrouter.router.model.config.settings import Config
from kvrouter.router.model.workers.allow_list import AllowList
from kvrouter.router.model.workers.registration import Registration
from tests.support.bare_services import bare_feed

WORKER = WorkerKey("m", "stopping")


@pytest.mark.parametrize("stops", [True, False], ids=["stopping", "going on"])
async def test_a_lease_lost_while_stopping_does_not_keep_the_stream_running(stops: bool, embedded_url: str) -> None:
    store = await IndexStore.open(embedded_url)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    rng, clock, metrics = random.Random(1), time.monotonic, CoreMetrics(MetricRegistry())
    supervisor = TaskSupervisor(clock=clock, rng=rng)
    mirror = MirrorSync(
        WorkerRegistry(),
        store=store,
        contact=StoreContact(metrics=metrics.fleet, clock=clock),
        metrics=metrics.fleet,
        clock=clock,
        rng=rng,
        supervisor=supervisor,
        budget_bytes=1 << 24,
    )
    services = StreamServices(
        store=store,
        leases=LeaseRounds(store.leases, "t", 1.0, lambda: 0),
        held=HeldWorkers(),
        turns=IngestTurns(),
        token="t",
        config=Config(),
        metrics=metrics.streams,
        context=context,
        clock=clock,
        rng=rng,
        http=None,
        polls=asyncio.Semaphore(1),
        allowed=AllowList(),
        permits=Permits(rng=rng),
        supervisor=supervisor,
        mirror=mirror,
        feed=bare_feed(clock, metrics.watch),
    )
    record = WorkerRecord(Registration(WORKER), services, lambda: None)
    lease = LeaseHolder(
        WORKER, services, mine=lambda: True, disowns=lambda token, since_s: False, changed=record.store_changed
    )
    commits = CommitLoop(record, lease, services)
    engine = EnginePoller(record, commits, services, lambda said: None)
    lost = asyncio.Event()

    async def loses() -> None:
        await lost.wait()
        raise LeaseLost("at the same moment")

    following = asyncio.ensure_future(SourceSwitch(record, lease, commits, engine, services).hold(loses()))
    await asyncio.sleep(0)
    lost.set()
    if stops:
        record.facts.stopping = True
        following.cancel()
    (ended,) = await asyncio.gather(following, return_exceptions=True)
    await store.close()
    context.destroy(linger=0)
    assert isinstance(ended, asyncio.CancelledError if stops else LeaseLost)
