# SPDX-License-Identifier: Apache-2.0
"""Which workers there are, the same in all router processes on one store, and a stream for each. The registry is in
Redis.

Who registers and drops is whoever is asked to; who follows a worker's events is in `assignment.py` and
`lease_holder.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

import msgspec

from kvrouter.router.common.errors import Conflict, HostNotAllowed
from kvrouter.router.common.ids import WorkerKey
from kvrouter.router.config.settings import Config
from kvrouter.router.fleet.assignment import assign_workers
from kvrouter.router.fleet.heartbeat import VERSION, Heartbeat, encode_heartbeat
from kvrouter.router.fleet.membership import INTERVAL_S, Membership
from kvrouter.router.index import keys, registry
from kvrouter.router.index.store import IndexStore, StoredValueError, StoreError, WorkerImage
from kvrouter.router.streams.worker_stream import WorkerStream
from kvrouter.router.telemetry.metrics import Metrics
from kvrouter.router.workers.allow_list import AllowList
from kvrouter.router.workers.registration import Registration
from kvrouter.router.workers.source_precedence import PLACES, wins

log = logging.getLogger("kvrouter.fleet")

# How soon a worker registered elsewhere is known here: a look is one GET. The whole registry is read again now and then
# all the same, for a process that died between its change and telling of it.
REGISTRY_LOOK_S = 0.25
REGISTRY_READ_S = 10.0


class Claims(msgspec.Struct, frozen=True):
    """What one router process sees in its sources that are well: by the source's name, worker ids and ranks."""

    workers: dict[str, list[tuple[str, int]]] = {}


