# SPDX-License-Identifier: Apache-2.0
"""Keeps the fleet as its sources show it: the async shell around `reconcile.py`.

Every process that has sources does the same; each step is idempotent, so it does not matter who comes first.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Sequence
from functools import partial

import aiohttp

from kvrouter.router.base.common.errors import HostNotAllowed, RouterError, WorkerUnreachable
from kvrouter.router.base.common.escaping import printable
from kvrouter.router.base.common.task_supervisor import TaskSupervisor
from kvrouter.router.base.redis_client.errors import StoreError
from kvrouter.router.follow.discovery.candidate import Candidate, completed
from kvrouter.router.follow.discovery.discovery_metrics import DiscoveryMetrics
from kvrouter.router.follow.discovery.engine_prober import EngineProber, ProbeRequest
from kvrouter.router.follow.discovery.reconcile import Name, ReconcilePlan, name_of, plan
from kvrouter.router.follow.discovery.source import Source
from kvrouter.router.follow.fleet.fleet import Fleet
from kvrouter.router.follow.fleet.router_peers import Claims
from kvrouter.router.model.workers.allow_list import AllowList
from kvrouter.router.model.workers.engine_answers import EngineAnswers
from kvrouter.router.model.workers.engine_key import EngineKey
from kvrouter.router.model.workers.registration import Registration
from kvrouter.router.model.workers.unregistered_worker import UnregisteredWorker, Waiting
from kvrouter.router.model.workers.worker_status import WorkerStatus

log = logging.getLogger(__name__)

# Changes without a notification (a registry that lost entries, a router that is gone) are noticed after this.
LOOK_S = 1.0
# How long a start waits for engines' answers: running engines answer at once, the others are completed later.
FIRST_ASK_S = 2.5
# Claims are written again now and then, for a store that lost them.
CLAIM_S = 5.0
# The number of problem workers that /health names.
NAMED = 3

ALLOW = "kvrouter serve --allow-host HOST (all routers of this Redis), or name an address that is listed"
# The code of the error with which `Fleet.register` refuses another worker.
TOO_MANY_WORKERS = "too_many_workers"
MORE_WORKERS = "kvrouter serve --max-workers N, with more than now"


QUERIED = Waiting("its engine is being queried", "wait some seconds and look again")
ABOUT_TO_BE = Waiting("it is about to be", "wait some seconds and look again")


class _Kept:
    """State of one source beside the workers that it lists."""

    def __init__(self) -> None:
        # The registrations of its workers that this process last made, or saw.
        self.asserted: dict[Name, Registration] = {}
        self.contested: dict[Name, str] = {}
        # Workers whose model is unknown, or that the fleet refuses.
        self.waiting: dict[Name, Waiting] = {}
        self.told_problem = ""


class Discovery:
    """Belongs to one event loop."""

    def __init__(
        self,
        fleet: Fleet,
        registrations: Callable[[], Sequence[Registration]],
        sources: Sequence[Source],
        *,
        session: aiohttp.ClientSession,
        engine_key: EngineKey,
        allowed: AllowList,
        metrics: DiscoveryMetrics,
        clock: Callable[[], float],
        rng: random.Random,
        look_s: float = LOOK_S,
        supervisor: TaskSupervisor | None = None,
    ) -> None:
        self._fleet = fleet
        self._registrations = registrations
        self._sources = sources
        self._allowed = allowed
        self._metrics = metrics
        self._clock = clock
        self._look_s = look_s
        self._supervisor = supervisor or TaskSupervisor(clock=clock, rng=rng)
        self._news = asyncio.Event()
        self._asker = EngineProber(session, engine_key, clock=clock, rng=rng, changed=self._news.set)
        self._kept = {source.name: _Kept() for source in sources}
        self._tasks: list[asyncio.Task[None]] = []
        self._claims: Claims | None = None
        self._claimed_s = 0.0

    async def start(self) -> None:
        """Register what is known already, and keep on. Raises StoreError."""
        if self._sources:
            await self.look()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FIRST_ASK_S):
                    await self._asker.look()
            await self.look()
            self._tasks = [
                self._supervisor.start("source", partial(self._run, source), of=source.name) for source in self._sources
            ]
            self._tasks.append(self._supervisor.start("engine_questions", self._asker.run))
            self._tasks.append(self._supervisor.start("reconciliation", self._always))

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._claims is not None:
            with contextlib.suppress(StoreError):
                await self._fleet.peers.disclaim()

    async def _run(self, source: Source) -> None:
        try:
            await source.run(self._news.set)
        except Exception:
            # Until it runs again, its list is not compared: a stale list would withdraw workers.
            source.problem = "internal error, a bug in the router: its log has the details"
            self._news.set()
            raise

    async def _always(self) -> None:
        while True:
            try:
                async with asyncio.timeout(self._look_s):
                    await self._news.wait()
            except TimeoutError:
                pass
            self._news.clear()
            try:
                await self.look()
            except StoreError as error:
                # Shown where the store is followed; everything is done again at the next look.
                log.debug("sources not compared", extra={"error": str(error)})

    async def look(self) -> None:
        """Compare all sources with what is registered, once."""
        self._ask_engines()
        shown: dict[str, tuple[list[Registration], set[Name]]] = {}
        for source in self._sources:
            self._report(source)
            if source.shown is not None and not source.problem:
                shown[source.name] = self._completed(source.name, source.shown)
        await self._claim({name: [name_of(one) for one in found] for name, (found, _) in shown.items()})
        for name, (found, only_known) in shown.items():
            await self._reconcile(name, found, only_known)
        for source in self._sources:
            self._metrics.contested.labels(source.name).set(len(self._kept[source.name].contested))
            self._metrics.waiting.labels(source.name).set(len(self._kept[source.name].waiting))

    def _report(self, source: Source) -> None:
        kept = self._kept[source.name]
        up = source.shown is not None and not source.problem
        self._metrics.up.labels(source.name).set(up)
        self._metrics.workers.labels(source.name).set(len(source.shown or ()))
        if source.problem != kept.told_problem:
            kept.told_problem = source.problem
            if source.problem:
                log.warning("source lost", extra={"source": source.name, "reason": source.problem})
            else:
                log.info("source well", extra={"source": source.name, "workers": len(source.shown or ())})

    def _ask_engines(self) -> None:
        wanted: dict[str, ProbeRequest] = {}
        for source in self._sources:
            for one in source.shown or ():
                url = one.registration.url
                if url is None or not (one.asks_model or one.asks_events) or self._allowed.problem(url):
                    continue
                before = wanted.get(url, ProbeRequest())
                wanted[url] = ProbeRequest(before.model or one.asks_model, before.streams or one.asks_events)
        self._asker.want(wanted)

    def _completed(self, source: str, shown: Sequence[Candidate]) -> tuple[list[Registration], set[Name]]:
        """The registrations that the source stands for, and the names of those that only count if they are
        registered."""
        kept = self._kept[source]
        kept.waiting = {}
        known: dict[str, list[Registration]] = {}
        for one in self._registrations():
            if one.source == source:
                known.setdefault(one.worker.worker_id, []).append(one)
        found: list[Registration] = []
        only_known: set[Name] = set()
        for candidate in shown:
            given = candidate.registration
            ours = known.get(given.worker.worker_id, [])
            problem = self._allowed.registration_problem(given)
            if candidate.problem or problem:
                fix = _correct(source) if candidate.problem else ALLOW
                kept.waiting[name_of(given)] = Waiting(candidate.problem or problem or "", fix)
                found += ours if candidate.problem else ()
                continue
            told: EngineAnswers | None = EngineAnswers()
            if given.url is not None and (candidate.asks_model or candidate.asks_events):
                told = self._asker.told(given.url)
            if told is None and not ours:
                # Its first query is in progress.
                kept.waiting[name_of(given)] = QUERIED
                continue
            told = told or EngineAnswers()
            workers = completed(candidate, told, ours)
            if not workers:
                kept.waiting[name_of(given)] = Waiting(told.problem, told.fix or _correct(source))
            found += workers
            if candidate.only_known:
                only_known.update(map(name_of, workers))
        return found, only_known

    async def complete(self, registration: Registration, *, any_rank: bool) -> list[Registration]:
        """The workers that a client's registration stands for, with what their engine says of itself where the client
        does not. any_rank: no rank was named. Raises WorkerUnreachable where the model is to be had from an engine that
        does not tell it, HostNotAllowed."""
        candidate = Candidate(registration, any_rank=any_rank)
        url = registration.url
        if url is None or not (candidate.asks_model or candidate.asks_events):
            return [registration]
        if problem := self._allowed.registration_problem(registration):
            raise HostNotAllowed(problem)
        told = await self._asker.ask(url, ProbeRequest(candidate.asks_model, candidate.asks_events))
        workers = completed(candidate, told, [])
        if not workers:
            raise WorkerUnreachable(f"{url}: {told.problem}; then register it again", code="engine_not_asked")
        return workers

    def statuses(self) -> list[WorkerStatus]:
        """The workers that a source shows and that are not registered yet, as those that are down."""
        return [
            WorkerStatus.unregistered(one.registration, f"not registered yet: {one.waiting.reason}")
            for one in self.unregistered()
        ]

    def unregistered(self) -> list[UnregisteredWorker]:
        """Return the workers that a source shows and that are not registered yet."""
        names = {name_of(one) for one in self._registrations()}
        ids = {worker_id for worker_id, _ in names}
        found = []
        for source in self._sources:
            waiting = self._kept[source.name].waiting
            for candidate in source.shown or ():
                name = name_of(candidate.registration)
                registered = name[0] in ids if candidate.any_rank else name in names
                if not registered and not candidate.only_known:
                    found.append(UnregisteredWorker(candidate.registration, waiting.get(name, ABOUT_TO_BE)))
        return found

    async def _claim(self, names: dict[str, list[Name]]) -> None:
        """Before anything is registered, so that no other router takes it for gone."""
        claims = Claims({name: sorted(set(found)) for name, found in names.items()})
        now = self._clock()
        if claims != self._claims or now > self._claimed_s + CLAIM_S:
            await self._fleet.peers.claim(claims)
            self._claims, self._claimed_s = claims, now

    async def _reconcile(self, source: str, shown: list[Registration], only_known: set[Name]) -> None:
        kept = self._kept[source]

        def planned(claimed: frozenset[Name]) -> ReconcilePlan:
            registered = self._registrations()
            return plan(source, shown, only_known, registered, asserted=kept.asserted, claimed=claimed)

        found = planned(frozenset())
        if found.disputes:
            found = planned(await self._fleet.peers.claimed(source))
        for name, why in found.contested.items():
            if kept.contested.get(name) != why:
                log.warning("worker contested", extra={"source": source, "worker": name, "reason": why})
                self._metrics.conflicts.labels(source).inc()
        kept.contested = found.contested
        for worker in found.withdraw:
            if await self._fleet.withdraw(worker, source):
                self._metrics.changes.labels(source, "withdrawn").inc()
                log.info("worker withdrawn", extra={"source": source, "worker": worker})
        for registration in found.register:
            try:
                await self._fleet.register(registration)
                kept.asserted[name_of(registration)] = registration
                self._metrics.changes.labels(source, "registered").inc()
            except RouterError as error:
                fix = MORE_WORKERS if error.code == TOO_MANY_WORKERS else _correct(source)
                kept.waiting[name_of(registration)] = Waiting(error.message, fix)
        kept.asserted |= {name_of(one): one for one in found.agreed}
        names = set(map(name_of, shown))
        for name in kept.asserted.keys() - names:
            del kept.asserted[name]

    def down(self) -> list[tuple[str, str]]:
        """Names and problems of the sources that cannot be read."""
        return [
            (
                source.name,
                f"source {source.name} is down: {source.problem}; the {len(source.shown or ())} workers last known stay",
            )
            for source in self._sources
            if source.problem
        ]

    def contested(self) -> list[tuple[str, Name, str]]:
        """By source, the workers of which somebody else says something else, and why."""
        return [
            (source.name, name, why)
            for source in self._sources
            for name, why in sorted(self._kept[source.name].contested.items())
        ]

    def health(self) -> list[str]:
        """What is wrong with the sources."""
        problems = [problem for _, problem in self.down()]
        for source in self._sources:
            kept = self._kept[source.name]
            waiting = {name: waiting.reason for name, waiting in kept.waiting.items()}
            for what, named in (("is contested", kept.contested), ("is not registered", waiting)):
                some = sorted(named.items())
                problems += [
                    f"worker {printable(worker_id)} (rank {rank}) of {source.name} {what}: {why}"
                    for (worker_id, rank), why in some[:NAMED]
                ]
                if len(some) > NAMED:
                    problems.append(f"{len(some) - NAMED} more workers of {source.name}: {what}")
        return problems


def _correct(source: str) -> str:
    return f"correct the worker in the source {source}, or remove it there"
