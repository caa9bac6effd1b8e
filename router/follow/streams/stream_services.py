# SPDX-License-Identifier: Apache-2.0
"""What all streams of one router process share."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Callable

import zmq

from kvrouter.events.transport.flood_watch import FloodWatch
from kvrouter.events.transport.permits import Permits
from kvrouter.router.base.common.task_supervisor import TaskSupervisor
from kvrouter.router.follow.feed.event_feed import EventFeed
from kvrouter.router.follow.streams.held_workers import HeldWorkers
from kvrouter.router.follow.streams.ingest_turns import IngestTurns
from kvrouter.router.follow.streams.lease_rounds import LeaseRounds
from kvrouter.router.follow.streams.mirror_lead import MirrorSource
from kvrouter.router.follow.streams.stream_metrics import StreamMetrics
from kvrouter.router.index.store.store import IndexStore
from kvrouter.router.model.config.settings import Config
from kvrouter.router.model.upstream.engine_client import EngineClient
from kvrouter.router.model.workers.allow_list import AllowList


@dataclasses.dataclass(frozen=True)
class StreamServices:
    """The services that all streams of one process share."""

    store: IndexStore
    # Renews the leases.
    leases: LeaseRounds
    # The workers that are followed.
    held: HeldWorkers
    # The turns in which the streams take items in.
    turns: IngestTurns
    # Names the process in leases.
    token: str
    config: Config
    metrics: StreamMetrics
    context: zmq.Context[zmq.Socket[bytes]]
    clock: Callable[[], float]
    rng: random.Random
    # Polls engines for liveness; None: no polls.
    http: EngineClient | None
    # Bounds how many polls run at once.
    polls: asyncio.Semaphore
    allowed: AllowList
    permits: Permits
    supervisor: TaskSupervisor
    # Led while the process follows a worker.
    mirror: MirrorSource
    # Where events of the fleet are published.
    feed: EventFeed
    # Looks at the bytes that event sources bring.
    watch: FloodWatch = dataclasses.field(default_factory=FloodWatch)
    # The CURVE key that engines' patches see; None: another for each connection.
    patch_secret: bytes | None = dataclasses.field(default=None, repr=False)

    def new_epoch(self) -> str:
        return f"{self.rng.getrandbits(64):016x}"
