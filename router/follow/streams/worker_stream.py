# SPDX-License-Identifier: Apache-2.0
"""The following of one worker: one task takes the lease, leads the worker's mirror, and reads the worker's streams.

While the process has the lease, it leads the mirror (`mirror_lead.py`), so its answers need no Redis. If the lease is
lost or the store was replaced, the task begins again: from memory if no other process followed the worker meanwhile,
else from the state in Redis. While another process follows the worker, `peer_view.py` provides the state, as long as
that process is heard. `stream_machine.py` makes the decisions, and `worker_record.py` holds the knowledge.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import zmq

from kvrouter.contract.worker_status import EngineCache
from kvrouter.router.base.common.ids import Place, WorkerKey
from kvrouter.router.base.redis_client.errors import StoredValueError, StoreError
from kvrouter.router.follow.streams.commit_loop import MAX_PENDING_BLOCKS, CommitLoop
from kvrouter.router.follow.streams.engine_poller import EnginePoller
from kvrouter.router.follow.streams.lease_holder import RETRY_FIRST_S, RETRY_LAST_S, HandedOver, LeaseHolder, LeaseLost
from kvrouter.router.follow.streams.mirror_lead import MirrorLead
from kvrouter.router.follow.streams.peer_view import RESTORE_ERRORS, PeerView, engine_start_s
from kvrouter.router.follow.streams.source_switch import PAUSED, SourceSwitch
from kvrouter.router.follow.streams.stream_machine import Action, Event
from kvrouter.router.follow.streams.stream_services import StreamServices
from kvrouter.router.follow.streams.stream_view import IMAGE_UNCONFIRMED, NO_FOLLOWER_YET, Position
from kvrouter.router.follow.streams.worker_record import WorkerRecord
from kvrouter.router.index.ingest.counters import IngestCounters
from kvrouter.router.index.ingest.engine_liveness import EngineLiveness
from kvrouter.router.index.ingest.ingest import Ingest
from kvrouter.router.index.ingest.worker_profile import WorkerProfile
from kvrouter.router.index.matching.matcher import WorkerView
from kvrouter.router.index.store import keys
from kvrouter.router.index.store.checkpoint import LogTail
from kvrouter.router.index.store.commit import WorkerImage
from kvrouter.router.index.store.log_entry import LogEntry
from kvrouter.router.model.engines.engine_metrics import EngineLoad
from kvrouter.router.model.workers.registration import Registration

log = logging.getLogger("kvrouter.stream")

# If the lease is not taken within this fraction of a lease's life, another process is assumed to have it. A first
# taking of a free lease takes some round trips.
LOOKS_BEFORE_ELSEWHERE = 10


class WorkerStream:
    """The following of one worker, from `start` to `stop`, and everything that this process shows of the worker."""

    def __init__(
        self,
        registration: Registration,
        services: StreamServices,
        *,
        mine: Callable[[WorkerKey], bool],
        disowns: Callable[[str, WorkerKey, float], bool],
        changed: Callable[[], None],
        engine_load: Callable[[EngineLoad], None],
    ) -> None:
        """Prepare to follow the worker; `start` begins.

        Args:
            registration: The worker's registration.
            services: The services that all streams of the process share.
            mine: Returns whether this process should follow the worker.
            disowns: Returns whether the router with a token has not named the worker in its heartbeats since a time.
            changed: Called when `view` changed.
            engine_load: Called with each load that the engine reports.
        """
        self.worker = worker = registration.worker
        # Names the worker in heartbeats.
        self.tag = keys.worker_tag(worker)
        # A problem of the registration that does not end the worker's credit.
        self.note = ""
        # Since when the worker gets no new requests, as far as this process knows; None if it gets them.
        self.drains_since_s = services.clock() if registration.drains else None
        # Why the engine refuses this router's queries.
        self.refused = ""
        self._services = services
        self.record = WorkerRecord(registration, services, changed)
        self._lease = LeaseHolder(
            worker,
            services,
            mine=lambda: mine(worker),
            disowns=lambda token, since_s: disowns(token, worker, since_s),
            changed=self.record.store_changed,
        )
        self.commits = CommitLoop(self.record, self._lease, services)
        self._engine = EnginePoller(self.record, self.commits, services, engine_load)
        self._sources = SourceSwitch(self.record, self._lease, self.commits, self._engine, services)
        # The counts that the metrics include already.
        self.counted = IngestCounters()
        # The (epoch, seq) in Redis from which the ingest was prepared, None once the ingest is ahead of it.
        self._prepared: tuple[str | None, int | None] | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def registration(self) -> Registration:
        """The worker's present registration."""
        return self.record.registration

    @property
    def view(self) -> WorkerView:
        """The worker as the matcher sees it."""
        return self.record.view

    @property
    def ingest(self) -> Ingest:
        """The ingest of the worker's events in this process."""
        return self.record.ingest

    @property
    def profile(self) -> WorkerProfile:
        """The worker's catalog and identity, whichever process follows it."""
        return self.record.profile

    @property
    def life(self) -> tuple[WorkerKey, int]:
        """The worker and the number of its engine's life, as far as `EngineLives` distinguishes them."""
        return self.worker, self.record.lives.number

    @property
    def engine_start_s(self) -> float | None:
        """When the engine's process started, None if it is unknown."""
        return self.record.engine_start_s

    @property
    def cache(self) -> EngineCache:
        """The engine's description of its KV cache."""
        return self.record.cache

    @property
    def block_size(self) -> int | None:
        """The tokens of one block as the engine describes them, else as registered; None if neither names them."""
        return self.cache.block_size or self.registration.block_size

    @property
    def held(self) -> bool:
        """Whether this process follows the worker."""
        return self._lease.held

    @property
    def problem(self) -> str | None:
        """Why this process's knowledge of the worker cannot reach Redis now, None if it can."""
        return self.record.facts.hold_problem or self._lease.problem

    @property
    def refusal(self) -> str | None:
        """Why this router may not follow the worker, None if it may.

        Such a worker was registered through another router, or before the allow list was set.
        """
        return self.record.facts.refusal

    @property
    def disk_problem(self) -> str:
        """The problem of the disk below the engine's offload tier, "" if there is none."""
        return self.record.disk_problem

    @property
    def cpu_tier_problem(self) -> str:
        """The problem of the engine's CPU tier, as this process polls it; "" if there is none."""
        return self.record.facts.offload.cpu_tier_problem(self._services.clock())

    @property
    def clears_problem(self) -> str:
        """How often the engine clears its cache if that is too often, or ""."""
        return self.record.clears.problem(self._services.clock())

    @property
    def withheld(self) -> str:
        """Why the worker's blocks beside the GPU earn less than they could, or "" if they do not."""
        is_elsewhere = self.record.is_elsewhere
        return self.profile.withheld(self.record.peer.places if is_elsewhere else self.ingest.held.blocks.places)

    def counts(self) -> dict[str, int]:
        """Return the number of blocks at each place, by the place's text."""
        return self.record.peer.counts() if self.record.is_elsewhere else self.ingest.held.blocks.counts()

    def judge(self, *, alone: bool, contradiction: str, note: str, refused: str = "") -> None:
        """Accept the verdict on this worker that follows from judging all registrations together.

        Args:
            alone: Whether no other rank of the worker id is registered.
            contradiction: Why the worker's events must come from another engine; empty if they need not.
            note: Another problem of its registration; empty if there is none.
            refused: Why its engine refuses this router's queries; empty if it does not.
        """
        facts = self.record.facts
        if contradiction != facts.contradiction and contradiction:
            log.warning("registration contradicted", extra={"worker": self.worker, "reason": contradiction})
        if note != self.note and note:
            log.warning("registration doubtful", extra={"worker": self.worker, "reason": note})
        if refused != self.refused:
            self.refused = refused
            if refused:
                log.warning("engine refuses the router", extra={"worker": self.worker, "reason": refused})
        changed = (alone, contradiction, note) != (facts.alone, facts.contradiction, self.note)
        facts.alone, facts.contradiction, self.note = alone, contradiction, note
        if changed:
            self._engine.judge_ranks()

    def update(self, registration: Registration) -> None:
        """Take over a registration that differs only in fields on which the stream does not depend."""
        if registration.url not in (None, self.registration.url):
            self._engine.move(registration.url)
        if registration.drains != self.registration.drains:
            self.drains_since_s = self._services.clock() if registration.drains else None
        self.record.registration = registration
        self.record.facts.refusal = self._services.allowed.registration_problem(registration)
        self.record.refresh()

    def settle(self) -> None:
        """Drop a past incident from the reason of a live worker once it was shown long enough."""
        self.record.settle()

    def prepare(self, image: WorkerImage, copies: dict[tuple[Place, int], int]) -> None:
        """Prepare the ingest from the worker's state in Redis, before the stream brings anything.

        Args:
            image: The state of the worker in Redis.
            copies: The number of copies of each block that has several, by place and block hash.
        """
        record = self.record
        record.forget_ingest()
        self._prepared = (image.epoch, image.seq)
        self.commits.tail = LogTail(image.tail_entries, image.tail_blocks)
        record.facts.vitals = EngineLiveness(engine_start_s(image.meta))
        if image.epoch is not None and image.seq is not None:
            try:
                record.ingest.restore(image.epoch, image.seq, image.places, copies, image.meta)
            except RESTORE_ERRORS as error:
                # Use no part of a value whose meaning is unknown.
                log.warning("stored state not readable", extra={"worker": self.worker, "error": str(error)})
                record.forget_ingest()
                record.ingest.begin_unreadable(str(error))
            # The tally has the gaps of the worker's whole life, and other processes have counted those in their metrics.
            self.counted.gaps = record.ingest.profile.tally.gaps
        record.refresh()

    def take_image(self, image: WorkerImage) -> None:
        """Take the image that was loaded from Redis into the mirror."""
        before = self.position
        self.record.peer.take_image(image)
        if self.position.lease != before.lease or self.position.commits < before.commits:
            # The last judgement of the follower was about other entries than those that the image has.
            self.record.facts.follower_problem = IMAGE_UNCONFIRMED
        self.record.facts.log_loaded = True
        self.record.shown.epoch, self.record.shown.seq = image.epoch or "", image.seq
        self.record.events.load(image.epoch or "", image.seq, image.places)
        self.record.refresh()

    def take_entry(self, entry: LogEntry) -> None:
        """Take a log entry that was applied to the mirror."""
        record = self.record
        shapes = record.peer.take_entry(entry, self._services.clock())
        if entry.opened_epoch:
            record.events.begin_epoch(entry.epoch, record.peer.reason)
        seq = record.shown.seq if entry.last_seq is None else entry.last_seq
        record.events.changed(entry.epoch, seq, entry.changes)
        if shapes and record.is_elsewhere:
            record.refresh()

    def shown(self, epoch: str, seq: int | None) -> None:
        """Note that the mirror shows everything up to `seq` of `epoch`; None keeps the seq."""
        self.record.shown.advance(epoch, seq)

    def log_heard(self, heard: bool) -> None:
        """Note whether the worker's log in the store can be read, through which other routers share their knowledge."""
        self.record.facts.log_heard = heard
        self.record.refresh()

    @property
    def position(self) -> Position:
        """How far this process has read the log entries of the worker's follower."""
        return self.record.peer.position

    def follower_heard(self, problem: str | None) -> None:
        """Note why the other router that follows the worker is not heard, None if it is."""
        if problem != self.record.facts.follower_problem:
            self.record.facts.follower_problem = problem
            if self.record.is_elsewhere:
                self.record.refresh()

    def set_image_problem(self, reason: str) -> None:
        """Note why the mirror lacks the worker's blocks in Redis, so the worker earns no credit; "" if it has them."""
        self.record.facts.image_problem = reason
        self.record.refresh()

    def unreadable(self, image: WorkerImage) -> str:
        """Return why the stored image cannot be interpreted, or "" if it can."""
        peer_view = PeerView(self.registration, self._services.config.none_hash_seed)
        peer_view.take_image(image)
        return peer_view.problem

    def start(self) -> None:
        """Start the task that follows the worker, unless this router may not follow it."""
        if self.refusal:
            log.warning("worker not followed", extra={"worker": self.worker, "reason": self.refusal})
            return
        self._task = self._services.supervisor.start("stream", self._run, of=self.worker.route_name)

    async def stop(self) -> None:
        """End the task and give the lease back. Redis keeps all commits."""
        self.record.facts.stopping = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        # The task may have ended between taking the lease and following.
        await self._lease.release()
        self.commits.end_lead()
        self.record.end_timer()

    async def forget(self) -> None:
        """End the task, and delete the worker's index in Redis unless another process follows the worker."""
        await self.stop()
        await self._lease.forget()

    async def _run(self) -> None:
        try:
            await self._follow_always()
        except asyncio.CancelledError as error:
            # A frame of TaskGroup refers to the error, and the error's traceback to the frame. This cycle would keep all
            # of the worker's objects until a full garbage collection, for which a router rarely has reason.
            raise error.with_traceback(None) from None

    async def _follow_always(self) -> None:
        """Take the lease and follow the worker, again after each error."""
        retry_s = RETRY_FIRST_S
        while True:
            try:
                action = await self._take_lease()
                retry_s = RETRY_FIRST_S
                await self._hold(action)
            except HandedOver as change:
                log.info("worker handed over", extra={"worker": self.worker, "reason": str(change)})
            except (LeaseLost, StoreError) as error:
                self._say(str(error))
                log.warning("worker not held", extra={"worker": self.worker, "reason": str(error)})
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, RETRY_LAST_S)
            except zmq.ZMQError as error:
                self._say(f"cannot subscribe to {self.registration.events}: {error}")
                await asyncio.sleep(RETRY_LAST_S)
            except Exception:
                # The error must not end the worker's task unseen. The next try begins from the state in Redis.
                self.record.step(Event.DEFECT)
                self._services.metrics.internal_errors.labels("stream").inc()
                log.exception("stream failed", extra={"worker": self.worker})
                self._say("internal error while following this worker: a bug in the router; its log has the details")
                await asyncio.sleep(RETRY_LAST_S)

    def _say(self, hold_problem: str) -> None:
        """Show why this process does not have the worker's lease."""
        self.record.facts.hold_problem = hold_problem
        self.record.refresh()

    async def _hold(self, action: Action) -> None:
        """Follow the worker under one lease until an exception ends it. The lease is given back."""
        try:
            await self._sources.follow(action)
        except (asyncio.CancelledError, HandedOver):
            await self.commits.write_rest()
            raise
        finally:
            self.record.step(Event.HOLD_ENDED)
            self.record.pause(PAUSED)
            await self._lease.release()

    async def _take_lease(self) -> Action:
        """Wait for the lease and take the lead; return the action with which the following begins."""
        record = self.record
        self.commits.sending = None
        if not self._lease.wanted:
            await self._show_others()
        taking = asyncio.ensure_future(self._lease.take())
        try:
            pause_s = self._services.config.lease_ttl_s / LOOKS_BEFORE_ELSEWHERE
            done, _ = await asyncio.wait({taking}, timeout=pause_s)
            if not done:
                await self._show_others()
            alone = await taking
        finally:
            taking.cancel()
        if record.step(Event.LEASE_REGAINED if alone else Event.LEASE_TAKEN) is Action.CONTINUE:
            self._continue()
        else:
            await self._rebuild()
        record.facts.hold_problem = None
        record.facts.follower_problem = None
        self.commits.begin_lead()
        action = record.step(Event.LEAD_BEGUN if record.ingest.resume_point is None else Event.LEAD_RESUMED)
        log.info(
            "worker held",
            extra={"worker": self.worker, "epoch": record.ingest.held.epoch, "seq": record.ingest.held.seq},
        )
        record.refresh()
        return action

    async def _show_others(self) -> None:
        """Show the state that the other process, which follows the worker, publishes. Raises StoreError."""
        record = self.record
        record.step(Event.LEASE_ELSEWHERE)
        record.facts.hold_problem = None
        # Until the next judgement of the followers, no router vouches for the stored state.
        record.facts.follower_problem = NO_FOLLOWER_YET
        record.forget_ingest()
        record.lead = self._prepared = None
        self.commits.end_lead()
        record.refresh()
        if not record.facts.log_loaded:
            await self._services.mirror.follow_log(self.worker)

    def _continue(self) -> None:
        """Lead with the blocks in memory."""
        record = self.record
        assert record.lead is not None
        if not record.lead.continues(record.ingest.held, *self._lease.written):
            log.warning("index in Redis rewritten from memory", extra={"worker": self.worker})
            self.commits.rewrite()

    async def _rebuild(self) -> None:
        """Lead with the blocks in Redis: load them into the ingest and the mirror. Raises StoreError."""
        record, store = self.record, self._services.store
        log_loaded, record.lead, record.facts.log_loaded = record.facts.log_loaded, None, False
        await self._services.mirror.lead(self.worker)
        if self._lease.written != self._prepared:
            # Others have committed since, or the ingest is broken.
            try:
                image, copies = await store.load(self.worker), await store.load_copies(self.worker)
                self.prepare(image, copies)
            except StoredValueError as error:
                # An empty ingest opens a new epoch, which voids the stored values.
                log.warning("stored index void: it cannot be read", extra={"worker": self.worker, "reason": str(error)})
                self.prepare(WorkerImage.empty(self.worker), {})
                record.ingest.begin_unreadable(str(error))
        lead = MirrorLead(self.worker, self._services.mirror, max_blocks=MAX_PENDING_BLOCKS)
        # A mirror that read the log up to the same commit already shows the same blocks.
        held = record.ingest.held
        if not log_loaded or (record.shown.epoch, record.shown.seq) != (held.epoch, held.seq):
            record.events.load(held.epoch, held.seq, lead.show_all(held))
            record.shown.advance(held.epoch, held.seq)
        record.lead, self._prepared = lead, None
