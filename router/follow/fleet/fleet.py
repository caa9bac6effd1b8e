# SPDX-License-Identifier: Apache-2.0
"""Registers and drops workers, for all router processes on one store, and keeps this process's registry equal to the
one in Redis. Who follows a worker's events is in `router_peers.py` and `lease_holder.py`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from typing import TypeVar

import msgspec

from kvrouter.router.base.common.errors import Conflict, HostNotAllowed
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.base.redis_client.errors import StoredValueError, StoreError
from kvrouter.router.follow.fleet.fleet_metrics import FleetMetrics
from kvrouter.router.follow.fleet.mirror_sync import MirrorSync
from kvrouter.router.follow.fleet.router_peers import RouterPeers
from kvrouter.router.follow.fleet.worker_registry import WorkerRegistry
from kvrouter.router.follow.streams.worker_stream import WorkerStream
from kvrouter.router.index.store import keys, registry
from kvrouter.router.index.store.commit import WorkerImage
from kvrouter.router.index.store.store import IndexStore
from kvrouter.router.model.config.settings import Config
from kvrouter.router.model.workers.allow_list import AllowList
from kvrouter.router.model.workers.registration import Registration
from kvrouter.router.model.workers.source_precedence import PLACES, wins

log = logging.getLogger("kvrouter.fleet")

# How soon a worker registered elsewhere is known here: a look is one GET. The whole registry is read again now and then
# all the same, for a process that died between its change and telling of it.
REGISTRY_LOOK_S = 0.25
REGISTRY_READ_S = 10.0
# How often a key that all routers need is checked, and replaced where another program has put something else in its
# place.
FOREIGN_LOOK_S = 1.0
# The fields of a registration that a stream does not depend on.
STREAMLESS_FIELDS = ("url", "lora_name", "draining", "retiring", "role", "handover", "source", "note")

REPLACED = "it is registered again, and begins with nothing in a moment"

T = TypeVar("T")


class Fleet:
    """The one that changes `registry`. make_stream: for a worker that came."""

    def __init__(
        self,
        registry: WorkerRegistry,
        peers: RouterPeers,
        mirror: MirrorSync,
        *,
        store: IndexStore,
        config: Config,
        metrics: FleetMetrics,
        clock: Callable[[], float],
        allowed: AllowList,
        make_stream: Callable[[Registration], WorkerStream],
    ) -> None:
        self._registry = registry
        self._streams = registry.streams
        self._store = store
        self._max_workers = config.max_workers
        self._metrics = metrics
        self._clock = clock
        self._allowed = allowed
        self.peers = peers
        self._mirror = mirror
        self._make_stream = make_stream
        self._lock = asyncio.Lock()
        # The version of the registry in Redis that the one here is equal to.
        self._version = 0
        # Workers that were not in the registry at the last look, though no change was announced.
        self._missing: set[WorkerKey] = set()
        # The registrations that Redis had at the last look, as bytes and as what they mean.
        self._read: dict[WorkerKey, tuple[bytes, Registration]] = {}
        # Workers of this process that are registered in Redis by what cannot be read.
        self._illegible: set[WorkerKey] = set()

    async def start(self) -> None:
        """Load what Redis holds, and begin to follow it. Raises StoreError when Redis cannot be read."""
        await self._replace_foreign_keys()
        await self._follow_registry(await self._store.registry.version())
        # After the loading, which takes its time: from here on others hand workers over to this process.
        await self.peers.beat()
        for stream in self._streams.values():
            stream.start()

    async def stop(self) -> None:
        """After the tasks: what was committed stays in Redis."""
        await asyncio.gather(*(stream.stop() for stream in self._streams.values()))

    async def watch_registry(self) -> None:
        """Follow what other processes register and drop."""
        read_s = looked_s = self._clock()
        while True:
            await asyncio.sleep(REGISTRY_LOOK_S)
            try:
                async with self._lock:
                    if self._clock() > looked_s + FOREIGN_LOOK_S:
                        looked_s = self._clock()
                        await self._replace_foreign_keys()
                    version = await self._store.registry.version()
                    if version < self._version:
                        await self._restore_registry()
                        version = await self._store.registry.version()
                    due = version != self._version or self._clock() > read_s + REGISTRY_READ_S
                    if due and await self._follow_registry(version):
                        read_s = self._clock()
            except StoredValueError as error:
                self._take_problems([str(error)])
            except StoreError as error:
                log.debug("registry not read", extra={"error": str(error)})

    async def _replace_foreign_keys(self) -> None:
        for _ in await self._store.common_keys.replace_foreign(self._registry.models()):
            self._metrics.unreadable_values["common"].inc()

    async def _restore_registry(self) -> None:
        """The store lost what was written to it: give it the registrations that are known here."""
        known = {worker: msgspec.json.encode(stream.registration) for worker, stream in self._streams.items()}
        log.warning("registry lost, written back", extra={"workers": len(known), "version": self._version})
        await self._store.registry.restore(known, self._version)
        self._metrics.registry_repairs.inc()

    async def _follow_registry(self, version: int) -> bool:
        """Make the workers here those of the registry as it is at `version` or later. False: look again soon."""
        stored, left_out = await self._stored_registrations()
        missing = self._streams.keys() - stored.keys()
        if missing and version == self._version:
            # No change was announced: a node of a cluster lost it, or its announcement is still to come.
            if missing == self._missing:
                await self._restore_registry()
            self._missing = missing
            return False
        if missing and await self._store.registry.version() != version:
            # Changed, or lost, while it was read: who is missing may have been lost with it.
            return False
        self._missing = set()
        # These workers were of another model and are registered for this one now; they are replaced below.
        moved = {worker for worker in missing if worker[1:] in {one[1:] for one in stored}}
        await self._end_all(missing - moved)
        for worker, registration in stored.items():
            known = self._streams.get(worker)
            if known is not None and known.registration == registration:
                continue
            if known is not None and _same_stream(known.registration, registration):
                self._update(known, registration)
                continue
            alike = self._registry.workers_with(worker.worker_id, worker.dp_rank)
            if replaced := [one for one in alike if one == worker or one in moved]:
                await self._replace(replaced, registration, partial(self._forget_all, replaced))
                continue
            if len(self._streams) >= self._max_workers:
                log.warning("registered worker left out: raise max_workers", extra={"worker": worker})
                left_out[worker] = f"it has {self._max_workers} workers, as many as it follows: raise max_workers"
                continue
            await self._begin(registration)
        await self._end_all(moved & self._streams.keys())
        self._registry.leave_out(left_out)
        self._version = version
        return True

    async def _stored_registrations(self) -> tuple[dict[WorkerKey, Registration], dict[WorkerKey, str]]:
        """Those that can be read, and why others cannot. Of those, what is known here stays: they are registered all
        the same."""
        raws, unreadable = await self._store.registry.load()
        stored: dict[WorkerKey, Registration] = {}
        left_out: dict[WorkerKey, str] = {}
        for worker, raw in raws.items():
            read = self._read.get(worker)
            try:
                stored[worker] = read[1] if read is not None and read[0] == raw else registry.decode(worker, raw)
            except StoredValueError as error:
                unreadable.append(error)
                if worker not in self._streams:
                    left_out[worker] = f"its registration cannot be read here: {error}"
        self._read = {worker: (raws[worker], registration) for worker, registration in stored.items()}
        whole = {(error.key, error.field) for error in unreadable}
        self._illegible = {
            worker
            for worker in self._streams
            if whole
            and not {(keys.registry(worker.model), field) for field in ("", keys.registry_field(worker))}.isdisjoint(
                whole
            )
        }
        stored |= {worker: self._streams[worker].registration for worker in self._illegible}
        self._take_problems([str(error) for error in unreadable])
        return stored, left_out

    def _take_problems(self, problems: list[str]) -> None:
        for problem in problems:
            if problem not in self._registry.problems:
                self._metrics.unreadable_values["registry"].inc()
                log.error("registry not readable", extra={"reason": problem})
        self._registry.problems = problems

    async def register(self, registration: Registration) -> None:
        """The same again is a no-op; a different one for the same id and rank replaces it. Raises HostNotAllowed, and
        Conflict where a source that wins says something else."""
        if problem := self._allowed.registration_problem(registration):
            raise HostNotAllowed(problem)
        async with self._lock:
            worker = registration.worker
            known = self._streams.get(worker)
            same_url = known is not None and known.registration.url == registration.url is not None
            if known is not None and same_url and registration.engine is None:
                # The kind that was found out about an engine stays when the same engine is registered without a kind.
                registration = msgspec.structs.replace(registration, engine=known.registration.engine)
            is_known = known is not None and _says_the_same(known.registration, registration)
            if is_known and worker not in self._illegible and not await self._may_have_changed():
                return
            replaced = self._registry.workers_with(worker.worker_id, worker.dp_rank)
            for other in replaced:
                _check_owner(self._streams[other].registration, registration)
            raw = msgspec.json.encode(registration)
            if known is not None and _same_stream(known.registration, registration):
                version = await self._store.registry.put(worker, raw)
                self._update(known, registration)
                self._take_version(version)
                return
            if len(self._streams) >= self._max_workers and not replaced:
                raise Conflict(
                    f"{self._max_workers} workers are registered, as many as this router follows: unregister one, or raise "
                    "max_workers",
                    code="too_many_workers",
                )

            async def put() -> int:
                if known is not None:
                    await self._store.registry.void(worker)
                version = await self._store.registry.put(worker, raw)
                # After it: nobody who reads the registry meanwhile misses both.
                for other in replaced:
                    if other != worker:
                        await self._store.registry.drop(other)
                return version

            self._take_version(await self._replace(replaced, registration, put))
            log.info(
                "registered", extra={"worker": worker, "events": registration.events, "source": registration.source}
            )

    async def _may_have_changed(self) -> bool:
        """Whether another process wrote to the registry what is not read here yet. False where Redis does not say."""
        try:
            return await self._store.registry.version() != self._version
        except StoreError:
            return False

    def _take_version(self, version: int) -> None:
        """The registry in Redis is at `version` by a change that was made here too. With a change of another process in
        between, all of it is read again."""
        if version == self._version + 1:
            self._version = version

    def _update(self, stream: WorkerStream, registration: Registration) -> None:
        """Take over what the stream does not depend on."""
        if stream.registration.drains != registration.drains:
            state = "draining" if registration.drains else "active"
            log.info("worker", extra={"worker": registration.worker, "state": state})
        self._registry.update(registration)

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
                claimed |= await self.peers.claimed(source, own=True)
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
        """Drop a worker that its source no longer knows; False: it is not (or no longer) this source's."""
        async with self._lock:
            stream = self._streams.get(worker)
            if stream is None or stream.registration.source != source:
                return False
            await self._drop(worker)
            return True

    async def _replace(
        self, replaced: Sequence[WorkerKey], registration: Registration, store: Callable[[], Awaitable[T]]
    ) -> T:
        """Begin `registration` in place of these workers. store: makes Redis so, once nobody follows them here.

        Until then they are shown, without credit. Raises StoreError: they are followed again when Redis answers."""
        for other in replaced:
            stream = self._streams[other]
            stream.image_lost(REPLACED)
            await stream.stop()
            await self._mirror.forget(other)
        try:
            stored = await store()
            await self._begin(registration, replaced)
        except StoreError as error:
            for other in replaced:
                await self._begin(self._streams[other].registration, [other], problem=str(error))
            raise
        return stored

    async def _begin(
        self, registration: Registration, replaced: Sequence[WorkerKey] = (), *, problem: str = ""
    ) -> None:
        """Follow the worker from what Redis holds of it. replaced: workers whose streams have ended. problem: why Redis
        is not read."""
        worker = registration.worker
        stream = self._make_stream(registration)
        image = WorkerImage.empty(worker)
        try:
            if not problem:
                image = await self._store.load(worker)
                stream.prepare(image, {} if image.epoch is None else await self._store.load_copies(worker))
                problem = stream.unreadable(image)
        except StoredValueError as error:
            problem = str(error)
            stream.prepare(WorkerImage.empty(worker), {})
        # From here on nothing waits: nobody sees the one go before the other comes.
        for other in replaced:
            self._registry.remove(other)
            self._metrics.forget_worker(other)
        self._registry.add(stream)
        if problem:
            self._mirror.take_unreadable(worker, problem)
        else:
            self._mirror.take_image(image)
        if self.peers.attends:
            stream.start()

    async def _drop(self, worker: WorkerKey) -> None:
        """Drop it here and for all."""
        await self._registry.remove(worker).stop()
        await self._forget(worker)
        await self._store.registry.drop(worker)
        log.info("unregistered", extra={"worker": worker})

    async def _end_all(self, workers: Collection[WorkerKey]) -> None:
        """Another process dropped them: end them here, with what they have in Redis if they were followed here."""
        for worker in workers:
            await self._registry.remove(worker).forget()
            await self._forget(worker)
            log.info("unregistered elsewhere", extra={"worker": worker})

    async def _forget_all(self, workers: Collection[WorkerKey]) -> None:
        """Of workers that are still shown, what they have in Redis if they were followed here."""
        for worker in workers:
            await self._streams[worker].forget()

    async def _forget(self, worker: WorkerKey) -> None:
        """Its stream has ended."""
        await self._mirror.forget(worker)
        self._metrics.forget_worker(worker)


def _check_owner(known: Registration, new: Registration) -> None:
    if wins(known.source, new.source):
        worker = known.worker
        raise Conflict(
            f"worker {worker.worker_id!r} rank {worker.dp_rank} is kept by {PLACES.get(known.source, known.source)}: change it "
            "there, or take another worker_id",
            code="kept_by_source",
        )


def _says_the_same(known: Registration, new: Registration) -> bool:
    """Whether `new` changes nothing: it may come from a source whose word does not count beside that of the known
    one."""
    if wins(known.source, new.source):
        new = msgspec.structs.replace(new, source=known.source, note=known.note)
    return known == new


def _same_stream(old: Registration, new: Registration) -> bool:
    """Whether two registrations differ at most in what the stream does not depend on."""
    return msgspec.structs.replace(old, **{name: getattr(new, name) for name in STREAMLESS_FIELDS}) == new