class Fleet:
    """`streams` has one for each registered worker; it is the mirror's and the core's too, and only this changes it."""

    def __init__(
        self,
        streams: dict[WorkerKey, WorkerStream],
        *,
        store: IndexStore,
        config: Config,
        metrics: Metrics,
        clock: Callable[[], float],
        token: str,
        allowed: AllowList,
        make_stream: Callable[[Registration, Callable[[WorkerKey], bool]], WorkerStream],
        take_image: Callable[[WorkerImage], None],
        take_unreadable: Callable[[WorkerKey, str], None],
        changed: Callable[[], None],
        leaves: Callable[[WorkerKey], None],
        forget: Callable[[WorkerKey], Awaitable[None]],
    ) -> None:
        """make_stream(registration, mine). take_image: what Redis holds of a new worker; take_unreadable: why that
        cannot be read. changed: one came, went, or was registered otherwise. leaves: its stream is to end; forget: it
        has ended."""
        self._streams = streams
        self._store = store
        self._config = config
        self._metrics = metrics
        self._clock = clock
        self._token = token
        self._allowed = allowed
        self._make_stream = make_stream
        self._take_image = take_image
        self._take_unreadable = take_unreadable
        self._changed = changed
        self._leaves = leaves
        self._forget = forget
        self._lock = asyncio.Lock()
        self._membership = Membership(token, ttl_s=config.lease_ttl_s, now_s=clock())
        self._beats = 0
        self._ignored = 0
        self._store_silent = False
        # The workers that this process should follow; none before it attends.
        self._mine: frozenset[WorkerKey] | None = None
        self._attends = False
        # The version of the registry that `_streams` was made from.
        self._registry = 0
        # Registered workers that have no stream here, and why.
        self._left_out: dict[WorkerKey, str] = {}
        # Workers that were not in the registry at the last look, though nobody told of a change.
        self._missing: set[WorkerKey] = set()
        # What of the registry cannot be read, and the workers of this process that are registered there so.
        self.problems: list[str] = []
        self._illegible: set[WorkerKey] = set()

    async def start(self) -> None:
        """Load what Redis holds, and begin to follow it. Raises StoreError when Redis cannot be read."""
        await self._follow_registry(await self._store.registry_version())
        # After the loading, which takes its time: from here on others hand workers over to this process.
        await self._beat()
        for stream in self._streams.values():
            stream.start()

    async def stop(self) -> None:
        """After the tasks: what was committed stays in Redis."""
        await asyncio.gather(*(stream.stop() for stream in self._streams.values()))

    async def leave(self) -> None:
        """Count among the routers no longer."""
        if self._attends:
            with contextlib.suppress(StoreError):
                await self._store.drop_heartbeats([self._token])

    @property
    def routers(self) -> int:
        """Router processes that count as alive, this one included."""
        return len(self._membership.routers)

    @property
    def store_silent_s(self) -> float:
        """How long Redis has not answered, 0 while it does."""
        return self._membership.silent_s(self._clock())

    @property
    def store_problem(self) -> str | None:
        if not (silent_s := self.store_silent_s):
            return None
        return f"Redis has not answered for {silent_s:.0f} s: what other routers learn is not known here, and the other way round"

    async def _beat(self) -> None:
        """Write this router's heartbeat, and judge those of the others."""
        membership = self._membership
        heartbeat = encode_heartbeat(self._heartbeat())
        changed = membership.look(await self._store.beat(self._token, heartbeat), self._clock())
        self._metrics.heartbeats_ignored.inc(membership.ignored - self._ignored)
        self._ignored = membership.ignored
        if changed:
            log.info("routers changed", extra={"routers": len(membership.routers), "refused": len(membership.refusals)})
            self._mine = None
        self._attends = True
        if forgotten := membership.forgotten:
            await self._store.drop_heartbeats(forgotten)

    def _heartbeat(self) -> Heartbeat:
        self._beats += 1
        holds: dict[str, int] = {}
        late: list[str] = []
        refuses = {keys.worker_tag(worker): reason for worker, reason in self._left_out.items()}
        for stream in self._streams.values():
            if stream.held:
                holds[stream.tag] = stream.lease_number
                if stream.is_late:
                    late.append(stream.tag)
            if stream.refusal:
                refuses[stream.tag] = stream.refusal
        return Heartbeat(self._beats, VERSION, holds, late, refuses)

    async def beat_always(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_S)
            # Without the store nothing can be taken or handed over; its absence is judged below.
            with contextlib.suppress(StoreError):
                await self._beat()

    async def judge_followers(self) -> None:
        """Mark the workers whose followers are not heard, also while Redis answers nothing."""
        while True:
            now_s = self._clock()
            is_silent = self._membership.silent_s(now_s) > 0
            if is_silent is not self._store_silent:
                self._store_silent = is_silent
                self._metrics.store_up.set(not is_silent)
                if is_silent:
                    log.warning("store lost", extra={"reason": self.store_problem})
                else:
                    log.info("store back")
            for stream in self._streams.values():
                stream.follower_heard(self._membership.follower_problem(stream.tag, now_s))
            await asyncio.sleep(INTERVAL_S)

    def _is_mine(self, worker: WorkerKey) -> bool:
        """Whether this process should follow the worker."""
        if self._mine is None:
            workers = [*self._streams, *self._left_out]
            refusals = self._membership.refusals
            refused = {one: set(refusals.get(keys.worker_tag(one), ())) for one in workers}
            for other in workers:
                stream = self._streams.get(other)
                if stream is None or stream.refusal:
                    refused[other].add(self._token)
            found = assign_workers(workers, self._membership.routers, refused)
            self._mine = frozenset(worker for worker, router in found.items() if router == self._token)
        return worker in self._mine

    async def watch_registry(self) -> None:
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
            except StoredValueError as error:
                if self.problems != [str(error)]:
                    self.problems = [str(error)]
                    self._metrics.unreadable_values.labels("registry").inc()
                    log.error("registry not readable", extra={"reason": str(error)})
            except StoreError as error:
                log.debug("registry not read", extra={"error": str(error)})

    async def _restore_registry(self) -> None:
        """The store lost what was written to it: give it the registrations that are known here."""
        known = {worker: msgspec.json.encode(stream.registration) for worker, stream in self._streams.items()}
        log.warning("registry lost, written back", extra={"workers": len(known), "version": self._registry})
        await self._store.restore_registrations(known, self._registry)
        self._metrics.registry_repairs.inc()

    async def _follow_registry(self, version: int) -> bool:
        """Make the workers here those of the registry as it is at `version` or later. False: look again soon."""
        stored, left_out = await self._stored_registrations()
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
                left_out[worker] = (
                    f"it has {self._config.max_workers} workers, as many as it follows: raise max_workers"
                )
                continue
            await self._begin(registration)
        if left_out != self._left_out:
            self._left_out, self._mine = left_out, None
        self._registry = version
        return True

    async def _stored_registrations(self) -> tuple[dict[WorkerKey, Registration], dict[WorkerKey, str]]:
        """Those that can be read, and why others cannot. Of those, what is known here stays: they are registered all
        the same."""
        raws, unreadable = await self._store.registrations()
        stored: dict[WorkerKey, Registration] = {}
        left_out: dict[WorkerKey, str] = {}
        for worker, raw in raws.items():
            try:
                stored[worker] = registry.decode(worker, raw)
            except StoredValueError as error:
                unreadable.append(error)
                if worker not in self._streams:
                    left_out[worker] = f"its registration cannot be read here: {error}"
        whole = {(error.key, error.field) for error in unreadable}
        self._illegible = {
            worker
            for worker in self._streams
            if not {(keys.registry(worker.model), field) for field in ("", keys.registry_field(worker))}.isdisjoint(
                whole
            )
        }
        stored |= {worker: self._streams[worker].registration for worker in self._illegible}
        problems = [str(error) for error in unreadable]
        for problem in problems:
            if problem not in self.problems:
                self._metrics.unreadable_values.labels("registry").inc()
                log.error("registry not readable", extra={"reason": problem})
        self.problems = problems
        return stored, left_out

    async def register(self, registration: Registration) -> None:
        """The same again is a no-op; a different one for the same id and rank replaces it. Raises HostNotAllowed, and
        Conflict where a source that wins says something else."""
        problem = self._allowed.registration_problem(registration)
        if problem:
            raise HostNotAllowed(problem)
        async with self._lock:
            worker = registration.worker
            known = self._streams.get(worker)
            if known is not None and _says_the_same(known.registration, registration) and worker not in self._illegible:
                return
            replaced = [other for other in self._streams if other[1:] == worker[1:]]
            for other in replaced:
                self._check_owner(self._streams[other].registration, registration)
            raw = msgspec.json.encode(registration)
            if known is not None and _same_stream(known.registration, registration):
                await self._store.put_registration(worker, raw)
                self._update(known, registration)
                return
            self._check_room(registration, len(replaced))
            for other in replaced:
                await self._drop(other)
            await self._store.put_registration(worker, raw)
            await self._begin(registration)
            log.info(
                "registered", extra={"worker": worker, "events": registration.events, "source": registration.source}
            )

    def _check_owner(self, known: Registration, new: Registration) -> None:
        if not wins(known.source, new.source):
            return
        worker = known.worker
        raise Conflict(
            f"worker {worker.worker_id!r} rank {worker.dp_rank} is kept by {PLACES.get(known.source, known.source)}: change it "
            "there, or take another worker_id",
            code="kept_by_source",
        )

    def _update(self, stream: WorkerStream, registration: Registration) -> None:
        """Take over what the stream does not depend on."""
        if stream.registration.drains != registration.drains:
            state = "draining" if registration.drains else "active"
            log.info("worker", extra={"worker": registration.worker, "state": state})
        stream.update(registration)
        self._changed()

    def _check_room(self, registration: Registration, replaced: int) -> None:
        limit = self._config.max_workers
        if len(self._streams) >= limit and not replaced:
            raise Conflict(
                f"{limit} workers are registered, as many as this router follows: unregister one, or raise max_workers",
                code="too_many_workers",
            )

    async def unregister(self, worker_id: str, dp_rank: int | None = None, model: str | None = None) -> int:
        """Drop the workers that match, and their residency everywhere; returns how many there were. Raises Conflict
        where a source of a living router would bring one back."""
        async with self._lock:
            matching = [
                worker
                for worker in self._streams
                if worker.worker_id == worker_id and dp_rank in (None, worker.dp_rank) and model in (None, worker.model)
            ]
            claimed: set[tuple[str, int]] = set()
            for source in {self._streams[worker].registration.source for worker in matching}:
                claimed |= await self.claimed(source, own=True)
            for worker in matching:
                if (worker.worker_id, worker.dp_rank) in claimed:
                    source = self._streams[worker].registration.source
                    raise Conflict(
                        f"worker {worker_id!r} would come back at once: take it out of {PLACES.get(source, source)}; or PATCH "
                        'its state to "draining", and it gets no new request',
                        code="kept_by_source",
                    )
            for worker in matching:
                await self._drop(worker)
            return len(matching)

    async def withdraw(self, worker: WorkerKey, source: str) -> bool:
        """Drop a worker that its source does not know any more; False: it is not (or no longer) this source's."""
        async with self._lock:
            stream = self._streams.get(worker)
            if stream is None or stream.registration.source != source:
                return False
            await self._drop(worker)
            return True

    async def claim(self, claims: Claims) -> None:
        """Tell the other routers what the sources of this one see."""
        await self._store.put_claim(self._token, msgspec.json.encode(claims))

    async def disclaim(self) -> None:
        await self._store.drop_claims([self._token])

    async def claimed(self, source: str, *, own: bool = False) -> frozenset[tuple[str, int]]:
        """Ids and ranks that living routers see in a source of this name; own: this process's word counts too."""
        # One that only just began is not known by its heartbeats yet.
        beating = {token.decode("ascii", "replace") for token in await self._store.heartbeats()}
        living = self._membership.routers | {token for token in beating if not self._membership.is_gone(token)}
        found: set[tuple[str, int]] = set()
        dead = []
        for token, raw in (await self._store.claims()).items():
            if token not in living:
                dead.append(token)
            elif own or token != self._token:
                try:
                    found.update(msgspec.json.decode(raw, type=Claims).workers.get(source, ()))
                except (msgspec.MsgspecError, ValueError) as error:
                    self._metrics.unreadable_values.labels("claims").inc()
                    log.warning("claims of another router not readable", extra={"router": token, "error": str(error)})
        if dead:
            await self._store.drop_claims(dead)
        return frozenset(found)

    async def _begin(self, registration: Registration) -> None:
        worker = registration.worker
        stream = self._make_stream(registration, self._is_mine)
        image, unreadable = WorkerImage.empty(worker), None
        try:
            image = await self._store.load(worker)
            stream.prepare(image, await self._store.load_copies(worker))
        except StoredValueError as error:
            unreadable = error
            stream.prepare(WorkerImage.empty(worker), {})
        self._streams[worker] = stream
        self._mine = None
        if unreadable is not None:
            self._take_unreadable(worker, str(unreadable))
        elif problem := stream.unreadable(image):
            self._take_unreadable(worker, problem)
        else:
            self._take_image(image)
        self._changed()
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
        self._mine = None
        self._changed()
        self._leaves(worker)
        return stream


def _says_the_same(known: Registration, new: Registration) -> bool:
    """Whether `new` changes nothing: it may come from a source whose word does not count beside that of the known
    one."""
    if wins(known.source, new.source):
        new = msgspec.structs.replace(new, source=known.source, note=known.note)
    return known == new


def _same_stream(old: Registration, new: Registration) -> bool:
    """Whether two registrations differ at most in what the stream does not depend on."""
    kept = msgspec.structs.replace(
        old,
        url=new.url,
        lora_name=new.lora_name,
        draining=new.draining,
        retiring=new.retiring,
        role=new.role,
        handover=new.handover,
        source=new.source,
        note=new.note,
    )
    return kept == new
