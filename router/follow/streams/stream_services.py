# SPDX-License-Identifier: Apache-2.0
"""The services that all streams of one router process share."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Callable

import zmq

from kvrouter.events.transport.flood_watch import FloodWatch
from kvrouter.events.transport.permits import Permits
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.base.common.task_supervisor import TaskSupervisor
from kvrouter.router.follow.feed.event_feed import EventFeed
from kvrouter.router.follow.streams.held_workers import HeldWorkers
from kvrouter.router.follow.streams.ingest_turns import IngestTurns
from kvrouter.router.follow.streams.lease_rounds import LeaseRounds
from kvrouter.router.follow.streams.mirror_lead import MirrorSource
from kvrouter.router.follow.streams.stream_metrics import StreamMetrics
from kvrouter.router.index.store.store import IndexStore
from kvrouter.router.model.config.settings import Config
from kvrouter.router.model.engines.engine_metrics import EngineLoad
from kvrouter.router.model.upstream.engine_client import EngineClient
from kvrouter.router.model.workers.allow_list import AllowList


@dataclasses.dataclass(frozen=True)
class StreamServices:
    """The services that all streams of one process share."""

    store: IndexStore
    # Renews the leases.
    leases: LeaseRounds
    # The workers that the process follows.
    held: HeldWorkers
    # The turns in which the streams apply items.
    turns: IngestTurns
    # Identifies the process in leases.
    token: str
    config: Config
    metrics: StreamMetrics
    context: zmq.Context[zmq.Socket[bytes]]
    clock: Callable[[], float]
    rng: random.Random
    # Polls engines for liveness; None disables the polls.
    http: EngineClient | None
    # Bounds how many polls run at once.
    polls: asyncio.Semaphore
    allowed: AllowList
    permits: Permits
    supervisor: TaskSupervisor
    # The process leads a worker's part of the mirror while it follows the worker.
    mirror: MirrorSource
    # Publishes the events of the fleet.
    feed: EventFeed
    # The rest of the fleet, which knows the streams, is known to them only by these functions.
    # Returns whether this process should follow a worker.
    mine: Callable[[WorkerKey], bool]
    # Returns whether the router with a token has not named a worker in its heartbeats since a time.
    disowns: Callable[[str, WorkerKey, float], bool]
    # Called when the view of a worker has changed.
    view_changed: Callable[[WorkerKey], None]
    # Called with each load that the engine of a worker reports, for the core that has the worker's rank.
    engine_load: Callable[[WorkerKey, EngineLoad], None]
    # Ends connections on which an event source sends more unread bytes than it may.
    watch: FloodWatch = dataclasses.field(default_factory=FloodWatch)
    # The secret CURVE key of the router for the engines' patches; None makes a new one for each connection.
    patch_secret: bytes | None = dataclasses.field(default=None, repr=False)

    def new_epoch(self) -> str:
        """Return a random name for an epoch, 16 hex digits."""
        return f"{self.rng.getrandbits(64):016x}"
