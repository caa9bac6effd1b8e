# SPDX-License-Identifier: Apache-2.0
"""The reconciliation of the fleet with its sources: the async shell around `reconcile.py`.

Every process that has sources reconciles the fleet with them. Each step may be repeated without effect, so it does not
matter which process comes first.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Sequence
from functools import partial

import aiohttp

from kvrouter.contract.worker_status import WorkerStatus
from kvrouter.router.base.common.errors import HostNotAllowed, RouterError, WorkerUnreachable
from kvrouter.router.base.common.escaping import printable
from kvrouter.router.base.common.event_wait import set_within
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
from kvrouter.router.model.workers.source_precedence import PLACES
from kvrouter.router.model.workers.unregistered_worker import UnregisteredWorker, Waiting

log = logging.getLogger(__name__)

# How late a change without a notification is noticed, such as a registry that lost entries or a router that is gone.
LOOK_S = 1.0
# How long a start waits for engines' answers. Running engines answer at once; the others are completed later.
FIRST_ASK_S = 2.5
# How often claims are written again, in case the store lost them.
CLAIM_S = 5.0
# The number of problem workers that /health names.
NAMED = 3

ALLOW = "kvrouter serve --allow-host HOST (all routers of this Redis), or name an address that is listed"
# The code of the error with which `Fleet.register` refuses a worker beyond `max_workers`.
TOO_MANY_WORKERS = "too_many_workers"
MORE_WORKERS = "kvrouter serve --max-workers N, with more than now"


QUERIED = Waiting("its engine is being queried", "wait some seconds and look again")
ABOUT_TO_BE = Waiting("it is about to be", "wait some seconds and look again")


class _SourceState:
    """The state that this process keeps for one source."""

    def __init__(self) -> None:
        # For each of the source's workers, the registration that this process last made or saw.
        self.asserted: dict[Name, Registration] = {}
        # For each worker that another source or router describes differently, the reason.
        self.contested: dict[Name, str] = {}
        # The workers that are not registered yet: their model is unknown, or the fleet refuses them.
        self.waiting: dict[Name, Waiting] = {}
        # The source's problem that was logged last.
        self.logged_problem = ""


class Discovery:
    """The reconciler of all sources of one process. It belongs to one event loop."""

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
        """Begin without tasks.

        Args:
            fleet: Registers and drops workers.
            registrations: Returns all present registrations.
            sources: The sources of this process.
            session: Queries engines.
            engine_key: The API key for engines.
            allowed: The hosts that workers may have.
            metrics: Counts workers and conflicts of each source.
            clock: Returns the time in seconds, monotonic.
            rng: Varies pauses.
            look_s: The most seconds between two reconciliations.
            supervisor: Runs the tasks; None makes a supervisor.
        """
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
        self._source_states = {source.name: _SourceState() for source in sources}
        self._tasks: list[asyncio.Task[None]] = []
        self._claims: Claims | None = None
        self._claimed_s = 0.0

    async def start(self) -> None:
        """Register the workers that are known already, and start the tasks that keep looking. Raises StoreError."""
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
        """End the tasks, and remove this process's claims from the store."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._claims is not None:
            with contextlib.suppress(StoreError):
                await self._fleet.peers.disclaim()

    async def _run(self, source: Source) -> None:
        """Run the source; mark it as down if it fails."""
        try:
            await source.run(self._news.set)
        except Exception:
            # Until the source runs again, its list is not compared, because a stale list would withdraw workers.
            source.problem = "internal error, a bug in the router: its log has the details"
            self._news.set()
            raise

    async def _always(self) -> None:
        while True:
            await set_within(self._news, self._look_s)
            self._news.clear()
            try:
                await self.look()
            except StoreError as error:
                # The contact with the store shows the error, and the next look does everything again.
                log.debug("sources not compared with the registrations", extra={"error": str(error)})

    async def look(self) -> None:
        """Compare all sources with the registered workers once, and register or drop workers accordingly."""
        self._ask_engines()
        shown: dict[str, tuple[list[Registration], set[Name]]] = {}
        for source in self._sources:
            self._report(source)
            if source.shown is not None and not source.problem:
                shown[source.name] = self._completed(source.name, source.shown)
        await self._claim(
            {
                name: [name_of(registration) for registration in registrations]
                for name, (registrations, _) in shown.items()
            }
        )
        for name, (registrations, only_known) in shown.items():
            await self._reconcile(name, registrations, only_known)
        for source in self._sources:
            self._metrics.contested.labels(source.name).set(len(self._source_states[source.name].contested))
            self._metrics.waiting.labels(source.name).set(len(self._source_states[source.name].waiting))

    def _report(self, source: Source) -> None:
        """Update the metrics of the source, and log a change of its problem."""
        source_state = self._source_states[source.name]
        up = source.shown is not None and not source.problem
        self._metrics.up.labels(source.name).set(up)
        self._metrics.workers.labels(source.name).set(len(source.shown or ()))
        if source.problem != source_state.logged_problem:
            source_state.logged_problem = source.problem
            if source.problem:
                log.warning("source lost", extra={"source": source.name, "reason": source.problem})
            else:
                log.info("source well", extra={"source": source.name, "workers": len(source.shown or ())})

    def _ask_engines(self) -> None:
        """Have the prober query the engines of all candidates that are incomplete."""
        wanted: dict[str, ProbeRequest] = {}
        for source in self._sources:
            for candidate in source.shown or ():
                url = candidate.registration.url
                if url is None or not (candidate.asks_model or candidate.asks_events) or self._allowed.problem(url):
                    continue
                before = wanted.get(url, ProbeRequest())
                wanted[url] = ProbeRequest(
                    before.model or candidate.asks_model,
                    before.streams or candidate.asks_events,
                    before.engine_key or candidate.registration.engine_key,
                )
        self._asker.want(wanted)

    def _completed(self, source: str, shown: Sequence[Candidate]) -> tuple[list[Registration], set[Name]]:
        """Complete the source's candidates with the engines' answers.

        Returns:
            The registrations, and the names of the registrations that count only if they exist already.
        """
        source_state = self._source_states[source]
        source_state.waiting = {}
        known: dict[str, list[Registration]] = {}
        for registered in self._registrations():
            if registered.source == source:
                known.setdefault(registered.worker.worker_id, []).append(registered)
        registrations: list[Registration] = []
        only_known: set[Name] = set()
        for candidate in shown:
            registration = candidate.registration
            ours = known.get(registration.worker.worker_id, [])
            problem = self._allowed.registration_problem(registration)
            if candidate.problem or problem:
                fix = _correct(source) if candidate.problem else ALLOW
                source_state.waiting[name_of(registration)] = Waiting(candidate.problem or problem or "", fix)
                registrations += ours if candidate.problem else ()
                continue
            answers: EngineAnswers | None = EngineAnswers()
            if registration.url is not None and (candidate.asks_model or candidate.asks_events):
                answers = self._asker.answers_of(registration.url)
            if answers is None and not ours:
                # The engine's first query is still in progress.
                source_state.waiting[name_of(registration)] = QUERIED
                continue
            answers = answers or EngineAnswers()
            workers = completed(candidate, answers, ours)
            if not workers:
                source_state.waiting[name_of(registration)] = Waiting(answers.problem, _correct(source, answers.fix))
            registrations += workers
            if candidate.only_known:
                only_known.update(map(name_of, workers))
        return registrations, only_known

    async def complete(self, registration: Registration, *, any_rank: bool) -> list[Registration]:
        """Return the workers that a client's registration stands for, completed by a query of their engine.

        Args:
            registration: The registration as the client gave it.
            any_rank: Whether the client named no rank.

        Raises:
            WorkerUnreachable: If the client named no model, and the engine does not report it.
            HostNotAllowed: If the allow list does not have the worker's host.
        """
        candidate = Candidate(registration, any_rank=any_rank)
        url = registration.url
        if url is None or not (candidate.asks_model or candidate.asks_events):
            return [registration]
        if problem := self._allowed.registration_problem(registration):
            raise HostNotAllowed(problem)
        answers = await self._asker.ask(
            url, ProbeRequest(candidate.asks_model, candidate.asks_events, registration.engine_key)
        )
        workers = completed(candidate, answers, [])
        if not workers:
            raise WorkerUnreachable(f"{url}: {answers.problem}; then register it again", code="engine_not_asked")
        return workers

    def statuses(self) -> list[WorkerStatus]:
        """Return the statuses of the workers that a source shows and that are not registered yet."""
        return [worker.status() for worker in self.unregistered()]

    def unregistered(self) -> list[UnregisteredWorker]:
        """Return the workers that a source shows and that are not registered yet."""
        names = {name_of(registration) for registration in self._registrations()}
        ids = {worker_id for worker_id, _ in names}
        workers = []
        for source in self._sources:
            waiting = self._source_states[source.name].waiting
            for candidate in source.shown or ():
                name = name_of(candidate.registration)
                registered = name[0] in ids if candidate.any_rank else name in names
                if not registered and not candidate.only_known:
                    workers.append(UnregisteredWorker(candidate.registration, waiting.get(name, ABOUT_TO_BE)))
        return workers

    async def _claim(self, names: dict[str, list[Name]]) -> None:
        """Publish the workers that the sources show, if they changed or the last claim is older than CLAIM_S.

        Claims are published before workers are registered, so that no other router takes a worker for gone.
        """
        claims = Claims({name: sorted(set(found)) for name, found in names.items()})
        now = self._clock()
        if claims != self._claims or now > self._claimed_s + CLAIM_S:
            await self._fleet.peers.claim(claims)
            self._claims, self._claimed_s = claims, now

    async def _reconcile(self, source: str, shown: list[Registration], only_known: set[Name]) -> None:
        """Register and withdraw workers of one source as `plan` decides."""
        source_state = self._source_states[source]

        def planned(claimed: frozenset[Name]) -> ReconcilePlan:
            registered = self._registrations()
            return plan(source, shown, only_known, registered, asserted=source_state.asserted, claimed=claimed)

        reconcile_plan = planned(frozenset())
        if reconcile_plan.disputes:
            # A change that a client made at another router a moment ago must not be undone.
            await self._fleet.read_changes()
            reconcile_plan = planned(await self._fleet.peers.claimed(source))
        for name, why in reconcile_plan.contested.items():
            if source_state.contested.get(name) != why:
                log.warning("worker contested", extra={"source": source, "worker": name, "reason": why})
                self._metrics.conflicts.labels(source).inc()
        source_state.contested = reconcile_plan.contested
        for worker in reconcile_plan.withdraw:
            if await self._fleet.withdraw(worker, source):
                self._metrics.changes.labels(source, "withdrawn").inc()
                log.info("worker withdrawn", extra={"source": source, "worker": worker})
        for registration in reconcile_plan.register:
            try:
                await self._fleet.register(registration)
                source_state.asserted[name_of(registration)] = registration
                self._metrics.changes.labels(source, "registered").inc()
            except RouterError as error:
                fix = MORE_WORKERS if error.code == TOO_MANY_WORKERS else _correct(source)
                source_state.waiting[name_of(registration)] = Waiting(error.message, fix)
        source_state.asserted |= {name_of(registration): registration for registration in reconcile_plan.agreed}
        names = set(map(name_of, shown))
        for name in source_state.asserted.keys() - names:
            del source_state.asserted[name]

    def down(self) -> list[tuple[str, str]]:
        """Return the names and problems of the sources that cannot be read."""
        return [
            (
                source.name,
                f"source {source.name} is down: {source.problem}; the {len(source.shown or ())} workers last known stay",
            )
            for source in self._sources
            if source.problem
        ]

    def contested(self) -> list[tuple[str, Name, str]]:
        """Return the source, name and reason of each worker that another source or router describes differently."""
        return [
            (source.name, name, why)
            for source in self._sources
            for name, why in sorted(self._source_states[source.name].contested.items())
        ]

    def health(self) -> list[str]:
        """Return the problems of the sources and their workers, at most NAMED workers for each kind of problem."""
        problems = [problem for _, problem in self.down()]
        for source in self._sources:
            source_state = self._source_states[source.name]
            waiting = {name: waiting.reason for name, waiting in source_state.waiting.items()}
            for what, named in (("is contested", source_state.contested), ("is not registered", waiting)):
                some = sorted(named.items())
                problems += [
                    f"worker {printable(worker_id)} (rank {rank}) of {source.name} {what}: {why}"
                    for (worker_id, rank), why in some[:NAMED]
                ]
                if len(some) > NAMED:
                    problems.append(f"{len(some) - NAMED} more workers of {source.name}: {what}")
        return problems


def _correct(source: str, fix: str = "") -> str:
    """Return how to get a worker of this source registered (`fix`, if known), or how to stop the report about it."""
    return f"{fix or 'fix the cause above'}, or remove the worker from {PLACES.get(source, source)}"
