# SPDX-License-Identifier: Apache-2.0
"""One worker, followed: one task takes the lease, has the lead, and follows the worker's streams until the hold ends.

While it holds the lease it leads the mirror (`mirror_lead.py`): its answers need no Redis. Whatever breaks its hold (a
lost lease, a store that is elsewhere) makes it begin again: from memory where nobody else followed the worker
meanwhile, else from what Redis holds. While another process follows it, `peer_view.py` says what it is, for as long as
that process is heard. `stream_machine.py` has the decisions, `worker_record.py` what is known."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import zmq

from kvrouter.router.base.common.ids import Place, WorkerKey
from kvrouter.router.base.redis_client.errors import StoredValueError, StoreError
from kvrouter.router.follow.streams.commit_loop import MAX_PENDING_BLOCKS, CommitLoop
from kvrouter.router.follow.streams.disk_watch import DiskWatch
from kvrouter.router.follow.streams.engine_poller import EnginePoller
from kvrouter.router.follow.streams.lease_holder import RETRY_FIRST_S, RETRY_LAST_S, HandedOver, LeaseHolder, LeaseLost
from kvrouter.router.follow.streams.mirror_lead import MirrorLead
from kvrouter.router.follow.streams.peer_view import RESTORE_ERRORS, PeerView, engine_start_s
from kvrouter.router.follow.streams.source_switch import PAUSED, SourceSwitch
from kvrouter.router.follow.streams.stream_machine import Action, Event
from kvrouter.router.follow.streams.stream_services import StreamServices
from kvrouter.router.follow.streams.stream_view import NO_FOLLOWER_YET, Position
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
from kvrouter.router.model.workers.engine_cache import EngineCache
from kvrouter.router.model.workers.registration import Registration

log = logging.getLogger("kvrouter.stream")

# A worker that is not had within this part of a lease's life is another process's. A first taking is some round trips.
LOOKS_BEFORE_ELSEWHERE = 10


class WorkerStream:
    """Follows one worker from registration to `stop`. What has no docstring here has one in `WorkerRecord`."""

    def __init__(
        self,
        registration: Registration,
        services: StreamServices,
        *,
        mine: Callable[[WorkerKey], bool],
        changed: Callable[[], None],
        engine_load: Callable[[EngineLoad], None],
    ) -> None:
        """changed: called when `view` did. engine_load: called with what the engine reports. mine: is it ours?"""
        self.worker = worker = registration.worker
        # Names the worker in heartbeats.
        self.tag = keys.worker_tag(worker)
        # A problem of its registration that takes no credit.
        self.note = ""
        # Since when it has taken no new requests, as far as this process knows.
        self.drains_since_s = services.clock() if registration.drains else None
        # Why its engine refuses this router's queries.
        self.refused = ""
        self._services = services
        self._record = WorkerRecord(registration, services, changed)
        self._lease = LeaseHolder(
            worker,
            store=services.store,
            rounds=services.leases,
            held=services.held,
            token=services.token,
            ttl_s=services.config.lease_ttl_s,
            metrics=services.metrics,
            mine=lambda: mine(worker),
            changed=self._record.store_changed,
        )
        self.commits = CommitLoop(self._record, self._lease, services)
        self._engine = EnginePoller(self._record, self.commits, services, engine_load)
        self._sources = SourceSwitch(self._record, self._lease, self.commits, self._engine, services)
        # The counts that are in the metrics already.
        self.counted = IngestCounters()
        # (epoch, seq) in Redis that the ingest was prepared from, None once it goes on from there.
        self._prepared: tuple[str | None, int | None] | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def registration(self) -> Registration:
        return self._record.registration

    @property
    def view(self) -> WorkerView:
        return self._record.view

    @property
    def ingest(self) -> Ingest:
        """What this process itself learns of the worker."""
        return self._record.ingest

    @property
    def profile(self) -> WorkerProfile:
        return self._record.profile

    @property
    def visible_epoch(self) -> str | None:
        return self._record.shown.epoch

    @property
    def visible_seq(self) -> int | None:
        return self._record.shown.seq

    @property
    def lag_s(self) -> float | None:
        return self._record.shown.lag_s

    @property
    def since_s(self) -> float:
        return self._record.since_s

    @property
    def life(self) -> tuple[WorkerKey, int]:
        """Return the number of the engine's life, as far as `EngineLives` distinguishes them."""
        return self.worker, self._record.lives.number

    @property
    def cache(self) -> EngineCache:
        """Return the engine's description of its KV cache."""
        return self._record.cache

    @property
    def block_size(self) -> int | None:
        """Return the tokens of one block as the engine describes it, else as registered; None if neither names it."""
        return self.cache.block_size or self.registration.block_size

    @property
    def held(self) -> bool:
        """Whether this process follows the worker."""
        return self._lease.held

    @property
    def problem(self) -> str | None:
        """Why what this process learns of the worker cannot reach Redis now."""
        return self._record.facts.hold_problem or self._lease.problem

    @property
    def refusal(self) -> str | None:
        """Why the worker is not followed: it was registered through another router, or before the setting was made."""
        return self._record.facts.refusal

    @property
    def disk(self) -> DiskWatch:
        return self._record.facts.disk

    @property
    def disk_problem(self) -> str:
        return self._record.disk_problem

    @property
    def cpu_tier_problem(self) -> str:
        """What is wrong with the CPU tier of the engine's offload tier, as far as this process polls it."""
        return self._record.facts.cpu_tier.problem(self._services.clock())

    @property
    def withheld(self) -> str:
        """Why what it holds beside the GPU earns less than its blocks could; empty where it does not."""
        is_elsewhere = self._record.is_elsewhere
        return self.profile.withheld(self._record.peer.places if is_elsewhere else self.ingest.held.blocks.places)

    @property
    def gaps(self) -> int:
        return self._record.incidents.gaps

    def counts(self) -> dict[str, int]:
        """Blocks by the text of their place."""
        return self._record.peer.counts() if self._record.is_elsewhere else self.ingest.held.blocks.counts()

    def judge(self, *, alone: bool, contradiction: str, note: str, refused: str = "") -> None:
        """Take the judgement of this worker beside the rest of the fleet.

        Args:
            alone: Whether no other rank is registered beside it.
            contradiction: Why its events must be another engine's.
            note: Another problem of its registration.
            refused: Why its engine refuses this router's queries.
        """
        facts = self._record.facts
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
        """Take over a registration that differs in nothing that the stream depends on."""
        if registration.url not in (None, self.registration.url):
            self._engine.move(registration.url)
        if registration.drains != self.registration.drains:
            self.drains_since_s = self._services.clock() if registration.drains else None
        self._record.registration = registration
        self._record.facts.refusal = self._services.allowed.registration_problem(registration)
        self._record.refresh()

    def settle(self) -> None:
        self._record.settle()

    def prepare(self, image: WorkerImage, copies: dict[tuple[Place, int], int]) -> None:
        """Begin from what Redis holds, before the stream says anything."""
        record = self._record
        record.forget_ingest()
        self._prepared = (image.epoch, image.seq)
        self.commits.tail = LogTail(image.tail_entries, image.tail_blocks)
        record.facts.vitals = EngineLiveness(engine_start_s(image.meta))
        if image.epoch is not None and image.seq is not None:
            try:
                record.ingest.restore(image.epoch, image.seq, image.places, copies, image.meta)
            except RESTORE_ERRORS as error:
                # Use nothing of a value whose meaning is unknown.
                log.warning("stored state not readable", extra={"worker": self.worker, "error": str(error)})
                record.forget_ingest()
                record.ingest.begin_unreadable(str(error))
            # Gaps of a worker's whole life, most of which others have counted.
            self.counted.gaps = record.ingest.profile.tally.gaps
        record.refresh()

    def take_image(self, image: WorkerImage) -> None:
        """What Redis held when it was loaded for the mirror."""
        self._record.peer.take_image(image)
        self._record.facts.log_loaded = True
        self._record.shown.epoch, self._record.shown.seq = image.epoch or "", image.seq
        self._record.events.load(image.epoch or "", image.seq, image.places)
        self._record.refresh()

    def take_entry(self, entry: LogEntry) -> None:
        """What Redis's log says, as it goes into the mirror."""
        record = self._record
        shapes = record.peer.take_entry(entry, self._services.clock())
        if entry.opened_epoch:
            record.events.begin_epoch(entry.epoch, record.peer.reason)
        seq = record.shown.seq if entry.last_seq is None else entry.last_seq
        record.events.changed(entry.epoch, seq, entry.changes)
        if shapes and record.is_elsewhere:
            record.refresh()

    def shown(self, epoch: str, seq: int | None) -> None:
        """The mirror shows everything up to `seq` of `epoch`."""
        self._record.shown.advance(epoch, seq)

    def log_heard(self, heard: bool) -> None:
        """Whether the worker's log in the store can be followed: it is how others tell."""
        self._record.facts.log_heard = heard
        self._record.refresh()

    @property
    def position(self) -> Position:
        """Return how far this process has read the entries of the worker's follower."""
        return self._record.peer.position

    def follower_heard(self, problem: str | None) -> None:
        """Note whether the other router that follows the worker is heard. problem: why it is not."""
        if problem != self._record.facts.follower_problem:
            self._record.facts.follower_problem = problem
            if self._record.is_elsewhere:
                self._record.refresh()

    def image_lost(self, reason: str) -> None:
        """Why the mirror does not have what Redis holds of the worker, so that nothing of it is credited; empty: it
        does."""
        self._record.facts.image_problem = reason
        self._record.refresh()

    def unreadable(self, image: WorkerImage) -> str:
        """What of the image nobody could be shown, as it does not explain the worker; empty: all of it could."""
        told = PeerView(self.registration, self._services.config.none_hash_seed)
        told.take_image(image)
        return told.problem

    def start(self) -> None:
        if self.refusal:
            log.warning("worker not followed", extra={"worker": self.worker, "reason": self.refusal})
            return
        self._task = self._services.supervisor.start("stream", self._run, of=self.worker.route_name)

    async def stop(self) -> None:
        """End the task; what was committed stays, the lease is given back to others."""
        self._record.facts.stopping = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        # Where it was stopped between taking the lease and following.
        await self._lease.release()
        self.commits.end_lead()
        self._record.end_timer()

    async def forget(self) -> None:
        """End the task, and unlink what Redis holds of the worker unless another process follows it."""
        await self.stop()
        await self._lease.forget()

    async def _run(self) -> None:
        try:
            await self._follow_always()
        except asyncio.CancelledError as error:
            # A frame of TaskGroup's holds the error and its traceback the frame: all that the worker had would stay
            # until a full collection, for which a router rarely has reason.
            raise error.with_traceback(None) from None

    async def _follow_always(self) -> None:
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
                # It must not end the worker's task unseen; what Redis holds is begun from again.
                self._record.step(Event.DEFECT)
                self._services.metrics.internal_errors.labels("stream").inc()
                log.exception("stream failed", extra={"worker": self.worker})
                self._say("internal error while following this worker: a bug in the router; its log has the details")
                await asyncio.sleep(RETRY_LAST_S)

    def _say(self, hold_problem: str) -> None:
        self._record.facts.hold_problem = hold_problem
        self._record.refresh()

    async def _hold(self, action: Action) -> None:
        """Follow the worker under one lease until something ends it, which is raised."""
        try:
            await self._sources.follow(action)
        except (asyncio.CancelledError, HandedOver):
            await self.commits.write_rest()
            raise
        finally:
            self._record.step(Event.HOLD_ENDED)
            self._record.pause(PAUSED)
            await self._lease.release()

    async def _take_lease(self) -> Action:
        """Wait for the lease, and have the lead; returns what is to be followed first."""
        record = self._record
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
        """Another process follows the worker: show what it writes. Raises StoreError."""
        record = self._record
        record.step(Event.LEASE_ELSEWHERE)
        record.facts.hold_problem = None
        # Nobody vouches for what is stored before the next judgement of the followers.
        record.facts.follower_problem = NO_FOLLOWER_YET
        record.forget_ingest()
        record.lead = self._prepared = None
        self.commits.end_lead()
        record.refresh()
        if not record.facts.log_loaded:
            await self._services.mirror.follow_log(self.worker)

    def _continue(self) -> None:
        """Lead with what is in memory."""
        record = self._record
        assert record.lead is not None
        if not record.lead.continues(record.ingest.held, *self._lease.written):
            log.warning("rewritten from memory", extra={"worker": self.worker})
            self.commits.rewrite()

    async def _rebuild(self) -> None:
        """Lead with what Redis holds: have it in the ingest and in the mirror. Raises StoreError."""
        record, store = self._record, self._services.store
        log_loaded, record.lead, record.facts.log_loaded = record.facts.log_loaded, None, False
        await self._services.mirror.lead(self.worker)
        if self._lease.written != self._prepared:
            # Others have committed since, or what was seen here is broken.
            try:
                image, copies = await store.load(self.worker), await store.load_copies(self.worker)
                self.prepare(image, copies)
            except StoredValueError as error:
                # The new epoch that an empty ingest opens voids it.
                log.warning("stored values void", extra={"worker": self.worker, "reason": str(error)})
                self.prepare(WorkerImage.empty(self.worker), {})
                record.ingest.begin_unreadable(str(error))
        lead = MirrorLead(self.worker, self._services.mirror, max_blocks=MAX_PENDING_BLOCKS)
        # A mirror that read the log up to the same commit shows the same.
        held = record.ingest.held
        if not log_loaded or (self.visible_epoch, self.visible_seq) != (held.epoch, held.seq):
            record.events.load(held.epoch, held.seq, lead.show_all(held))
            record.shown.advance(held.epoch, held.seq)
        record.lead, self._prepared = lead, None
