# SPDX-License-Identifier: Apache-2.0
"""The registration of workers, for all router processes on one store.

This module registers and drops workers, and keeps this process's registry equal to the one in Redis. `router_peers.py`
and `lease.py` decide which process follows a worker's events.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from typing import TypeVar

import msgspec

from kvrouter.router.base.common import ticks
from kvrouter.router.base.common.errors import Conflict, HostNotAllowed
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.base.redis_client.errors import StoredValueError, StoreError
from kvrouter.router.follow.fleet.fleet_metrics import FleetMetrics
from kvrouter.router.follow.fleet.mirror_sync import MirrorSync
from kvrouter.router.follow.fleet.router_peers import RouterPeers
from kvrouter.router.follow.fleet.worker_registry import WorkerRegistry
from kvrouter.router.follow.streams.follower import Follower
from kvrouter.router.follow.streams.stream_services import StreamServices
from kvrouter.router.index.store import keys, registry
from kvrouter.router.index.store.commit import WorkerImage
from kvrouter.router.index.store.store import IndexStore
from kvrouter.router.model.config.settings import Config
from kvrouter.router.model.workers.allow_list import AllowList
from kvrouter.router.model.workers.registration import Registration
from kvrouter.router.model.workers.source_precedence import PLACES, wins

log = logging.getLogger("kvrouter.fleet")

# How soon this process notices a worker that was registered elsewhere. A look is one GET.
REGISTRY_LOOK_S = 0.25
# How often the whole registry is read anyway, in case a process died between a change and its announcement.
REGISTRY_READ_S = 10.0
# How often the keys that all routers need are checked, and dropped if another program has put a value of another type
# in their place.
FOREIGN_LOOK_S = 1.0
# The fields of a registration that a follower does not depend on.
STREAMLESS_FIELDS = (
    "url",
    "engine_key",
    "lora_name",
    "draining",
    "retiring",
    "role",
    "handover",
    "peer",
    "source",
    "note",
)

REPLACED = "it is registered again, and its index begins empty in a moment"

T = TypeVar("T")


class Fleet:
    """The registered workers, as this process changes them and reads them from Redis.

    Invariant: only the fleet changes the `WorkerRegistry`.
    """

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
        services: StreamServices,
    ) -> None:
        """Begin without workers.

        Args:
            registry: This process's registry.
            peers: The router processes on the store.
            mirror: The mirror of all workers.
            store: Reads and writes the index and the registry in Redis.
            config: The router's settings.
            metrics: Counts repairs and unreadable values.
            clock: Returns the time in seconds, monotonic.
            allowed: The hosts that workers may have.
            services: The services that all followers share.
        """
        self._registry = registry
        self._followers = registry.followers
        self._store = store
        self._max_workers = config.max_workers
        self._metrics = metrics
        self._clock = clock
        self._allowed = allowed
        self.peers = peers
        self._mirror = mirror
        self._services = services
        self._lock = asyncio.Lock()
        # The version of the registry in Redis to which this process's registry is equal.
        self._version = 0
        # Workers that the registry in Redis lacked at the last look, although no change was announced.
        self._missing: set[WorkerKey] = set()
        # The registration of each follower as Redis has it, or had it before it lost that.
        self._known: dict[WorkerKey, bytes] = {}

    async def start(self) -> None:
        """Load the registered workers from Redis, and start to follow them. Raises StoreError if Redis is unreadable."""
        await self._replace_foreign_keys()
        await self._follow_registry(await self._store.registry.version())
        # Announce this process only after the slow loading: from here on others hand workers over to it.
        await self.peers.beat()
        for follower in self._followers.values():
            follower.start()

    async def stop(self) -> None:
        """Stop all followers. Call this after the end of the tasks; Redis keeps all commits."""
        await asyncio.gather(*(follower.stop() for follower in self._followers.values()))

    async def watch_registry(self) -> None:
        """Apply the registrations and removals of other processes, until cancelled."""
        read_s = looked_s = self._clock()
        while True:
            await ticks.sleep(REGISTRY_LOOK_S)
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
                log.debug("registrations not read from Redis", extra={"error": str(error)})

    def knows(self, worker: WorkerKey) -> bool:
        """Return whether the worker is registered, as far as this process has read."""
        return worker in self._followers

    async def read_changes(self) -> None:
        """Apply the changes of other processes that are not known here yet. Raises StoreError."""
        async with self._lock:
            await self._read_changes()

    async def _read_changes(self) -> None:
        version = await self._store.registry.version()
        while version > self._version and not await self._follow_registry(version):
            version = await self._store.registry.version()

    async def _replace_foreign_keys(self) -> None:
        for _ in await self._store.common_keys.replace_foreign(self._registry.models()):
            self._metrics.unreadable_values["common"].inc()

    async def _restore_registry(self) -> None:
        """Write the known registrations back to a store that lost some of them."""
        log.warning(
            "registrations lost by Redis and written back",
            extra={"workers": len(self._known), "version": self._version},
        )
        await self._store.registry.restore(self._known, self._version)
        self._metrics.registry_repairs.inc()

    async def _follow_registry(self, version: int) -> bool:
        """Make this process's workers those of the registry in Redis; return False if it must be read again soon.

        Args:
            version: The version that the registry in Redis had before this call. The entries read may be newer.
        """
        stored, left_out = await self._stored_registrations()
        if any(
            worker in self._known and registry.is_outdated(raw, self._known[worker])
            for worker, (raw, _) in stored.items()
        ):
            # A router that did not know the lost changes has raised the version, so the version does not show the loss.
            await self._restore_registry()
            return False
        missing = self._followers.keys() - stored.keys()
        if missing and version == self._version:
            # No change was announced: a node of a cluster lost the entries, or the announcement is still to come.
            if missing == self._missing:
                await self._restore_registry()
            self._missing = missing
            return False
        if missing and await self._store.registry.version() != version:
            # The registry changed, or lost data, during the reading. The missing workers may be among the lost data.
            return False
        self._missing = set()
        # These workers are registered for another model now, with the same id and rank; they are replaced below.
        moved = {worker for worker in missing if worker[1:] in {stored_worker[1:] for stored_worker in stored}}
        await self._end_all(missing - moved)
        for worker, (raw, registration) in stored.items():
            if not await self._take_stored(raw, registration, moved):
                log.warning("registered worker left out: raise max_workers", extra={"worker": worker})
                left_out[worker] = (
                    f"this router already follows {self._max_workers} workers, its limit: raise max_workers"
                )
        await self._end_all(moved & self._followers.keys())
        self._registry.leave_out(left_out)
        self._version = version
        return True

    async def _take_stored(self, raw: bytes, registration: Registration, moved: Collection[WorkerKey]) -> bool:
        """Follow a worker as it is registered in Redis; return False if this router follows too many already.

        Args:
            raw: The stored value.
            registration: The stored registration.
            moved: Workers that are registered for another model now.
        """
        worker = registration.worker
        follower = self._followers.get(worker)
        same_ids = self._registry.workers_with(worker.worker_id, worker.dp_rank)
        if follower is not None and follower.state.registration == registration:
            self._known[worker] = raw
        elif follower is not None and _same_follower(follower.state.registration, registration):
            self._update(follower, raw, registration)
        elif replaced := [other for other in same_ids if other == worker or other in moved]:
            await self._replace(replaced, raw, registration, partial(self._forget_all, replaced))
        elif len(self._followers) >= self._max_workers:
            return False
        else:
            await self._begin(raw, registration)
        return True

    async def _stored_registrations(
        self,
    ) -> tuple[dict[WorkerKey, tuple[bytes, Registration]], dict[WorkerKey, str]]:
        """Read the registry in Redis; return its values and registrations, and the reasons why workers are left out.

        A worker whose entry cannot be read is still registered. If this process has the worker, its last known
        registration is returned, otherwise the worker is left out.
        """
        raws, unreadable = await self._store.registry.load()
        stored: dict[WorkerKey, tuple[bytes, Registration]] = {}
        left_out: dict[WorkerKey, str] = {}
        for worker, raw in raws.items():
            if raw == self._known.get(worker):
                stored[worker] = raw, self._followers[worker].state.registration
                continue
            try:
                stored[worker] = raw, registry.decode(worker, raw)
            except StoredValueError as error:
                unreadable.append(error)
                if worker not in self._followers:
                    left_out[worker] = f"its registration cannot be read here: {error}"
        unreadable_fields = {(error.key, error.field) for error in unreadable}
        illegible = {
            worker
            for worker in self._followers
            if unreadable_fields
            and not {(keys.registry(worker.model), field) for field in ("", keys.registry_field(worker))}.isdisjoint(
                unreadable_fields
            )
        }
        stored |= {worker: (self._known[worker], self._followers[worker].state.registration) for worker in illegible}
        self._take_problems([str(error) for error in unreadable])
        return stored, left_out

    def _take_problems(self, problems: list[str]) -> None:
        for problem in problems:
            if problem not in self._registry.problems:
                self._metrics.unreadable_values["registry"].inc()
                log.error("registry not readable", extra={"reason": problem})
        self._registry.problems = problems

    async def register(self, registration: Registration) -> None:
        """Register a worker, replacing a different registration of the same id and rank.

        Repeating a registration changes nothing.

        Raises:
            HostNotAllowed: If the allow list does not have the worker's host.
            Conflict: If a source that takes precedence describes the worker differently, or there are too many workers.
        """
        async with self._lock:
            await self._register(registration)

    async def change(
        self, worker: WorkerKey, change: Callable[[Registration | None], Registration | None]
    ) -> Registration | None:
        """Register a worker as its newest registration requires, and return that registration.

        Args:
            worker: The worker.
            change: Takes the newest registration, or None if there is none; returns the one to register, or None to change
                nothing. A registration that was read before could undo the changes of other routers since.

        Raises:
            HostNotAllowed, Conflict: As `register` does.
        """
        async with self._lock:
            await self._read_changes()
            follower = self._followers.get(worker)
            registration = change(None if follower is None else follower.state.registration)
            if registration is not None:
                await self._register(registration)
            return registration

    async def _register(self, registration: Registration) -> None:
        if problem := self._allowed.registration_problem(registration):
            raise HostNotAllowed(problem)
        worker = registration.worker
        follower = self._followers.get(worker)
        same_url = follower is not None and follower.state.registration.url == registration.url is not None
        if follower is not None and same_url and registration.engine is None:
            # The detected kind of an engine stays if the same engine is registered without a kind.
            registration = msgspec.structs.replace(registration, engine=follower.state.registration.engine)
        known = None if follower is None else follower.state.registration
        # The version alone does not show what is stored: a store that lost its last writes may have a change and not
        # its version.
        stored = await self._store.registry.stored(worker)
        if known is not None and _says_the_same(known, registration) and stored == self._known[worker]:
            return
        replaced = self._registry.workers_with(worker.worker_id, worker.dp_rank)
        for other in replaced:
            _check_owner(self._followers[other].state.registration, registration)
        raw = self._store.registry.value(registration)
        if follower is not None and _same_follower(follower.state.registration, registration):
            version = await self._store.registry.put(worker, raw)
            self._update(follower, raw, registration)
            self._take_version(version)
            return
        if len(self._followers) >= self._max_workers and not replaced:
            raise Conflict(
                f"{self._max_workers} workers are registered, as many as this router follows: unregister one, or raise "
                "max_workers",
                code="too_many_workers",
            )

        async def put() -> int:
            if follower is not None:
                await self._store.registry.void(worker)
            version = await self._store.registry.put(worker, raw)
            # Drop the others after the put, so that no reader of the registry misses both.
            for other in replaced:
                if other != worker:
                    await self._store.registry.drop(other)
            return version

        self._take_version(await self._replace(replaced, raw, registration, put))
        log.info("registered", extra={"worker": worker, "events": registration.events, "source": registration.source})

    def _take_version(self, version: int) -> None:
        """Note that the registry in Redis has `version` after a change that was also made here.

        If another process made a change in between, the version is not noted, so all of the registry is read again.
        """
        if version == self._version + 1:
            self._version = version

    def _update(self, follower: Follower, raw: bytes, registration: Registration) -> None:
        """Take over a registration that differs only in fields on which the follower does not depend."""
        if follower.state.registration.drains != registration.drains:
            state = "draining" if registration.drains else "active"
            log.info("worker", extra={"worker": registration.worker, "state": state})
        self._registry.update(registration)
        self._known[registration.worker] = raw

    async def unregister(self, worker_id: str, dp_rank: int | None = None, model: str | None = None) -> int:
        """Drop the matching workers and their residency everywhere; return their number.

        Args:
            worker_id: The id of the workers.
            dp_rank: The rank to drop; None drops all ranks.
            model: The model whose worker to drop; None drops those of all models.

        Raises:
            Conflict: If a source of a living router would bring one of the workers back.
        """
        async with self._lock:
            matching = [
                worker
                for worker in self._followers
                if worker.worker_id == worker_id and dp_rank in (None, worker.dp_rank) and model in (None, worker.model)
            ]
            claimed: set[tuple[str, int]] = set()
            for source in {self._followers[worker].state.registration.source for worker in matching}:
                claimed |= await self.peers.claimed(source, own=True)
            for worker in matching:
                if (worker.worker_id, worker.dp_rank) in claimed:
                    source = self._followers[worker].state.registration.source
                    raise Conflict(
                        f"worker {worker_id!r} would come back at once: take it out of {PLACES.get(source, source)}; or drain "
                        'it (`kvrouter drain`, or PATCH its state to "draining"), and it gets no new request',
                        code="kept_by_source",
                    )
            for worker in matching:
                await self._drop(worker)
            return len(matching)

    async def withdraw(self, worker: WorkerKey, source: str) -> bool:
        """Drop a worker that its source no longer lists; return False if the worker does not belong to this source."""
        async with self._lock:
            follower = self._followers.get(worker)
            if follower is None or follower.state.registration.source != source:
                return False
            await self._drop(worker)
            return True

    async def _replace(
        self, replaced: Sequence[WorkerKey], raw: bytes, registration: Registration, store: Callable[[], Awaitable[T]]
    ) -> T:
        """Begin the worker of `registration` in place of `replaced`, and return the result of `store`.

        The replaced workers are shown without credit until the new one begins. If `store` raises StoreError, they are
        followed again, and the error is raised.

        Args:
            replaced: The workers to end.
            raw: The new registration as Redis has it.
            registration: The new registration.
            store: Changes Redis accordingly; called once this process no longer follows the replaced workers.
        """
        for other in replaced:
            follower = self._followers[other]
            follower.state.on_image_problem(REPLACED)
            await follower.stop()
            await self._mirror.forget(other)
        try:
            stored = await store()
            await self._begin(raw, registration, replaced)
        except StoreError as error:
            for other in replaced:
                former = self._followers[other].state.registration
                await self._begin(self._known[other], former, [other], problem=str(error))
            raise
        return stored

    async def _begin(
        self, raw: bytes, registration: Registration, replaced: Sequence[WorkerKey] = (), *, problem: str = ""
    ) -> None:
        """Begin to follow a worker from its state in Redis.

        Args:
            raw: The worker's registration as Redis has it.
            registration: The same, decoded.
            replaced: Workers to remove from the registry in the same step; their followers have ended.
            problem: Why the worker cannot be loaded from Redis now; "" loads it.
        """
        worker = registration.worker
        follower = Follower(registration, self._services)
        image = WorkerImage.empty(worker)
        try:
            if not problem:
                image = await self._store.load(worker)
                follower.prepare(image, {} if image.epoch is None else await self._store.load_copies(worker))
                problem = follower.state.unreadable(image)
        except StoredValueError as error:
            problem = str(error)
            follower.prepare(WorkerImage.empty(worker), {})
            # The router that follows the worker has in memory all that was lost, copies included.
            with contextlib.suppress(StoreError):
                await self._store.report_unreadable(worker, problem)
        # Nothing below waits, so no reader sees the old workers go before the new one comes.
        for other in replaced:
            self._remove(other)
            self._metrics.forget_worker(other)
        self._registry.add(follower)
        self._known[worker] = raw
        if problem:
            self._mirror.take_unreadable(worker, problem)
        else:
            self._mirror.take_image(image)
        if self.peers.attends:
            follower.start()

    def _remove(self, worker: WorkerKey) -> Follower:
        self._known.pop(worker, None)
        return self._registry.remove(worker)

    async def _drop(self, worker: WorkerKey) -> None:
        """Drop the worker here and in Redis."""
        await self._remove(worker).stop()
        await self._forget(worker)
        await self._store.registry.drop(worker)
        log.info("unregistered", extra={"worker": worker})

    async def _end_all(self, workers: Collection[WorkerKey]) -> None:
        """End workers that another process dropped, and delete their index in Redis if they were followed here."""
        for worker in sorted(workers):
            try:
                await self._remove(worker).forget()
            finally:
                # The mirror drops the worker, whatever the store answers, because it may be registered again.
                await self._forget(worker)
            log.info("unregistered elsewhere", extra={"worker": worker})

    async def _forget_all(self, workers: Collection[WorkerKey]) -> None:
        """Delete the index in Redis of workers that were followed here; they are still shown."""
        for worker in workers:
            await self._followers[worker].forget()

    async def _forget(self, worker: WorkerKey) -> None:
        """Remove a worker whose follower has ended from the mirror and the metrics."""
        await self._mirror.forget(worker)
        self._metrics.forget_worker(worker)


def _check_owner(known: Registration, new: Registration) -> None:
    """Raise Conflict if the source of the known registration takes precedence over that of the new one."""
    if wins(known.source, new.source):
        worker = known.worker
        raise Conflict(
            f"worker {worker.worker_id!r} rank {worker.dp_rank} is kept by {PLACES.get(known.source, known.source)}: change it "
            "there, or take another worker_id",
            code="kept_by_source",
        )


def _says_the_same(known: Registration, new: Registration) -> bool:
    """Return whether `new` changes nothing about the known registration.

    The source and the note do not count if the known registration's source takes precedence.
    """
    if wins(known.source, new.source):
        new = msgspec.structs.replace(new, source=known.source, note=known.note)
    return known == new


def _same_follower(old: Registration, new: Registration) -> bool:
    """Return whether two registrations differ at most in STREAMLESS_FIELDS."""
    return msgspec.structs.replace(old, **{name: getattr(new, name) for name in STREAMLESS_FIELDS}) == new
