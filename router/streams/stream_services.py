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
from kvrouter.router.common.task_supervisor import TaskSupervisor
from kvrouter.router.config.settings import Config
from kvrouter.router.index.store import IndexStore
from kvrouter.router.streams.held_workers import HeldWorkers
from kvrouter.router.streams.ingest_turns import IngestTurns
from kvrouter.router.streams.lease_rounds import LeaseRounds
from kvrouter.router.streams.mirror_lead import MirrorSource
from kvrouter.router.streams.stream_metrics import StreamMetrics
from kvrouter.router.upstream.engine_client import EngineClient
from kvrouter.router.watch.event_feed import EventFeed
from kvrouter.router.workers.allow_list import AllowList


@dataclasses.dataclass(frozen=True)
class StreamServices:
    """token: names the process in leases. leases: renews them. held: the workers that are followed. turns: of all
    streams that take items in. mirror: led while the process follows a worker. http: polls engines for liveness; None:
    no polls. polls: bounds how many at once. feed: where what happens is published. watch: looks at what event sources
    bring. patch_secret: the CURVE key that engines' patches see; None: another for each connection."""

    store: IndexStore
    leases: LeaseRounds
    held: HeldWorkers
    turns: IngestTurns
    token: str
    config: Config
    metrics: StreamMetrics
    context: zmq.Context[zmq.Socket[bytes]]
    clock: Callable[[], float]
    rng: random.Random
    http: EngineClient | None
    polls: asyncio.Semaphore
    allowed: AllowList
    permits: Permits
    supervisor: TaskSupervisor
    mirror: MirrorSource
    feed: EventFeed
    watch: FloodWatch = dataclasses.field(default_factory=FloodWatch)
    patch_secret: bytes | None = dataclasses.field(default=None, repr=False)

    def new_epoch(self) -> str:
        return f"{self.rng.getrandbits(64):016x}"
