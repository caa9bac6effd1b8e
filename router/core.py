# SPDX-License-Identifier: Apache-2.0
"""The router without its HTTP: workers followed, the mirror kept, questions answered.

Belongs to one asyncio loop. `ask` is synchronous and does no I/O; everything that waits is in tasks.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import aiohttp
import msgspec
import numpy as np
import zmq
from numpy.typing import NDArray

from kvrouter.events.permits import Permits
from kvrouter.router.adapters import AdapterWatch
from kvrouter.router.allow_list import AllowList
from kvrouter.router.approximate import RoutingHistory, approximate_hit, pieces_of
from kvrouter.router.config import Config
from kvrouter.router.errors import Conflict, HostNotAllowed, UnknownModel
from kvrouter.router.hold import LOOKS_PER_TTL
from kvrouter.router.index.follower import FollowerItem, LogFollower, Reload, StoreBack, StoreLost
from kvrouter.router.index.log import LogEntry
from kvrouter.router.index.mirror import Mirror, MirrorFull
from kvrouter.router.index.store import IndexStore, StoreError, WorkerImage
from kvrouter.router.load.gauges import EngineLoad
from kvrouter.router.match import Matcher, Plans, WorkerView
from kvrouter.router.metrics import RESYNCS, Metrics
from kvrouter.router.model_names import ModelNames, Served, parse_aliases
from kvrouter.router.names import Place, WorkerKey
from kvrouter.router.printable import printable
from kvrouter.router.question import Hit, Question, asked_for
from kvrouter.router.registration import Registration
from kvrouter.router.report_ingest import ReportIngest
from kvrouter.router.role import HandoverWay, Role
from kvrouter.router.segments import SegmentMemory
from kvrouter.router.shares import Attendance, shares
from kvrouter.router.states import StreamState
from kvrouter.router.status import PatchStatus, Recovery, WorkerStatus
from kvrouter.router.stream import WorkerStream

log = logging.getLogger("kvrouter.core")

# Log entries applied before the loop may answer questions again, and transitions: about a millisecond at 2,048 an entry, and
# some milliseconds for the largest entry there is (MAX_PENDING_BLOCKS of a stream).
ENTRIES_PER_TURN = 8
BLOCKS_PER_TURN = 32_768

SWEEP_INTERVAL_S = 0.05
GAUGE_INTERVAL_S = 1.0

# How soon a worker registered elsewhere is known here: a look is one GET. The whole registry is read again now and then all the
# same, for a process that died between its change and telling of it.
REGISTRY_LOOK_S = 0.25
REGISTRY_READ_S = 10.0


class Core:
    """Registrations, streams, mirror and answers."""

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
    ) -> None:
        """http: to ask engines whether they live, and what load they have; None: they are not asked. token: names this process
        in leases; one that outlives the process lets its successor take over at once."""
        self._store = store
        self._config = config
        self._metrics = metrics
        self._context = zmq_context
        self._clock = clock
        self._rng = rng
        self._http = http
        self._token = token or secrets.token_hex(8)
        self._mirror = Mirror(config.mirror_budget_bytes)
        self._allowed = AllowList(config.allow_hosts)
        self._permits = Permits(rng=rng)
        self._memory = SegmentMemory(config.segment_memory_bytes)
        self._matcher = Matcher(self._mirror, self._memory)
        self._history = RoutingHistory(config.approximate_ttl_s)
        self._streams: dict[WorkerKey, WorkerStream] = {}
        self._names = ModelNames(parse_aliases(config.model_aliases))
        self._names_known = False
        self._adapters = None if http is None else AdapterWatch(http, self._urls, self._on_adapters)
        self._follower = LogFollower(store.servers, rng=rng)
        self._tasks: list[asyncio.Task[None]] = []
        # By model, with the version of the mirror that they were made from; any change of a worker empties it.
        self._plans: dict[str, tuple[int, Plans]] = {}
        self._listeners: list[Callable[[WorkerKey, WorkerView | None], None]] = []
        self._registered: tuple[Registration, ...] | None = None
        self._prefill_workers: dict[str, frozenset[WorkerKey]] | None = None
        self._segments_counted = (0, 0)
        # Why the log of a worker cannot be followed: in a cluster, some can and some cannot.
        self._unfollowed: dict[WorkerKey, str] = {}
        self._loaded = False
        # Told what engines that are followed here say of their load.
        self.on_engine_load: Callable[[WorkerKey, EngineLoad], None] = lambda worker, said: None
        self._lock = asyncio.Lock()
        self._attendance = Attendance(self._token)
        # The workers that this process should follow; none before it attends.
        self._mine: frozenset[WorkerKey] | None = None
        self._attends = False
        # The version of the registry that `_streams` was made from.
        self._registry = 0
        # Workers that were not in the registry at the last look, though nobody told of a change.
        self._missing: set[WorkerKey] = set()
        self._store_lost_s: float | None = None

    async def start(self) -> None:
        """Load what Redis holds, then follow it and the workers. Raises StoreError when Redis cannot be read."""
        await self._follow_registry(await self._store.registry_version())
        # After the loading, which takes its time: from here on others hand workers over to this process.
        await self._attend()
        for stream in self._streams.values():
            stream.start()
        self._loaded = True
        for task in (self._follow_logs(), self._sweep(), self._gauge(), self._attend_always(), self._watch_registry()):
            self._tasks.append(asyncio.get_running_loop().create_task(task))
        if self._adapters is not None:
            self._tasks.append(asyncio.get_running_loop().create_task(self._adapters.run()))

    async def stop(self) -> None:
        """End all tasks; what was committed stays in Redis."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(stream.stop() for stream in self._streams.values()))
        await self._follower.close()
        if self._attends:
            with contextlib.suppress(StoreError):
                await self._store.leave(self._token)

    async def _attend(self) -> None:
        """Count among the routers, and see who else does."""
        seen = await self._store.attend(self._token, self._config.lease_ttl_s)
        if self._attendance.look(seen) and self._attends:
            log.info("routers changed", extra={"routers": len(self._attendance.routers)})
            self._mine = None
        self._attends = True

    async def _attend_always(self) -> None:
        while True:
            await asyncio.sleep(self._config.lease_ttl_s / LOOKS_PER_TTL)
            # Without the store nothing can be taken or handed over; its absence is shown where it is followed.
            with contextlib.suppress(StoreError):
                await self._attend()

    def _is_mine(self, worker: WorkerKey) -> bool:
        """Whether this process should follow the worker."""
        if self._mine is None:
            found = shares(self._streams, self._attendance.routers)
            self._mine = frozenset(worker for worker, router in found.items() if router == self._token)
        return worker in self._mine

    async def _watch_registry(self) -> None:
        """Follow what other processes register and drop."""
        read_s = self._clock()
        while True:
            await asyncio.sleep(REGISTRY_LOOK_S)
            try:
                async with self._lock:
                    version = await self._store.registry_version()
                    if version < self._registry:
                        await self._restore_registry()
                        version = await self._store.registry_version()
                    due = version != self._registry or self._clock() > read_s + REGISTRY_READ_S
                    if due and await self._follow_registry(version):
                        read_s = self._clock()
            except StoreError as error:
                log.debug("registry not read", extra={"error": str(error)})
            except Exception:
                # A defect of ours must not end the task unseen: registrations of others would never be known.
                self._metrics.internal_errors.labels("registry").inc()
                log.exception("registry not followed")

    async def _restore_registry(self) -> None:
        """The store lost what was written to it: give it the registrations that are known here."""
        known = {worker: msgspec.json.encode(stream.registration) for worker, stream in self._streams.items()}
        log.warning("registry lost, written back", extra={"workers": len(known), "version": self._registry})
        await self._store.restore_registrations(known, self._registry)
        self._metrics.registry_repairs.inc()

    async def _follow_registry(self, version: int) -> bool:
        """Make the workers here those of the registry as it is at `version` or later. False: look again soon."""
        stored: dict[WorkerKey, Registration] = {}
        for worker, raw in (await self._store.registrations()).items():
            try:
                stored[worker] = msgspec.json.decode(raw, type=Registration)
            except msgspec.MsgspecError as error:
                log.warning("stored registration not readable", extra={"worker": worker, "error": str(error)})
        missing = self._streams.keys() - stored.keys()
        if missing and version == self._registry:
            # Nobody told of a change: a node of a cluster lost it, or whoever drops them has not come to telling yet.
            if missing == self._missing:
                await self._restore_registry()
            self._missing = missing
            return False
        self._missing = set()
        for worker in missing:
            await self._end(worker)
            log.info("unregistered elsewhere", extra={"worker": worker})
        for worker, registration in stored.items():
            known = self._streams.get(worker)
            if known is not None and known.registration == registration:
                continue
            if known is not None and _same_stream(known.registration, registration):
                self._update(known, registration)
                continue
            if known is not None:
                await self._end(worker)
            elif len(self._streams) >= self._config.max_workers:
                log.warning("registered worker left out: raise max_workers", extra={"worker": worker})
                continue
            await self._begin(registration)
        self._registry = version
        return True

    async def register(self, registration: Registration) -> None:
        """The same again is a no-op; a different one for the same id and rank replaces it. Raises HostNotAllowed."""
        problem = self._allowed.registration_problem(registration)
        if problem:
            raise HostNotAllowed(problem)
        async with self._lock:
            worker = registration.worker
            known = self._streams.get(worker)
            if known is not None and known.registration == registration:
                return
            raw = msgspec.json.encode(registration)
            if known is not None and _same_stream(known.registration, registration):
                await self._store.put_registration(worker, raw)
                self._update(known, registration)
                return
            self._check_room(registration)
            for other in list(self._streams):
                if (other.worker_id, other.dp_rank) == (worker.worker_id, worker.dp_rank):
                    await self._drop(other)
            await self._store.put_registration(worker, raw)
            await self._begin(registration)
            log.info("registered", extra={"worker": worker, "events": registration.events})

    def _update(self, stream: WorkerStream, registration: Registration) -> None:
        """Take over what the stream does not depend on."""
        if stream.registration.draining != registration.draining:
            state = "draining" if registration.draining else "active"
            log.info("worker", extra={"worker": registration.worker, "state": state})
        self._registered = self._prefill_workers = None
        self._names_known = False
        stream.update(registration)

    def _check_room(self, registration: Registration) -> None:
        worker, limit = registration.worker, self._config.max_workers
        replaces = any((o.worker_id, o.dp_rank) == (worker.worker_id, worker.dp_rank) for o in self._streams)
        if len(self._streams) >= limit and not replaces:
            raise Conflict(
                f"{limit} workers are registered, as many as this router follows: unregister one, or raise max_workers",
                code="too_many_workers",
            )

    async def unregister(self, worker_id: str, dp_rank: int | None = None, model: str | None = None) -> int:
        """Drop the workers that match, and their residency everywhere; returns how many there were."""
        async with self._lock:
            matching = [
                worker
                for worker in self._streams
                if worker.worker_id == worker_id and dp_rank in (None, worker.dp_rank) and model in (None, worker.model)
            ]
            for worker in matching:
                await self._drop(worker)
            return len(matching)

    async def _begin(self, registration: Registration) -> None:
        worker = registration.worker
        stream = WorkerStream(
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
            mine=self._is_mine,
            allowed=self._allowed,
            permits=self._permits,
            changed=lambda: self._view_changed(worker),
            engine_load=lambda said: self.on_engine_load(worker, said),
        )
        image = await self._store.load(worker)
        stream.prepare(image, await self._store.load_copies(worker))
        self._streams[worker] = stream
        self._names_known = False
        self._mine = self._registered = self._prefill_workers = None
        self._take_image(image)
        self._plans.clear()
        if self._attends:
            stream.start()

    async def _drop(self, worker: WorkerKey) -> None:
        """Drop it here and for all."""
        stream = self._part_with(worker)
        await stream.stop()
        await self._forget(worker)
        await self._store.drop_registration(worker)
        log.info("unregistered", extra={"worker": worker})

    async def _end(self, worker: WorkerKey) -> None:
        """Another process dropped or replaced it: end it here, with what it has in Redis if it was followed here."""
        stream = self._part_with(worker)
        await stream.forget()
        await self._forget(worker)

    def _part_with(self, worker: WorkerKey) -> WorkerStream:
        stream = self._streams.pop(worker)
        self._names_known = False
        self._mine = None
        self._plans.clear()
        self._registered = self._prefill_workers = None
        for listener in self._listeners:
            listener(worker, None)
        return stream

    def listen(self, listener: Callable[[WorkerKey, WorkerView | None], None]) -> None:
        """Be told of each change of a worker's view, and with None that it was dropped."""
        self._listeners.append(listener)

    def _view_changed(self, worker: WorkerKey) -> None:
        self._plans.clear()
        if (stream := self._streams.get(worker)) is not None:
            for listener in self._listeners:
                listener(worker, stream.view)

    async def _forget(self, worker: WorkerKey) -> None:
        await self._follower.remove(worker)
        self._regain_store([worker])
        self._mirror.forget(worker)
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
        return stream is not None and stream.registration.draining

    def models(self) -> list[str]:
        return sorted({worker.model for worker in self._streams})

    def _views(self, model: str) -> list[WorkerView]:
        views = [stream.view for worker, stream in self._streams.items() if worker.model == model]
        if not views:
            known = ", ".join(map(printable, self.models())) or "none yet"
            raise UnknownModel(f"no worker is registered for model {model!r}; registered models: {known}")
        listed = {} if self._adapters is None else self._adapters.listed
        return [_with_adapters(view, listed.get(view.url or "", {})) for view in views]

    def resolve(self, name: str) -> Served:
        """What a request's `model` means. Raises UnknownModel."""
        return self._known_names().resolve(name)

    def names(self) -> list[str]:
        """All that a request's `model` may be: models, their adapters, and aliases."""
        return self._known_names().names()

    def _known_names(self) -> ModelNames:
        if not self._names_known:
            self._names.learn(self.registrations(), {} if self._adapters is None else self._adapters.listed)
            self._names_known = True
        return self._names

    def _urls(self) -> set[str]:
        """Of all engines that may be asked something."""
        urls = {stream.registration.url for stream in self._streams.values()}
        return {url for url in urls if url is not None and not self._allowed.problem(url)}

    def _on_adapters(self) -> None:
        self._names_known = False
        self._plans.clear()

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

    def _current_plans(self, model: str) -> Plans:
        """The model's workers as the matcher wants them, made anew when anything of them changed."""
        version = self._mirror.version
        known = self._plans.get(model)
        if known is None or known[0] != version:
            known = self._plans[model] = (version, Plans.build(self._mirror, self._views(model)))
        return known[1]

    def ask(self, question: Question) -> Sequence[Hit]:
        """One hit for each worker of the model that the question does not leave out, in no particular order."""
        return asked_for(self.hits(question), question)

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
        return [self._status(stream, now) for _, stream in sorted(self._streams.items())]

    def _status(self, stream: WorkerStream, now: float) -> WorkerStatus:
        ingest = stream.shown_ingest
        catalog = ingest.catalog
        return WorkerStatus(
            worker_id=stream.worker.worker_id,
            dp_rank=stream.worker.dp_rank,
            model=stream.worker.model,
            url=stream.registration.url,
            state=stream.view.state.value,
            state_age_s=round(now - stream.since_s, 3),
            credited=stream.view.credited,
            approximate=stream.view.approximate,
            reason="; ".join(filter(None, (self._store_problem, stream.view.reason, self._lost_credit(stream.worker)))),
            epoch=stream.visible_epoch,
            seq=stream.visible_seq,
            catalog=catalog.as_dict(),
            catalog_source=catalog.source,
            hash_scheme=ingest.identity.label,
            residency=stream.counts(),
            lag_ms=None if stream.lag_s is None else round(stream.lag_s * 1000, 3),
            gaps=stream.gaps,
            recovery=Recovery(**{name: getattr(ingest.tally, name) for name in Recovery.__struct_fields__}),
            last_event_age_s=_age_s(ingest.last_event_s, now),
            patch=_patch_status(ingest, now),
            refused_blocks=ingest.tally.refused + self._refused(stream.worker),
            draining=stream.registration.draining,
            role=stream.registration.role.value,
            handover=stream.registration.handover.value,
        )

    def readiness(self) -> str | None:
        if not self._loaded:
            return "the index is being loaded from Redis"
        if not self._streams:
            return "no worker is registered: POST /register, or start with --worker"
        return None

    def health(self) -> list[str]:
        problems = [] if self._store_problem is None else [self._store_problem]
        unwritten = {stream.problem for stream in self._streams.values() if stream.problem}
        if self._store_problem is None:
            problems += [f"Redis takes no commits ({problem}); answers grow old" for problem in sorted(unwritten)]
        for stream in self._streams.values():
            view = stream.view
            if lost := self._lost_credit(view.worker):
                problems.append(f"worker {view.worker.worker_id} (rank {view.worker.dp_rank}): {lost}")
            if view.state is not StreamState.LIVE or view.catalog.problem is not None:
                why = view.reason or view.catalog.problem or ""
                problems.append(
                    f"worker {printable(view.worker.worker_id)} (rank {view.worker.dp_rank}) is {view.state.value}: {why}"
                )
        return problems

    def _take_image(self, image: WorkerImage) -> None:
        """Make the mirror equal to what was loaded, and follow on from there."""
        worker = image.worker
        self._mirror.begin_epoch(worker, image.epoch or "")
        for place, hashes in image.places.items():
            self._add(worker, place, hashes)
        self._follower.add_image(image)
        self._streams[worker].take_image(image)
        self._streams[worker].shown(image.epoch or "", image.seq, self._clock())

    def _add(self, worker: WorkerKey, place: Place, hashes: NDArray[np.uint64]) -> None:
        try:
            self._mirror.add(worker, place, hashes)
        except MirrorFull as error:
            self._metrics.mirror_refused_blocks.labels(self._metrics.worker_label(worker)).inc(len(hashes))
            if self._refused(worker) == len(hashes):
                log.warning("mirror full", extra={"worker": worker, "reason": str(error)})

    def _refused(self, worker: WorkerKey) -> int:
        """Blocks of its epoch that found no room in the mirror."""
        known = self._mirror.worker(worker)
        return 0 if known is None else known.refused_blocks

    def _lost_credit(self, worker: WorkerKey) -> str:
        refused = self._refused(worker)
        if not refused:
            return ""
        return (
            f"{refused} of its blocks found no room in memory and earn no credit until it begins anew: raise mirror_budget_bytes "
            f"({self._config.mirror_budget_bytes}), or let this router follow fewer workers"
        )

    async def _follow_logs(self) -> None:
        while True:
            entries = blocks = 0
            for item in in_turns(await self._follower.next()):
                await self._take(item)
                entries += 1
                blocks += _size_blocks(item)
                if entries >= ENTRIES_PER_TURN or blocks >= BLOCKS_PER_TURN:
                    entries = blocks = 0
                    await asyncio.sleep(0)
            await asyncio.sleep(0)

    async def _take(self, item: FollowerItem) -> None:
        if isinstance(item, LogEntry):
            self._apply(item)
        elif isinstance(item, Reload):
            log.warning("reload", extra={"worker": item.worker, "reason": item.reason})
            try:
                image = await self._store.load(item.worker)
                if item.worker in self._streams:
                    self._take_image(image)
                self._regain_store([item.worker])
            except StoreError as error:
                self._lose_store([item.worker], str(error))
                await asyncio.sleep(GAUGE_INTERVAL_S)
                if item.worker in self._streams:
                    self._follower.add(item.worker)
        elif isinstance(item, StoreLost):
            self._lose_store(item.workers, item.reason)
        elif isinstance(item, StoreBack):
            self._regain_store(item.workers)

    @property
    def _store_problem(self) -> str | None:
        if not self._unfollowed:
            return None
        reason = next(iter(self._unfollowed.values()))
        return f"Redis does not answer ({reason}); answers come from memory and grow old"

    def _lose_store(self, workers: Iterable[WorkerKey], reason: str) -> None:
        if not self._unfollowed:
            self._store_lost_s = self._clock()
            log.warning("store lost", extra={"reason": reason})
        for worker in workers:
            self._unfollowed[worker] = reason
            if (stream := self._streams.get(worker)) is not None:
                stream.log_heard(False)
        self._metrics.store_up.set(0)

    def _regain_store(self, workers: Iterable[WorkerKey]) -> None:
        was_lost = bool(self._unfollowed)
        for worker in workers:
            self._unfollowed.pop(worker, None)
            if (stream := self._streams.get(worker)) is not None:
                stream.log_heard(True)
        if was_lost and not self._unfollowed:
            self._store_lost_s = None
            self._metrics.store_up.set(1)
            log.info("store back")

    def _apply(self, entry: LogEntry) -> None:
        worker = entry.worker
        stream = self._streams.get(worker)
        if stream is None:
            return
        known = self._mirror.worker(worker)
        if known is None or entry.opened_epoch or known.epoch != entry.epoch:
            self._mirror.begin_epoch(worker, entry.epoch)
        for change in entry.changes:
            self._mirror.discard(worker, change.place, change.removed)
            self._add(worker, change.place, change.added)
        stream.take_entry(entry)
        stream.shown(entry.epoch, entry.last_seq, self._clock())

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(0 if self._mirror.sweep() else SWEEP_INTERVAL_S)

    async def _gauge(self) -> None:
        while True:
            self._measure()
            self._history.expire(self._clock())
            await asyncio.sleep(GAUGE_INTERVAL_S)

    def _measure(self) -> None:
        metrics = self._metrics
        metrics.leases_held.set(sum(stream.held for stream in self._streams.values()))
        metrics.recoveries_waiting.set(self._permits.waiting)
        metrics.routers.set(len(self._attendance.routers))
        lost_s = self._store_lost_s
        metrics.store_silent_seconds.set(0 if lost_s is None else self._clock() - lost_s)
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
            self._measure_worker(worker, stream)

    def _measure_worker(self, worker: WorkerKey, stream: WorkerStream) -> None:
        metrics = self._metrics
        label = metrics.worker_label(worker)
        now, before = stream.ingest.tally, stream.counted
        counters = {
            "batches": metrics.ingest_batches,
            "events": metrics.ingest_events,
            "blocks": metrics.ingest_blocks,
            "broken": metrics.ingest_broken_events,
            "unknown": metrics.ingest_unknown_events,
            "refused": metrics.ingest_refused_blocks,
            "gaps": metrics.stream_gaps,
            "missed_batches": metrics.stream_missed_batches,
            "ghost_blocks": metrics.stream_ghost_blocks,
            "lost_blocks": metrics.stream_lost_blocks,
            "restarts": metrics.stream_restarts,
            "losses": metrics.stream_engine_losses,
            "heartbeats": metrics.patch_heartbeats,
            "mismatches": metrics.patch_mismatches,
        }
        for name, counter in counters.items():
            # What it refused for want of room counts from zero when it begins again.
            counter.labels(label).inc(max(0, getattr(now, name) - getattr(before, name)))
        for how, name in RESYNCS.items():
            metrics.stream_resyncs.labels(label, how).inc(max(0, getattr(now, name) - getattr(before, name)))
        if stream.lag_s is not None:
            metrics.stream_event_lag_seconds.labels(label).set(stream.lag_s)
        stream.counted = msgspec.structs.replace(now)
        metrics.set_stream_state(worker, stream.view.state.value)


