# SPDX-License-Identifier: Apache-2.0
"""The router without its HTTP: workers followed, the mirror kept, questions answered.

Belongs to one asyncio loop. `ask` is synchronous and does no I/O; everything that waits is in tasks.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import aiohttp
import msgspec
import zmq

from kvrouter.events.transport.permits import Permits
from kvrouter.router.common.errors import UnknownModel
from kvrouter.router.common.escaping import printable
from kvrouter.router.common.ids import WorkerKey
from kvrouter.router.common.task_supervisor import TaskSupervisor
from kvrouter.router.config.cautions import evicting, open_to_all
from kvrouter.router.config.settings import Config
from kvrouter.router.core.worker_report import count_worker, worker_status
from kvrouter.router.fleet.fleet import Fleet
from kvrouter.router.fleet.mirror_sync import MirrorSync
from kvrouter.router.index.store import IndexStore, StoreError
from kvrouter.router.kvcache.prompt_hasher import SegmentMemory
from kvrouter.router.load.engine_metrics import EngineLoad
from kvrouter.router.matching.matcher import HashPlans, Matcher, WorkerView
from kvrouter.router.matching.question import Hit, Question, filter_hits
from kvrouter.router.matching.routing_history import RoutingHistory, approximate_hit, pieces_of
from kvrouter.router.streams.worker_stream import WorkerStream
from kvrouter.router.telemetry.metrics import Metrics
from kvrouter.router.workers.allow_list import AllowList
from kvrouter.router.workers.engine_lists import EngineLists, ServedModels
from kvrouter.router.workers.model_names import ModelNames, ServedModel, parse_aliases, unserved_problem
from kvrouter.router.workers.provenance import origin_problems
from kvrouter.router.workers.registration import Registration
from kvrouter.router.workers.role import HandoverWay, Role
from kvrouter.router.workers.stream_state import StreamState
from kvrouter.router.workers.worker_status import WorkerStatus

log = logging.getLogger(__name__)

GAUGE_INTERVAL_S = 1.0
# Somebody may change how the store evicts while it runs.
STORE_SETTINGS_S = 30.0

# Some milliseconds for a thousand workers: of many that come at once, not each is worth it.
JUDGE_PAUSE_S = 0.05


class Core:
    """Joins the fleet, the mirror that follows it, and the answers. `fleet` registers and drops workers."""

    def __init__(
        self,
        *,
        store: IndexStore,
        config: Config,
        metrics: Metrics,
        zmq_context: zmq.Context[zmq.Socket[bytes]],
        clock: Callable[[], float],
        rng: random.Random,
        http: aiohttp.ClientSession | None = None,
        token: str | None = None,
        supervisor: TaskSupervisor | None = None,
    ) -> None:
        """http: to ask engines whether they live, and what load they have; None: they are not asked. token: names this
        process in leases; one that outlives the process lets its successor take over at once."""
        self._store = store
        self._config = config
        self._metrics = metrics
        self._context = zmq_context
        self._clock = clock
        self._rng = rng
        self._http = http
        self._token = token or secrets.token_hex(8)
        self._supervisor = supervisor or TaskSupervisor(clock=clock, rng=rng, failures=metrics.task_failures)
        self._allowed = AllowList(config.allow_hosts)
        self._permits = Permits(rng=rng)
        self._memory = SegmentMemory(config.segment_memory_bytes)
        self._streams: dict[WorkerKey, WorkerStream] = {}
        self._following = MirrorSync(
            self._streams,
            store=store,
            metrics=metrics,
            clock=clock,
            rng=rng,
            supervisor=self._supervisor,
            budget_bytes=config.mirror_budget_bytes,
        )
        self._mirror = self._following.mirror
        self._matcher = Matcher(self._mirror, self._memory)
        self._history = RoutingHistory(config.approximate_ttl_s)
        self.fleet = Fleet(
            self._streams,
            store=store,
            config=config,
            metrics=metrics,
            clock=clock,
            token=self._token,
            allowed=self._allowed,
            make_stream=self._make_stream,
            take_image=self._following.take_image,
            take_unreadable=self._following.take_unreadable,
            changed=self._members_changed,
            leaves=self._leaves,
            forget=self._forget,
        )
        self._names = ModelNames(parse_aliases(config.model_aliases))
        self._names_known = False
        self._engines = None if http is None else EngineLists(http, self._urls, self._on_engine_lists)
        self._tasks: list[asyncio.Task[None]] = []
        # By model, with the version of the mirror that they were made from; any change of a worker empties it.
        self._plans: dict[str, tuple[int, HashPlans]] = {}
        self._listeners: list[Callable[[WorkerKey, WorkerView | None], None]] = []
        self._registered: tuple[Registration, ...] | None = None
        self._prefill_workers: dict[str, frozenset[WorkerKey]] | None = None
        self._segments_counted = (0, 0)
        self._loaded = False
        # When the registrations were judged last, when they will be, and by which publishers.
        self._judged_s = float("-inf")
        self._judging: asyncio.TimerHandle | None = None
        self._lives: dict[WorkerKey, str] = {}
        # Of each server of the store that evicts.
        self._evicting: list[str] = []
        # Told what engines that are followed here say of their load.
        self.on_engine_load: Callable[[WorkerKey, EngineLoad], None] = lambda worker, said: None

    async def start(self) -> None:
        """Load what Redis holds, then follow it and the workers. Raises StoreError when Redis cannot be read."""
        await self.fleet.start()
        self._loaded = True
        self._judge_registrations()
        runs = {
            "mirror": self._following.follow,
            "mirror_reload": self._following.reload,
            "mirror_sweep": self._following.sweep,
            "gauges": self._gauge,
            "heartbeat": self.fleet.beat_always,
            "followers": self.fleet.judge_followers,
            "registry": self.fleet.watch_registry,
            "store_settings": self._watch_store_settings,
        }
        if self._engines is not None:
            runs["engine_lists"] = self._engines.run
        self._tasks += [self._supervisor.start(name, run) for name, run in runs.items()]

    async def stop(self) -> None:
        """End all tasks; what was committed stays in Redis."""
        for task in self._tasks:
            task.cancel()
        if self._judging is not None:
            self._judging.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.fleet.stop()
        await self._following.close()
        await self.fleet.leave()

    async def register(self, registration: Registration) -> None:
        """See `Fleet.register`."""
        await self.fleet.register(registration)

    async def unregister(self, worker_id: str, dp_rank: int | None = None, model: str | None = None) -> int:
        """See `Fleet.unregister`."""
        return await self.fleet.unregister(worker_id, dp_rank, model)

    def _make_stream(self, registration: Registration, mine: Callable[[WorkerKey], bool]) -> WorkerStream:
        worker = registration.worker
        return WorkerStream(
            registration,
            store=self._store,
            token=self._token,
            config=self._config,
            metrics=self._metrics,
            context=self._context,
            clock=self._clock,
            rng=self._rng,
            http=self._http,
            new_epoch=self._new_epoch,
            mine=mine,
            mirror=self._following,
            allowed=self._allowed,
            permits=self._permits,
            supervisor=self._supervisor,
            changed=lambda: self._view_changed(worker),
            engine_load=lambda said: self.on_engine_load(worker, said),
        )

    def _members_changed(self) -> None:
        self._registered = self._prefill_workers = None
        self._names_known = False
        self._plans.clear()
        # A start loads them all, and judges once.
        if self._loaded:
            self._judge_soon()
            if self._engines is not None and self._urls() - self._engines.served.keys():
                self._engines.look_soon()

    def _leaves(self, worker: WorkerKey) -> None:
        for listener in self._listeners:
            listener(worker, None)

    def listen(self, listener: Callable[[WorkerKey, WorkerView | None], None]) -> None:
        """Be told of each change of a worker's view, and with None that it was dropped."""
        self._listeners.append(listener)

    def _view_changed(self, worker: WorkerKey) -> None:
        self._plans.clear()
        if (stream := self._streams.get(worker)) is not None:
            for listener in self._listeners:
                listener(worker, stream.view)

    async def _forget(self, worker: WorkerKey) -> None:
        """Its stream has ended."""
        await self._following.forget(worker)
        self._metrics.forget_worker(worker)
        self._history.forget(worker)

    def _new_epoch(self) -> str:
        return f"{self._rng.getrandbits(64):016x}"

    def registrations(self) -> Sequence[Registration]:
        """The same object until one of them changes."""
        if self._registered is None:
            self._registered = tuple(stream.registration for stream in self._streams.values())
        return self._registered

    def prefill_workers(self, model: str) -> frozenset[WorkerKey]:
        """Those that only compute prompts, for others."""
        if self._prefill_workers is None:
            found: dict[str, set[WorkerKey]] = {}
            for worker, stream in self._streams.items():
                if stream.registration.role is Role.PREFILL:
                    found.setdefault(worker.model, set()).add(worker)
            self._prefill_workers = {name: frozenset(workers) for name, workers in found.items()}
        return self._prefill_workers.get(model, frozenset())

    def handover(self, worker: WorkerKey) -> HandoverWay:
        """How it is handed a prompt."""
        stream = self._streams.get(worker)
        return HandoverWay.KV_TRANSFER_PARAMS if stream is None else stream.registration.handover

    def drains(self, worker: WorkerKey) -> bool:
        """Whether it was asked to take no new request."""
        stream = self._streams.get(worker)
        return stream is not None and stream.registration.drains

    def models(self) -> list[str]:
        return sorted({worker.model for worker in self._streams})

    def _views(self, model: str) -> list[WorkerView]:
        views = [stream.view for worker, stream in self._streams.items() if worker.model == model]
        if not views:
            known = ", ".join(map(printable, self.models())) or "none yet"
            raise UnknownModel(f"no worker is registered for model {model!r}; registered models: {known}")
        listed = {} if self._engines is None else self._engines.adapters
        return [_with_adapters(view, listed.get(view.url or "", {})) for view in views]

    def resolve(self, name: str) -> ServedModel:
        """What a request's `model` means. Raises UnknownModel."""
        return self._known_names().resolve(name)

    def names(self) -> list[str]:
        """All that a request's `model` may be: models, their adapters, and aliases."""
        return self._known_names().names()

    def _known_names(self) -> ModelNames:
        if not self._names_known:
            self._names.learn(self.registrations(), {} if self._engines is None else self._engines.adapters)
            self._names_known = True
        return self._names

    def _urls(self) -> set[str]:
        """Of all engines that may be asked something."""
        urls = {stream.registration.url for stream in self._streams.values()}
        return {url for url in urls if url is not None and not self._allowed.problem(url)}

    def _on_engine_lists(self) -> None:
        self._names_known = False
        self._plans.clear()
        self._judge_registrations()

    def _judge_soon(self) -> None:
        """At once, unless it was done a moment ago."""
        pause_s = self._judged_s + JUDGE_PAUSE_S - self._clock()
        if pause_s <= 0:
            self._judge_registrations()
        elif self._judging is None:
            self._judging = asyncio.get_running_loop().call_later(pause_s, self._judge_registrations)

    def _judge_registrations(self) -> None:
        """Compare what is registered with itself and with what the engines say of themselves."""
        served = {} if self._engines is None else self._engines.served
        sources = {} if self._engines is None else self._engines.sources
        if self._judging is not None:
            self._judging.cancel()
            self._judging = None
        registrations, self._lives = self.registrations(), self._publishers()
        contradictions = origin_problems(registrations, sources, self._lives)
        ranks = Counter(one.worker.worker_id for one in registrations)
        for one in registrations:
            worker, engine = one.worker, served.get(one.url or "", ServedModels())
            self._streams[worker].judge(
                alone=ranks[worker.worker_id] == 1,
                contradiction=contradictions.get(worker, ""),
                note=unserved_problem(worker.model, engine.names, engine.adapters),
            )
        self._judged_s = self._clock()

    def _publishers(self) -> dict[WorkerKey, str]:
        """By worker, the epoch of the patched publisher that is followed for it."""
        lives = ((worker, stream.shown_ingest.report_epoch) for worker, stream in self._streams.items())
        return {worker: epoch for worker, epoch in lives if epoch}

    def engine_urls(self, model: str) -> dict[str, str]:
        """The engines of a model that live, as far as is known: by URL, the epoch of a stream of theirs."""
        found: dict[str, str] = {}
        for worker, stream in self._streams.items():
            url = stream.registration.url
            if worker.model != model or url is None or url in found:
                continue
            if stream.view.state is not StreamState.DOWN and not self._allowed.problem(url):
                found[url] = stream.visible_epoch or ""
        return found

    def hash_block_size(self, model: str) -> int:
        """Tokens that one block hash covers, 1 while no catalog of the model is whole."""
        return self._current_plans(model).hash_block_size or 1

    def _current_plans(self, model: str) -> HashPlans:
        """The model's workers as the matcher wants them, made anew when anything of them changed."""
        version = self._mirror.version
        known = self._plans.get(model)
        if known is None or known[0] != version:
            known = self._plans[model] = (version, HashPlans.build(self._mirror, self._views(model)))
        return known[1]

    def ask(self, question: Question) -> Sequence[Hit]:
        """One hit for each worker of the model that the question does not leave out, in no particular order."""
        return filter_hits(self.hits(question), question)

    def hits(self, question: Question) -> list[Hit]:
        """One hit for each worker of the model, in no particular order."""
        plans = self._current_plans(question.model)
        hits = self._matcher.match(question, plans)
        if plans.has_approximate and question.token_ids is not None:
            hits = self._guessed(question, hits)
        return hits

    def url(self, worker: WorkerKey) -> str | None:
        stream = self._streams.get(worker)
        return None if stream is None else stream.registration.url

    def given_id(self, worker: WorkerKey) -> str | int:
        stream = self._streams.get(worker)
        return worker.worker_id if stream is None else stream.registration.given_id

    def workers(self) -> list[WorkerKey]:
        return list(self._streams)

    @property
    def token(self) -> str:
        """Names this process among the routers."""
        return self._token

    def sent(self, question: Question, worker: WorkerKey) -> None:
        """The prompt is on its way there: all that is known of a worker without usable events."""
        stream = self._streams.get(worker)
        if stream is not None and stream.view.approximate:
            self._history.sent(stream.life, pieces_of(question), self._clock())

    def _guessed(self, question: Question, hits: list[Hit]) -> list[Hit]:
        """The hits, those of workers without usable events guessed from what was sent there."""
        pieces, now = pieces_of(question), self._clock()
        found = []
        for hit in hits:
            stream = self._streams[hit.worker]
            if stream.view.approximate:
                hit = approximate_hit(hit, self._history.hit_tokens(stream.life, pieces, question.num_tokens, now))
            found.append(hit)
        return found

    def statuses(self) -> list[WorkerStatus]:
        now = self._clock()
        return [worker_status(stream, self._following, now) for _, stream in sorted(self._streams.items())]

    def readiness(self) -> str | None:
        if not self._loaded:
            return "the index is being loaded from Redis"
        if not self._streams:
            return "no worker is registered: POST /register, or start with --worker"
        return None

    def health(self) -> list[str]:
        away = self._following.store_problem or self.fleet.store_problem
        problems = [] if away is None else [away]
        unwritten = {stream.problem for stream in self._streams.values() if stream.problem}
        if away is None:
            problems += [
                f"Redis takes no commits ({problem}): other routers do not learn what changes here"
                for problem in sorted(unwritten)
            ]
        for stream in self._streams.values():
            view = stream.view
            name = f"worker {printable(view.worker.worker_id)} (rank {view.worker.dp_rank})"
            known = (self._following.lost_credit(view.worker), stream.note, stream.disk_problem)
            problems += [f"{name}: {why}" for why in known if why]
            if view.state is not StreamState.LIVE or view.catalog.problem is not None:
                why = view.reason or view.catalog.problem or ""
                problems.append(f"{name} is {view.state.value}: {why}")
        return problems + self.fleet.problems + self._supervisor.health()

    def cautions(self) -> list[str]:
        """What works now and is a risk all the same; it degrades nothing."""
        return [caution for caution in (open_to_all(self._config), *self._evicting) if caution is not None]

    async def _watch_store_settings(self) -> None:
        while True:
            try:
                policies = await self._store.eviction_policies()
            except StoreError as error:
                # Its absence is shown where it is followed; without the right to ask, nothing is known.
                log.debug("the store's settings are not known", extra={"reason": str(error)})
            else:
                found = [caution for policy in policies.items() if (caution := evicting(*policy)) is not None]
                for caution in found:
                    if caution not in self._evicting:
                        log.warning(caution)
                self._evicting = found
            await asyncio.sleep(STORE_SETTINGS_S)

    async def _gauge(self) -> None:
        while True:
            self._measure()
            # Patched publishers name their epochs at any time.
            if self._publishers() != self._lives:
                self._judge_registrations()
            self._history.expire(self._clock())
            await asyncio.sleep(GAUGE_INTERVAL_S)

    def _measure(self) -> None:
        metrics = self._metrics
        metrics.leases_held.set(sum(stream.held for stream in self._streams.values()))
        metrics.recoveries_waiting.set(self._permits.waiting)
        metrics.routers.set(self.fleet.routers)
        metrics.store_silent_seconds.set(max(self._following.silent_s, self.fleet.store_silent_s))
        metrics.approximate_pieces.set(len(self._history))
        metrics.approximate_workers.set(sum(stream.view.approximate for stream in self._streams.values()))
        metrics.mirror_entries.set(self._mirror.entries)
        metrics.mirror_bytes.set(self._mirror.bytes)
        metrics.segment_memory_bytes.set(self._memory.bytes)
        hits, misses = self._memory.hits, self._memory.misses
        metrics.segment_hits.inc(hits - self._segments_counted[0])
        metrics.segment_misses.inc(misses - self._segments_counted[1])
        self._segments_counted = (hits, misses)
        for worker, stream in self._streams.items():
            stream.settle()
            count_worker(metrics, worker, stream)


def _with_adapters(view: WorkerView, listed: Mapping[str, str]) -> WorkerView:
    """The view with the paths that its engine lists; what was declared or registered wins."""
    return msgspec.structs.replace(view, lora_paths={**listed, **view.lora_paths}) if listed else view
