# SPDX-License-Identifier: Apache-2.0
"""The router without its HTTP: it follows workers, keeps the mirror and answers questions.

Belongs to one asyncio loop. `ask` is synchronous and does no I/O; everything that waits is in tasks.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import aiohttp
import msgspec
import zmq

from kvrouter.contract.fleet_event import EventType
from kvrouter.contract.worker_status import WorkerStatus
from kvrouter.events.transport.flood_watch import FloodWatch
from kvrouter.events.transport.permits import Permits
from kvrouter.router.app.core.core_metrics import CoreMetrics
from kvrouter.router.app.core.hand_overs import HandOvers
from kvrouter.router.app.core.hit_finder import HitFinder
from kvrouter.router.app.core.registration_judge import RegistrationJudge
from kvrouter.router.app.core.worker_report import count_worker, worker_status
from kvrouter.router.base.common import compiled, ticks
from kvrouter.router.base.common.errors import RouterError
from kvrouter.router.base.common.escaping import printable
from kvrouter.router.base.common.event_wait import set_within
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.base.common.task_supervisor import TaskSupervisor
from kvrouter.router.base.redis_client.errors import StoreError
from kvrouter.router.follow.feed.event_feed import EventFeed
from kvrouter.router.follow.feed.fleet_event import UNREGISTERED
from kvrouter.router.follow.fleet.adoption import Adoption
from kvrouter.router.follow.fleet.fleet import Fleet
from kvrouter.router.follow.fleet.mirror_sync import MirrorSync
from kvrouter.router.follow.fleet.registration_mark import RegistrationMark
from kvrouter.router.follow.fleet.router_peers import RouterPeers
from kvrouter.router.follow.fleet.store_contact import StoreContact
from kvrouter.router.follow.fleet.worker_registry import WorkerRegistry
from kvrouter.router.follow.streams.engine_poller import POLLS_AT_ONCE
from kvrouter.router.follow.streams.held_workers import HeldWorkers
from kvrouter.router.follow.streams.ingest_turns import IngestTurns
from kvrouter.router.follow.streams.lease_rounds import LeaseRounds
from kvrouter.router.follow.streams.stream_services import StreamServices
from kvrouter.router.follow.streams.worker_state import WorkerState
from kvrouter.router.index.matching.matcher import HitTable, WorkerView
from kvrouter.router.index.matching.question import Hit, Question, filter_hits
from kvrouter.router.index.matching.routing_history import RoutingHistory
from kvrouter.router.index.store.store import IndexStore
from kvrouter.router.model.config.agreement import agreed_settings
from kvrouter.router.model.config.cautions import evicting, open_to_all, open_to_pages
from kvrouter.router.model.config.settings import Config
from kvrouter.router.model.engines.engine import Engine
from kvrouter.router.model.engines.engine_lists import LOOK_S, EngineLists
from kvrouter.router.model.kvcache.prompt_hasher import SegmentMemory
from kvrouter.router.model.upstream.engine_client import EngineClient
from kvrouter.router.model.workers.allow_list import AllowList
from kvrouter.router.model.workers.engine_key import EngineKey
from kvrouter.router.model.workers.model_names import ModelNames, ServedModel, parse_aliases
from kvrouter.router.model.workers.provenance import registered_twice
from kvrouter.router.model.workers.registration import Registration
from kvrouter.router.model.workers.request_rank import request_ranks
from kvrouter.router.model.workers.role import HandoverWay
from kvrouter.router.model.workers.stream_state import StreamState

log = logging.getLogger(__name__)

# The interval at which past incidents of workers are forgotten, and workers with the same publisher are looked for.
TEND_INTERVAL_S = 1.0
# The interval at which the store's eviction policy is read, since it may be changed while the store runs.
STORE_SETTINGS_S = 30.0


class Core:
    """The joined parts of a router, one attribute each. `fleet` registers and drops workers; `registry` has them."""

    def __init__(
        self,
        *,
        store: IndexStore,
        config: Config,
        metrics: CoreMetrics,
        zmq_context: zmq.Context[zmq.Socket[bytes]],
        clock: Callable[[], float],
        rng: random.Random,
        http: aiohttp.ClientSession | None = None,
        engine_client: EngineClient | None = None,
        engine_key: EngineKey | None = None,
        token: str | None = None,
        supervisor: TaskSupervisor | None = None,
        feed: EventFeed | None = None,
        patch_secret: bytes | None = None,
        store_folder: Path | None = None,
        watch: FloodWatch | None = None,
    ) -> None:
        """Join the parts without opening anything.

        Args:
            store: The index in Redis.
            config: The settings.
            metrics: The metrics of the core and its parts.
            zmq_context: Makes the sockets for engines' events.
            clock: Returns the current time in seconds.
            rng: Spreads pauses and retries.
            http: Session that queries engines for their lists; None: they are not queried.
            engine_client: Polls engines for liveness and load; None: they are not polled.
            engine_key: Decides which engines get a key with the queries of `http`; None: none does.
            token: Names this process in leases. A token that outlives the process lets its successor take over at once.
            supervisor: Keeps the tasks running; None: a new one.
            feed: Receives the fleet's events; None: a new feed without subscribers.
            patch_secret: The CURVE key that engines' patches see; None: a different one for each connection.
            store_folder: The folder of a private store; None: the store is shared.
            watch: Ends connections that bring too much; None: one that reads this process's memory from the kernel.
        """
        self._store = store
        self._config = config
        self._metrics = metrics
        self._clock = clock
        token = token or secrets.token_hex(8)
        self._supervisor = supervisor or TaskSupervisor(clock=clock, rng=rng)
        self._allowed = AllowList(config.allow_hosts)
        self._permits = Permits(rng=rng)
        self._memory = SegmentMemory(config.segment_memory_bytes)
        self._history = RoutingHistory(config.approximate_ttl_s)
        self.registry = WorkerRegistry()
        self.contact = StoreContact(metrics=metrics.fleet, clock=clock)
        held_workers = HeldWorkers()
        self.peers = RouterPeers(
            self.registry,
            store=store,
            held=held_workers,
            contact=self.contact,
            metrics=metrics.fleet,
            clock=clock,
            token=token,
            ttl_s=config.lease_ttl_s,
            settings=agreed_settings(config),
        )
        self.mirror_sync = MirrorSync(
            self.registry,
            store=store,
            contact=self.contact,
            metrics=metrics.fleet,
            clock=clock,
            rng=rng,
            supervisor=self._supervisor,
            budget_bytes=config.mirror_budget_bytes,
        )
        self.engine_lists = EngineLists(
            http, engine_key or EngineKey(None, self._allowed), self._urls, self._on_engine_lists
        )
        self._kinds_shown = asyncio.Event()
        self.finder = HitFinder(
            self.registry,
            self.mirror_sync.mirror,
            self._memory,
            self._history,
            adapters=lambda: self.engine_lists.adapters,
            clock=clock,
        )
        self._judge = RegistrationJudge(self.registry, self.engine_lists, clock)
        self._names = ModelNames(parse_aliases(config.model_aliases))
        self._names_known = self._loaded = False
        # The result of `request_ranks`, or None if registrations or engines have changed since it was computed.
        self._request_ranks: dict[WorkerKey, int] | None = None
        self._feed = feed or EventFeed(life=token, wall_clock=clock, metrics=metrics.watch)
        self.registry.subscribe(members=self._on_members, view=self._on_view)
        metrics.before_page(self._measure)
        metrics.resident_blocks.counts = lambda: (
            (worker, follower.state.counts()) for worker, follower in self.registry.followers.items()
        )

        leases = LeaseRounds(store.leases, token, config.lease_ttl_s, lambda: self.peers.assignment)
        services = StreamServices(
            store=store,
            leases=leases,
            held=held_workers,
            turns=IngestTurns(),
            token=token,
            config=config,
            metrics=metrics.streams,
            context=zmq_context,
            clock=clock,
            rng=rng,
            http=engine_client,
            polls=asyncio.Semaphore(POLLS_AT_ONCE),
            allowed=self._allowed,
            permits=self._permits,
            supervisor=self._supervisor,
            mirror=self.mirror_sync,
            feed=self._feed,
            mine=self.peers.is_mine,
            disowns=self.peers.disowns,
            view_changed=self.registry.view_changed,
            engine_load=self.registry.take_engine_load,
            patch_secret=patch_secret,
            watch=watch or FloodWatch(pause_s=ticks.pause_s),
        )
        self.fleet = Fleet(
            self.registry,
            store=store,
            config=config,
            metrics=metrics.fleet,
            clock=clock,
            allowed=self._allowed,
            peers=self.peers,
            mirror=self.mirror_sync,
            services=services,
        )
        self.registration_mark = RegistrationMark(self.registry, store_folder)
        # Numbers that JSON readers hold exactly.
        self.hand_overs = HandOvers(self.registry, patch_secret, lambda: rng.randrange(1 << 53))
        self.adoption = Adoption(self.fleet, store.schemas, metrics=metrics.fleet, clock=clock)
        self._runs = {
            "mirror": self.mirror_sync.follow,
            "mirror_reload": self.mirror_sync.reload,
            "mirror_sweep": self.mirror_sync.sweep,
            "tend": self._tend,
            "heartbeat": self.peers.beat_always,
            "leases": leases.run,
            "followers": self.peers.judge_followers,
            "registry": self.fleet.watch_registry,
            "schemas": self.adoption.watch,
            "store_settings": self._watch_store_settings,
        }
        if http is not None:
            self._runs["engine_lists"] = self.engine_lists.run
            self._runs["engine_kinds"] = self._name_engines
        self._tasks: list[asyncio.Task[None]] = []
        self._segments_counted = (0, 0)
        # Workers that show a reason that may no longer apply.
        self._unsettled: set[WorkerKey] = set()
        # A sentence for each server of the store that evicts.
        self._evicting: list[str] = []

    async def start(self) -> None:
        """Load the contents of Redis, then follow Redis and the workers. Raises StoreError if Redis cannot be read."""
        await self.fleet.start()
        await self.adoption.look()
        self.registration_mark.compare()
        self._loaded = True
        self._judge.judge()
        self._tasks += [self._supervisor.start(name, run) for name, run in self._runs.items()]

    async def stop(self) -> None:
        """End all tasks; what was committed stays in Redis."""
        for task in self._tasks:
            task.cancel()
        self._judge.stop()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.fleet.stop()
        await self.mirror_sync.close()
        await self.peers.leave()

    def apply(self, config: Config) -> None:
        """Apply the settings that can change at run time."""
        self._names.aliases = parse_aliases(config.model_aliases)
        self._names_known = False
        self.peers.settings = agreed_settings(config)

    async def register(self, registration: Registration) -> None:
        """Register a worker, or replace its registration; registering the same again changes nothing.

        Raises HostNotAllowed, or Conflict if a source that takes precedence registers it differently.
        """
        await self.fleet.register(registration)

    async def change(
        self, worker: WorkerKey, change: Callable[[Registration | None], Registration | None]
    ) -> Registration | None:
        """Register a worker as its newest registration requires, and return that registration.

        Args:
            worker: The worker.
            change: Takes the newest registration, or None; returns the one to register, or None to change nothing.

        Raises:
            HostNotAllowed, Conflict: As `register` does.
        """
        return await self.fleet.change(worker, change)

    async def unregister(self, worker_id: str, dp_rank: int | None = None, model: str | None = None) -> int:
        """Drop the workers that match, with their residency, and return how many matched; None matches all.

        Raises Conflict if a source of a living router would register one again.
        """
        return await self.fleet.unregister(worker_id, dp_rank, model)

    def _on_members(self, worker: WorkerKey | None) -> None:
        self._names_known = False
        self._request_ranks = None
        if worker is not None:
            self._unsettled.add(worker)
        follower = None if worker is None else self.registry.followers.get(worker)
        url = None if follower is None else follower.state.registration.url
        # At the start all registrations are loaded first, and then all engines are queried.
        if self._loaded and url is not None and not self._allowed.problem(url):
            self.engine_lists.look_soon(url)

    def _on_view(self, worker: WorkerKey, view: WorkerView | None) -> None:
        self._unsettled.add(worker)
        if view is None:
            self._feed.of_worker(EventType.STATE, worker, state=UNREGISTERED, credited=False)

    def _on_engine_lists(self) -> None:
        self._names_known = False
        self._request_ranks = None
        self.finder.apply_adapters()
        self._judge.judge()
        self._kinds_shown.set()

    async def _name_engines(self) -> None:
        """Register the kind of engine that a worker's HTTP shows, if none is stated and it is followed as another."""
        while True:
            # Look also without an event: when a patch ends, a worker may remain whose engine was known by the patch
            # alone.
            await set_within(self._kinds_shown, LOOK_S)
            self._kinds_shown.clear()
            for registration in self.registrations():
                engine, follower = (
                    self.engine_lists.kinds.get(registration.url or ""),
                    self.registry.followers.get(registration.worker),
                )
                if (
                    engine is None
                    or follower is None
                    or registration.engine is not None
                    or follower.state.profile.engine is engine
                ):
                    continue
                log.info("engine recognised", extra={"worker": registration.worker, "engine": engine.name})
                try:
                    await self.fleet.change(registration.worker, partial(_with_engine, registration.url, engine.name))
                except RouterError as error:
                    log.warning("engine not registered", extra={"worker": registration.worker, "reason": error.message})

    def registrations(self) -> Sequence[Registration]:
        """Return all registrations; the same object until one of them changes."""
        return self.registry.registrations()

    def request_ranks(self) -> Mapping[WorkerKey, int]:
        """Return the rank to send with a request, for each worker that needs one; the same object until one changes."""
        if self._request_ranks is None:
            self._request_ranks = request_ranks(self.registrations(), self.engine_lists.sources)
        return self._request_ranks

    def handover(self, worker: WorkerKey) -> HandoverWay:
        """Return how the worker learns where its prompt was computed."""
        return self.registry.handover(worker)

    def given_id(self, worker: WorkerKey) -> str | int:
        """Return the worker's id in the type of its registration, a number or a text."""
        return self.registry.given_id(worker)

    def is_draining(self, worker: WorkerKey) -> bool:
        """Return whether an operator drains the worker."""
        return self.registry.is_draining(worker)

    def models(self) -> list[str]:
        """Return the models of the registered workers."""
        return self.registry.models()

    def resolve(self, name: str) -> ServedModel:
        """Return the model and adapter that a request's `model` names. Raises UnknownModel."""
        return self._known_names().resolve(name)

    def names(self) -> list[str]:
        """Return all valid values of a request's `model`: models, their adapters, and aliases."""
        return self._known_names().names()

    def unserved_aliases(self) -> dict[str, str]:
        """Return the aliases of models and adapters that no worker serves, each with the name that it stands for."""
        return self._known_names().unserved_aliases()

    def _known_names(self) -> ModelNames:
        if not self._names_known:
            self._names.learn(self.registrations(), self.engine_lists.adapters)
            self._names_known = True
        return self._names

    def _urls(self) -> set[str]:
        """Return the URLs of all engines that may be queried."""
        urls = {registration.url for registration in self.registrations()}
        return {url for url in urls if url is not None and not self._allowed.problem(url)}

    def engine_urls(self, model: str) -> dict[str, tuple[str, Engine, bool]]:
        """Return the engines of a model that are not down, by URL.

        Each has the epoch of one of its streams, its kind, and whether all its workers drain.
        """
        engines: dict[str, tuple[str, Engine, bool]] = {}
        for worker, follower in self.registry.followers.items():
            url = follower.state.registration.url
            if worker.model != model or url is None or follower.state.view.state is StreamState.DOWN:
                continue
            drains = self.registry.drains(worker)
            if url in engines:
                epoch, kind, others_drain = engines[url]
                engines[url] = epoch, kind, others_drain and drains
            elif not self._allowed.problem(url):
                engines[url] = follower.state.shown.epoch or "", follower.state.profile.engine, drains
        return engines

    def sums_lists(self, worker: WorkerKey) -> bool:
        """Return whether the worker's engine reports the reuse of a list of prompts as a sum."""
        follower = self.registry.followers.get(worker)
        return follower is not None and follower.state.profile.engine.sums_cached_tokens

    def hash_block_size(self, model: str) -> int:
        """Return the tokens that one block hash covers; 1 while no catalog of the model is whole.

        Raises UnknownModel.
        """
        return self.finder.hash_block_size(model)

    def now(self) -> float:
        """Return the time in seconds on the clock of the streams."""
        return self._clock()

    def ask(self, question: Question) -> Sequence[Hit]:
        """Return one hit for each worker of the model that the question does not exclude, in no particular order.

        Raises UnknownModel.
        """
        return filter_hits(self.finder.hits(question), question)

    def hit_table(self, question: Question) -> HitTable | None:
        """Return all hits as numbers for a question that excludes no worker; None if only `ask` can answer.

        Raises UnknownModel.
        """
        return self.finder.hit_table(question)

    async def hash_ahead(self, question: Question) -> None:
        """Hash a long prompt in turns, for the question that follows. Raises UnknownModel."""
        await self.finder.hash_ahead(question)

    def statuses(self, worker_id: str | None = None) -> Iterator[WorkerStatus]:
        """Yield the status of each worker, or of those with this id, in order; each is read when its turn comes."""
        unread, now = self.contact.unread_problem, self._clock()
        names: set[tuple[str, int]] = set()
        # Since the previous row was read, a worker may have been dropped, or registered again, perhaps with another
        # model.
        while missing := [worker for worker in self.registry.followers if worker[1:] not in names]:
            for worker in sorted(missing):
                names.add(worker[1:])
                follower = self.registry.followers.get(worker)
                if follower is not None and worker_id in (None, worker.worker_id):
                    yield worker_status(follower, self.mirror_sync, unread, now)

    def task_problems(self) -> list[str]:
        """Return a sentence for each task that fails."""
        return self._supervisor.health()

    def readiness(self) -> str | None:
        """Return why the router cannot serve yet; None if it can."""
        if not self._loaded:
            return "the index is being loaded from Redis"
        if not self.registry.followers:
            return "no worker is registered: POST /register, or start with --worker"
        return None

    def health(self) -> list[str]:
        """Return a sentence for each problem that degrades the router."""
        unheard = self.contact.problem
        problems = [] if unheard is None else [unheard]
        unwritten = {problem for follower in self.registry.followers.values() if (problem := follower.state.problem)}
        if unheard is None:
            problems += [
                f"Redis takes no commits ({problem}): other routers do not learn what changes here"
                for problem in sorted(unwritten)
            ]
        for follower in self.registry.followers.values():
            state, view = follower.state, follower.state.view
            name = f"worker {printable(view.worker.worker_id)} (rank {view.worker.dp_rank})"
            reasons = (self.mirror_sync.lost_credit(view.worker), state.note, state.refused, state.disk_problem)
            problems += [f"{name}: {reason}" for reason in reasons if reason]
            if view.state is not StreamState.LIVE or (view.catalog.problem is not None and not _is_fresh(state)):
                reason = view.reason or view.catalog.problem or ""
                problems.append(f"{name} is {view.state.value}: {reason}")
        problems += filter(None, [self.registration_mark.problem])
        return problems + self.registry.problems + self.adoption.problems + self._supervisor.health()

    def cautions(self) -> list[str]:
        """Return a sentence for each risk of a router that works; a risk does not degrade it."""
        return [
            caution
            for caution in (
                open_to_all(self._config),
                open_to_pages(self._config),
                compiled.caution(),
                *self._evicting,
                *self.adoption.cautions,
            )
            if caution is not None
        ]

    async def _watch_store_settings(self) -> None:
        while True:
            try:
                policies = await self._store.eviction_policies()
            except StoreError as error:
                # A store that does not answer is reported where it is followed. Without the right to query them, the
                # settings stay unknown.
                log.debug("the store's settings are not known", extra={"reason": str(error)})
            else:
                cautions = [caution for policy in policies.items() if (caution := evicting(*policy)) is not None]
                for caution in cautions:
                    if caution not in self._evicting:
                        log.warning(caution)
                self._evicting = cautions
            await asyncio.sleep(STORE_SETTINGS_S)

    async def _tend(self) -> None:
        while True:
            self._tend_now()
            await ticks.sleep(TEND_INTERVAL_S)

    def _tend_now(self) -> None:
        # A function of its own, because a local variable in `_tend` would keep the last stream alive until the next
        # round.
        for worker in list(self._unsettled):
            follower = self.registry.followers.get(worker)
            if follower is not None:
                follower.state.settle()
            if follower is None or not follower.state.view.reason:
                self._unsettled.discard(worker)
        self._judge.judge_publishers()
        self._history.expire(self._clock())

    def _measure(self) -> None:
        metrics = self._metrics
        metrics.fleet.registrations_lost.set(bool(self.registration_mark.problem))
        metrics.leases_held.set(sum(follower.lease.held for follower in self.registry.followers.values()))
        metrics.recoveries_waiting.set(self._permits.waiting)
        metrics.routers.set(self.peers.routers)
        metrics.store_silent_seconds.set(self.contact.lost_s)
        metrics.approximate_pieces.set(len(self._history))
        metrics.approximate_workers.set(
            sum(follower.state.view.approximate for follower in self.registry.followers.values())
        )
        metrics.mirror_entries.set(self.mirror_sync.mirror.entries)
        metrics.mirror_bytes.set(self.mirror_sync.mirror.bytes)
        metrics.segment_memory_bytes.set(self._memory.bytes)
        hits, misses = self._memory.hits, self._memory.misses
        metrics.segment_hits.inc(hits - self._segments_counted[0])
        metrics.segment_misses.inc(misses - self._segments_counted[1])
        self._segments_counted = (hits, misses)
        twins = {twin for group in registered_twice(self.registrations()) for twin in group}
        for worker, follower in self.registry.followers.items():
            count_worker(metrics.streams, worker, follower)
            metrics.streams.twins(worker).set(worker in twins)


def _is_fresh(state: WorkerState) -> bool:
    """Return whether the worker's engine is heard and has stored nothing yet, so that nothing could earn credit."""
    return not state.view.catalog.groups and not any(state.counts().values())


def _with_engine(url: str | None, engine: str, newest: Registration | None) -> Registration | None:
    """Return the registration with the engine that its HTTP shows, or None if `url` or its engine was changed since."""
    if newest is None or newest.url != url or newest.engine is not None:
        return None
    return msgspec.structs.replace(newest, engine=engine)