def in_turns(items: list[FollowerItem]) -> Iterator[FollowerItem]:
    """Each worker's in its order, one of each worker in turn: a worker with many does not keep the others waiting."""
    queues: dict[WorkerKey | None, deque[FollowerItem]] = {}
    for item in items:
        worker = item.worker if isinstance(item, LogEntry | Reload) else None
        queues.setdefault(worker, deque()).append(item)
    while queues:
        for worker in list(queues):
            yield queues[worker].popleft()
            if not queues[worker]:
                del queues[worker]


def _size_blocks(item: FollowerItem) -> int:
    changes = item.changes if isinstance(item, LogEntry) else ()
    return sum(len(change.added) + len(change.removed) for change in changes)


def _age_s(then: float | None, now: float) -> float | None:
    return None if then is None else round(now - then, 3)


def _patch_status(ingest: ReportIngest, now: float) -> PatchStatus | None:
    if ingest.greeting is None:
        return None
    hello = ingest.greeting.hello
    return PatchStatus(
        version=hello.patch_version,
        epoch=ingest.report_epoch or hello.epoch,
        heartbeat_age_s=_age_s(ingest.last_heartbeat_s, now),
        heartbeats=ingest.tally.heartbeats,
        mismatches=ingest.tally.mismatches,
        snapshots=ingest.tally.snapshots,
        features=hello.features,
    )


def _with_adapters(view: WorkerView, listed: Mapping[str, str]) -> WorkerView:
    """The view with the paths that its engine lists; what was declared or registered wins."""
    return msgspec.structs.replace(view, lora_paths={**listed, **view.lora_paths}) if listed else view


def _same_stream(old: Registration, new: Registration) -> bool:
    """Whether two registrations differ at most in what the stream does not depend on."""
    return (
        msgspec.structs.replace(
            old, url=new.url, lora_name=new.lora_name, draining=new.draining, role=new.role, handover=new.handover
        )
        == new
    )
