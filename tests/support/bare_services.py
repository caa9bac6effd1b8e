# SPDX-License-Identifier: Apache-2.0
"""The `StreamServices` of worker streams without a store and without sockets, on a clock that the test moves."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any, cast

from kvrouter.events.transport.permits import Permits
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.base.common.task_supervisor import TaskSupervisor
from kvrouter.router.base.telemetry.metric_registry import MetricRegistry
from kvrouter.router.follow.feed.event_feed import EventFeed
from kvrouter.router.follow.feed.watch_metrics import WatchMetrics
from kvrouter.router.follow.streams.engine_poller import POLLS_AT_ONCE
from kvrouter.router.follow.streams.held_workers import HeldWorkers
from kvrouter.router.follow.streams.ingest_turns import IngestTurns
from kvrouter.router.follow.streams.lease_rounds import LeaseRounds
from kvrouter.router.follow.streams.stream_metrics import StreamMetrics
from kvrouter.router.follow.streams.stream_services import StreamServices
from kvrouter.router.model.config.settings import Config
from kvrouter.router.model.workers.allow_list import AllowList


def bare_feed(clock: Callable[[], float], metrics: WatchMetrics | None = None) -> EventFeed:
    return EventFeed(life="life", wall_clock=clock, metrics=metrics or WatchMetrics(MetricRegistry()))


def bare_services(
    clock: Callable[[], float], http: Any = None, view_changed: Callable[[WorkerKey], None] = lambda worker: None
) -> StreamServices:
    rng = random.Random(1)
    return StreamServices(
        store=cast(Any, None),
        leases=LeaseRounds(cast(Any, None), "t", 1.0, lambda: 0),
        held=HeldWorkers(),
        turns=IngestTurns(),
        token="t",
        config=Config(),
        metrics=StreamMetrics(MetricRegistry()),
        context=cast(Any, None),
        clock=clock,
        rng=rng,
        http=http,
        polls=asyncio.Semaphore(POLLS_AT_ONCE),
        allowed=AllowList(),
        permits=Permits(rng=rng),
        supervisor=TaskSupervisor(clock=clock, rng=rng),
        mirror=cast(Any, None),
        feed=bare_feed(clock),
        mine=lambda worker: True,
        disowns=lambda token, worker, since_s: False,
        view_changed=view_changed,
        engine_load=lambda worker, load: None,
    )
