# SPDX-License-Identifier: Apache-2.0
"""One worker, followed: subscription, ingest and commits. The async shell around `stock_ingest.py`; the lease is in
`lease_holder.py`.

One task a worker. While it holds the lease it leads the mirror (`mirror_lead.py`): its answers need no Redis. Whatever
breaks its hold (a lost lease, a store that is elsewhere) makes it begin again: from memory where nobody else followed
the worker meanwhile, else from what Redis holds. While another process follows it, `peer_view.py` says what it is, for
as long as that process is heard."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Coroutine

import aiohttp
import msgspec
import zmq

from kvrouter.events.patch.hello import greet
from kvrouter.events.patch.items import PatchHeard, PatchSilent
from kvrouter.events.patch.messages import requests_endpoint
from kvrouter.events.patch.subscriber import ReportSubscriber
from kvrouter.events.transport.permits import Permits
from kvrouter.events.vllm.codec import BatchDecoder
from kvrouter.events.vllm.settings import SubscriberSettings
from kvrouter.events.vllm.stream_items import Connected
from kvrouter.events.vllm.subscriber import Subscriber
from kvrouter.router.common.ids import Place, WorkerKey
from kvrouter.router.common.task_supervisor import TaskSupervisor
from kvrouter.router.config.settings import Config
from kvrouter.router.index import keys
from kvrouter.router.index.commit import WorkerImage
from kvrouter.router.index.log_entry import LogEntry
from kvrouter.router.index.store import IndexStore
from kvrouter.router.ingest.counters import IngestCounters
from kvrouter.router.ingest.engine_liveness import EngineBack, EngineLost, EngineRestarted, VitalSign
from kvrouter.router.ingest.patch_ingest import PatchIngest
from kvrouter.router.ingest.pending_commit import PendingCommit
from kvrouter.router.load.engine_metrics import EngineLoad
from kvrouter.router.matching.matcher import WorkerView
from kvrouter.router.redis_client.errors import StoredValueError, StoreError
from kvrouter.router.streams.disk_watch import DiskSigns, DiskWatch
from kvrouter.router.streams.engine_poller import EnginePoller
from kvrouter.router.streams.lease_holder import (
    ELSEWHERE,
    RETRY_FIRST_S,
    RETRY_LAST_S,
    HandedOver,
    LeaseHolder,
    LeaseLost,
)
from kvrouter.router.streams.mirror_lead import MirrorLead, MirrorSource
from kvrouter.router.streams.peer_view import RESTORE_ERRORS, PeerView, engine_start_s, state_fields
from kvrouter.router.telemetry.metrics import Metrics
from kvrouter.router.workers.allow_list import AllowList
from kvrouter.router.workers.provenance import ranks_allowed
from kvrouter.router.workers.registration import NO_PATCH, Registration
from kvrouter.router.workers.stream_state import CREDITED, SHOWN, StreamState, credited

log = logging.getLogger("kvrouter.stream")

# Transitions that may wait for the store. With more, and the store slow, the socket is left unread (ZMQ buffers, and
# later the publisher drops: a gap) for BACKPRESSURE_S; with the store away they are dropped, and all that is held is
# written when it is back. They are one commit, so also what every other router applies at once: some milliseconds. With
# a million, one worker that published as fast as it could held up everybody's answers for a second.
MAX_PENDING_BLOCKS = 65_536

# How long the socket may be left unread, as meanwhile this process answers from what it read before.
BACKPRESSURE_S = 1.0

# A worker whose news waits for the store for longer is known too late by the other routers, and its heartbeat says so.
LATE_S = 1.0

# How long one worker's items are taken in before everything else gets its turn.
TURN_S = 0.002

# How long a patched engine may take to say hello before its own topic is followed: some round trips. One whose reports
# are in Redis already is waited for longer, because going on from there saves loading everything.
GREET_FIRST_S = 0.25
GREET_KNOWN_S = 3.0

# While the engine's own topic is followed: how long one look for the patch lasts, and the pauses between them, doubled
# from the first to the last. A new connection begins again: it may be another life of the engine, with the patch.
PROBE_S = 1.0
PROBE_PAUSE_FIRST_S = 1.0
PROBE_PAUSE_LAST_S = 30.0

# A worker that is not had within this part of a lease's life is another process's. A first taking is some round trips.
LOOKS_BEFORE_ELSEWHERE = 10

# A patch silent for so long is given up, and the engine's own topic followed: longer than an engine stalls while it
# compiles.
REPORTS_LOST_S = 15.0


# What the store lacks when a worker is given up is one commit: some milliseconds. A store that hangs is waited for no
# longer, as whoever stops a router waits too.
LAST_COMMIT_S = 1.0

PAUSED = "followed again in a moment; the last known residency is shown"
NO_FOLLOWER_YET = "no other router has been heard yet that follows this worker"
# How long what is over is still said of a worker that is live: long enough to be read by who looks because of it.
INCIDENT_SHOWN_S = 60.0


class SourceChanged(Exception):
    """The other of the worker's two streams is to be followed from now on."""


class WorkerStream:
    """Follows one worker from registration to `stop`. `view` is what the matcher may know of it now."""

    def __init__(
        self,
        registration: Registration,
        *,
        store: IndexStore,
        token: str,
        config: Config,
        metrics: Metrics,
        context: zmq.Context[zmq.Socket[bytes]],
        clock: Callable[[], float],
        rng: random.Random,
        http: aiohttp.ClientSession | None,
        new_epoch: Callable[[], str],
        allowed: AllowList,
        permits: Permits,
        supervisor: TaskSupervisor,
        mine: Callable[[WorkerKey], bool],
        mirror: MirrorSource,
        changed: Callable[[], None],
        engine_load: Callable[[EngineLoad], None],
    ) -> None:
        """changed: called when `view` did. engine_load: told what the engine says of its load. token: names this
        process in leases. mine: whether it should have this one. mirror: led while this process follows the worker."""
        self.registration = registration
        # Names the worker in heartbeats.
        self.tag = keys.worker_tag(registration.worker)
        self._store = store
        self._config = config
        self._metrics = metrics
        self._context = context
        self._clock = clock
        self._rng = rng
        self._http = http
        self._new_epoch = new_epoch
        self._allowed = allowed
        self._permits = permits
        self._mirror = mirror
        self._supervisor = supervisor
        self._changed = changed
        self._engine_load = engine_load
        self._decoder = BatchDecoder()
        self._lease_problem: str | None = None
        # Stays while it is tried again.
        self._key_problem: str | None = None
        # Asks the engine whether it lives, while its stream is followed, and what is to be read anew when it is
        # another.
        self._poller: EnginePoller | None = None
        self._expire: Callable[[str], None] | None = None
        self._lives = 0
        self._lease = LeaseHolder(
            registration.worker,
            store=store,
            token=token,
            ttl_s=config.lease_ttl_s,
            metrics=metrics,
            mine=lambda: mine(registration.worker),
            changed=self._lease_changed,
        )
        # Set when the store took what waited for it, or when it went away; and when something waits for it.
        self._drained = asyncio.Event()
        self._dirty = asyncio.Event()
        self._peer = PeerView(registration, config.none_hash_seed)
        # Whether what others say of the worker is shown, as they follow it.
        self._elsewhere = False
        # Set while this process leads the mirror.
        self._lead: MirrorLead | None = None
        # Whether `_peer` is what the store says now: nothing of the log is read during a lead.
        self._log_followed = False
        # The log of the worker is not heard, so what others tell of it is old.
        self._unheard = False
        # Why what others tell cannot be relied on, None while the router that follows the worker is heard.
        self._follower_problem: str | None = NO_FOLLOWER_YET
        # Why the mirror does not have what Redis holds of the worker; empty while it does.
        self._image_problem = ""
        # Whether the last hold ended because the other of the two streams is to be followed.
        self._source_changed = False
        # When the engine's process started, as far as any router knows.
        self._engine_start_s: float | None = None
        # What else is known of its engine: whether another rank is registered beside it, the ranks of its cores, what
        # says that its events are another engine's, and what else is wrong with its registration.
        self._alone = True
        self._engine_ranks: tuple[int, ...] = ()
        self._contradiction = ""
        self.note = ""
        self.disk = DiskWatch()
        # Whether `ingest` has what this process itself saw, unbroken.
        self._sound = False
        # The state as last written for the other processes.
        self._state_told: dict[str, bytes] = {}
        self._task: asyncio.Task[None] | None = None
        self._stopping = False
        # When the items in hand were received; since when there is something that the store does not have.
        self._received_s = clock()
        self._unwritten_since_s: float | None = None
        # What the store was sent last, None once it has said what became of it.
        self._sending: PendingCommit | None = None
        # (epoch, seq) in Redis that `ingest` was prepared from, None once it goes on from there.
        self._prepared: tuple[str | None, int | None] | None = None
        # Counts over all ingests of this stream, and what of them is in the metrics already.
        self._tally = IngestCounters()
        self.counted = IngestCounters()
        self.lag_s: float | None = None
        # Since when the reason is what it is.
        self._reason_s = clock()
        # Since when the state is what it is; a timer ends the credit of one in doubt.
        self.since_s = clock()
        self._overdue = False
        self._credit_end: asyncio.TimerHandle | None = None
        self.visible_epoch: str | None = None
        self.visible_seq: int | None = None
        self.ingest = self._new_ingest()
        self.view = self._make_view(self.ingest.state)

    @property
    def worker(self) -> WorkerKey:
        return self.registration.worker

    def _is_approximate(self, state: StreamState) -> bool:
        silent = self.registration.events is None and self._patch_endpoint is None
        usable = not silent and state is not StreamState.UNHASHABLE
        return bool(self._config.approximate_ttl_s) and not usable and state is not StreamState.DOWN

    @property
    def life(self) -> tuple[WorkerKey, int]:
        """Names the engine's process, as far as its HTTP tells one from another."""
        return self.worker, self._lives

    def _new_ingest(self) -> PatchIngest:
        seed = self._config.none_hash_seed
        ingest = PatchIngest(self.registration, seed=seed, decoder=self._decoder, new_epoch=self._new_epoch)
        ingest.tally = self._tally
        ingest.allow_ranks(ranks_allowed(self.worker.dp_rank, self._alone, self._engine_ranks))
        return ingest

    def judge(self, *, alone: bool, contradiction: str, note: str) -> None:
        """What the whole fleet shows of this worker. alone: no other rank is registered beside it. contradiction: what
        says that its events are another engine's. note: what else is wrong with its registration."""
        if contradiction != self._contradiction and contradiction:
            log.warning("registration contradicted", extra={"worker": self.worker, "reason": contradiction})
        if note != self.note and note:
            log.warning("registration doubtful", extra={"worker": self.worker, "reason": note})
        changed = (alone, contradiction, note) != (self._alone, self._contradiction, self.note)
        self._alone, self._contradiction, self.note = alone, contradiction, note
        if changed:
            self._judge_ranks()

    def _judge_ranks(self) -> None:
        allowed = ranks_allowed(self.worker.dp_rank, self._alone, self._engine_ranks)
        if self.ingest.allow_ranks(allowed) and self._expire is not None:
            self._expire("batches of its own rank were left out before the engine named its ranks")
        self._refresh()

    def _take_engine_ranks(self, ranks: tuple[int, ...]) -> None:
        if ranks != self._engine_ranks:
            self._engine_ranks = ranks
            self._judge_ranks()

    def update(self, registration: Registration) -> None:
        """Take over a registration that differs in nothing that the stream depends on."""
        if self._poller is not None and registration.url not in (None, self.registration.url):
            self._poller.move(registration.url)
        self.registration = registration
        self._refresh()

    def take_image(self, image: WorkerImage) -> None:
        """What Redis holds, as it was loaded for the mirror."""
        self._peer.take_image(image)
        self._log_followed = True
        self.visible_epoch, self.visible_seq = image.epoch or "", image.seq
        self._refresh()

    def take_entry(self, entry: LogEntry) -> None:
        """What Redis's log says, as it goes into the mirror."""
        if self._peer.take_entry(entry) and self._elsewhere:
            self._refresh()

    def log_heard(self, heard: bool) -> None:
        """Whether the worker's log in the store can be followed: it is how others tell."""
        self._unheard = not heard
        self._refresh()

    def follower_heard(self, problem: str | None) -> None:
        """Whether the router that follows the worker is heard; problem: why it is not."""
        if problem != self._follower_problem:
            self._follower_problem = problem
            if self._elsewhere:
                self._refresh()

    def unreadable(self, image: WorkerImage) -> str:
        """What of the image nobody could be shown, as it does not explain the worker; empty: all of it could."""
        told = PeerView(self.registration, self._config.none_hash_seed)
        told.take_image(image)
        return told.problem

    def image_lost(self, reason: str) -> None:
        """Why the mirror does not have what Redis holds of the worker, so that nothing of it is credited; empty: it
        does."""
        self._image_problem = reason
        self._refresh()

    @property
    def held(self) -> bool:
        """Whether this process follows the worker."""
        return self._lease.held

    @property
    def lease_number(self) -> int:
        return self._lease.number

    @property
    def is_late(self) -> bool:
        """Whether the store, and so every other router, lacks what was learned more than LATE_S ago."""
        return self.unwritten_s > LATE_S

    @property
    def unwritten_s(self) -> float:
        """How long the oldest news has waited for the store."""
        return 0.0 if self._unwritten_since_s is None else self._clock() - self._unwritten_since_s

    @property
    def unwritten_blocks(self) -> int:
        return 0 if self._lead is None else self._lead.backlog.blocks

    @property
    def is_refused(self) -> bool:
        """Whether the store took nothing of it at the last try."""
        return self._lease.held and self._lease.away

    @property
    def problem(self) -> str | None:
        """Why what this process learns of the worker cannot reach Redis now."""
        return self._lease_problem or self._lease.problem

    @property
    def shown_ingest(self) -> PatchIngest:
        """What explains the worker: our own ingest, or what another process told."""
        return self._peer.ingest if self._elsewhere else self.ingest

    @property
    def disk_problem(self) -> str:
        """What is wrong with the disk below the engine's offload tier; empty when nothing is."""
        return self._peer.disk_problem if self._elsewhere else self.disk.problem(self._clock())

    @property
    def gaps(self) -> int:
        return self._peer.gaps if self._elsewhere else self.ingest.tally.gaps

    def counts(self) -> dict[str, int]:
        """Blocks by the text of their place."""
        return self._peer.counts() if self._elsewhere else self.ingest.blocks.counts()

    def prepare(self, image: WorkerImage, copies: dict[tuple[Place, int], int]) -> None:
        """Begin from what Redis holds, before the stream says anything."""
        self.ingest = self._new_ingest()
        self._prepared = (image.epoch, image.seq)
        self._engine_start_s = engine_start_s(image.meta)
        self._sound = False
        if image.epoch is not None and image.seq is not None:
            try:
                self.ingest.restore(image.epoch, image.seq, image.places, copies, image.meta)
            except RESTORE_ERRORS as error:
                # What it means is not known, so it is not used.
                log.warning("stored state not readable", extra={"worker": self.worker, "error": str(error)})
                self.ingest = self._new_ingest()
                self.ingest.begin_unreadable(str(error))
            # Gaps of a worker's whole life, most of which others have counted.
            self.counted.gaps = self._tally.gaps
        self._refresh()

    @property
    def refusal(self) -> str | None:
        """Why the worker is not followed: it was registered through another router, or before the setting was made."""
        return self._allowed.registration_problem(self.registration)

    def start(self) -> None:
        if self.refusal:
            log.warning("worker not followed", extra={"worker": self.worker, "reason": self.refusal})
            return
        self._task = self._supervisor.start("stream", self._run, of=self.worker.route_name)

    async def stop(self) -> None:
        """End the task; what was committed stays, the lease is given back to others."""
        self._stopping = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        self._lease.unheard()
        if self._credit_end is not None:
            self._credit_end.cancel()

    async def forget(self) -> None:
        """End the task, and unlink what Redis holds of the worker unless another process follows it."""
        await self.stop()
        await self._lease.forget()

    def shown(self, epoch: str, seq: int | None) -> None:
        """The mirror shows everything up to `seq` of `epoch`."""
        self.visible_seq = seq if seq is not None or epoch != self.visible_epoch else self.visible_seq
        self.visible_epoch = epoch

    @property
    def _elsewhere_problem(self) -> str | None:
        """Why the state that others wrote cannot be shown as it is, None when it can."""
        if not self._log_followed:
            return "what other router processes learned of this worker is being loaded from Redis"
        if self._unheard:
            return "another router process follows this worker, and the store tells nothing of what it learns"
        return self._follower_problem

    def _make_view(self, state: StreamState) -> WorkerView:
        ingest = self.shown_ingest
        refusal = self.refusal
        if refusal:
            state = StreamState.DOWN
        credit = credited(state, self._overdue) and (self._peer.credited or not self._elsewhere)
        away = self._lease.problem
        if refusal:
            reason = refusal
        elif state is StreamState.MISMATCHED and self._contradiction:
            reason = self._contradiction
        elif self._unproven_image:
            reason = self._unproven_image
        elif self._elsewhere:
            reason = self._lease_problem or self._elsewhere_problem or self._peer.reason or ELSEWHERE
        elif away is not None:
            unwritten = f"Redis takes no commits ({away}): other routers do not learn what changes here"
            reason = "; ".join(filter(None, (unwritten, ingest.reason)))
        else:
            reason = self._lease_problem or self._key_problem or ingest.reason
        if state is StreamState.SUSPECT and not credit:
            reason += f"; no credit any more, after {self._config.suspect_credit_s:g} s without proof"
        elif state in CREDITED and not credit:
            reason += "; the router that follows it gives it no credit"
        return WorkerView(
            worker=self.worker,
            url=self.registration.url,
            state=state,
            credited=credit,
            reason=reason,
            epoch=ingest.epoch,
            catalog=ingest.catalog,
            scheme=ingest.identity.scheme
            if ingest.identity.explained and state is not StreamState.UNHASHABLE
            else None,
            lora_paths=ingest.spec.lora_paths,
            approximate=self._is_approximate(state),
        )

    def settle(self) -> None:
        """What happened to a live worker is said for a while, and then only what holds now."""
        view = self.view
        if view.state is StreamState.LIVE and view.reason and self._clock() > self._reason_s + INCIDENT_SHOWN_S:
            self.ingest.forget_incident()
            self._refresh()

    def _lease_changed(self) -> None:
        self._drained.set()
        self._refresh()

    def _refresh(self) -> None:
        """Bring mirror and view up to what is known, both before anything else runs."""
        self._draw()
        state = self._peer.state if self._elsewhere else self.ingest.state
        if self._elsewhere and state in SHOWN and self._elsewhere_problem is not None:
            state = StreamState.SUSPECT
        if self._contradiction and state is not StreamState.DOWN:
            state = StreamState.MISMATCHED
        if self._unproven_image and state in CREDITED:
            state = StreamState.RESYNCING
        old = self.view
        if state is not old.state:
            self.since_s = self._clock()
            self._time_credit(state)
        view = self.view = self._make_view(state)
        if view.reason != old.reason:
            self._reason_s = self._clock()
        if msgspec.structs.astuple(old) != msgspec.structs.astuple(view):
            if (old.state, old.credited) != (view.state, view.credited):
                log.info(
                    "stream state", extra={"worker": self.worker, "state": view.state.value, "reason": view.reason}
                )
                # The other processes must know, also when it is not the stream that says so.
                self._dirty.set()
            self._changed()

    def _draw(self) -> None:
        if self._lead is None:
            return
        flush = self._lead.draw(self.ingest)
        if flush is not None:
            self.shown(flush.epoch, None if flush.seqs is None else flush.seqs[1])
            if flush.seqs is not None:
                self.lag_s = self._clock() - self._received_s

    @property
    def _unproven_image(self) -> str:
        return self._image_problem or (self._peer.problem if self._elsewhere else "")

    def _time_credit(self, state: StreamState) -> None:
        self._overdue = False
        if self._credit_end is not None:
            self._credit_end.cancel()
            self._credit_end = None
        if state is StreamState.SUSPECT:
            self._credit_end = asyncio.get_running_loop().call_later(self._config.suspect_credit_s, self._end_credit)

    def _end_credit(self) -> None:
        self._overdue = True
        self._refresh()

    async def _run(self) -> None:
        try:
            await self._follow_always()
        except asyncio.CancelledError as error:
            # A frame of TaskGroup's holds the error and its traceback the frame: all that the worker had would stay
            # until a full collection, for which a router seldom has reason.
            raise error.with_traceback(None) from None

    async def _follow_always(self) -> None:
        retry_s = RETRY_FIRST_S
        while True:
            try:
                await self._take_lease()
                retry_s = RETRY_FIRST_S
                try:
                    self._sound, self._source_changed = True, False
                    await self._follow_sources()
                except (asyncio.CancelledError, HandedOver):
                    await self._write_rest()
                    raise
                finally:
                    self.ingest.pause(PAUSED)
                    self._refresh()
                    await self._lease.release()
            except HandedOver as change:
                log.info("worker handed over", extra={"worker": self.worker, "reason": str(change)})
            except (LeaseLost, StoreError) as error:
                self._lease_problem = str(error)
                self._refresh()
                log.warning("worker not held", extra={"worker": self.worker, "reason": str(error)})
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, RETRY_LAST_S)
            except zmq.ZMQError as error:
                self._lease_problem = f"cannot subscribe to {self.registration.events}: {error}"
                self._refresh()
                await asyncio.sleep(RETRY_LAST_S)
            except Exception:
                # A defect of ours must not end the worker's task unseen; what Redis holds is begun from again.
                self._sound = False
                self._lease_problem = (
                    "internal error while following this worker: a bug in the router; its log has the details"
                )
                self._metrics.internal_errors.labels("stream").inc()
                log.exception("stream failed", extra={"worker": self.worker})
                self._refresh()
                await asyncio.sleep(RETRY_LAST_S)

    async def _follow_sources(self) -> None:
        """Follow the worker under one lease, by whichever of its streams is the one to follow."""
        while True:
            try:
                await self._follow()
            except SourceChanged as change:
                self._source_changed = True
                self.ingest.pause(PAUSED)
                self._refresh()
                log.info("stream changed", extra={"worker": self.worker, "reason": str(change)})

    async def _take_lease(self) -> None:
        self._sending = None
        if not self._lease.wanted:
            await self._leave_to_others()
        taking = asyncio.ensure_future(self._lease.take())
        try:
            done, _ = await asyncio.wait({taking}, timeout=self._config.lease_ttl_s / LOOKS_BEFORE_ELSEWHERE)
            if not done:
                await self._leave_to_others()
            alone = await taking
        finally:
            taking.cancel()
        await self._take_lead(alone)
        self._elsewhere, self._lease_problem, self._state_told = False, None, {}
        log.info("worker held", extra={"worker": self.worker, "epoch": self.ingest.epoch, "seq": self.ingest.seq})
        self._refresh()

    async def _take_lead(self, alone: bool) -> None:
        """Have in `ingest` and in the mirror what the next commit goes on from. alone: nobody else committed since this
        process."""
        epoch, seq = self._lease.written
        if alone and self._sound and self._lead is not None:
            if not self._lead.continues(self.ingest, epoch, seq):
                log.warning("written anew from memory", extra={"worker": self.worker})
                self._give_up_backlog()
            return
        log_followed, self._lead, self._log_followed = self._log_followed, None, False
        await self._mirror.lead(self.worker)
        if (epoch, seq) != self._prepared:
            # Others have committed since, or what was seen here is broken.
            try:
                image, copies = await self._store.load(self.worker), await self._store.load_copies(self.worker)
                self.prepare(image, copies)
            except StoredValueError as error:
                # The new epoch that an empty ingest opens voids it.
                log.warning("stored values void", extra={"worker": self.worker, "reason": str(error)})
                self.prepare(WorkerImage.empty(self.worker), {})
                self.ingest.begin_unreadable(str(error))
        lead = MirrorLead(self.worker, self._mirror, max_blocks=MAX_PENDING_BLOCKS)
        # A mirror that read the log up to the same commit shows the same.
        if not log_followed or (self.visible_epoch, self.visible_seq) != (self.ingest.epoch, self.ingest.seq):
            lead.show_all(self.ingest)
            self.shown(self.ingest.epoch, self.ingest.seq)
        self._lead, self._prepared = lead, None

    def _give_up_backlog(self) -> None:
        """Have the whole epoch written when the store is there."""
        assert self._lead is not None
        self._metrics.index_rewrites.labels(self._metrics.worker_label(self.worker)).inc()
        self._lead.backlog.overflow()

    async def _leave_to_others(self) -> None:
        """Another process follows the worker: show what it tells. Raises StoreError."""
        self._elsewhere, self._lease_problem = True, None
        self.ingest, self._prepared, self._sound = self._new_ingest(), None, False
        self._lead, self._unwritten_since_s = None, None
        self._refresh()
        if not self._log_followed:
            await self._mirror.follow_log(self.worker)

    @property
    def _movable(self) -> bool:
        """Whether another process could make up for what is said while the worker changes hands."""
        registration = self.registration
        return registration.events is None or registration.replay is not None or self.ingest.report_epoch is not None

    @property
    def _patch_endpoint(self) -> str | None:
        """Where the engine's patch answers, if it has one."""
        patch, events = self.registration.patch, self.registration.events
        if patch == NO_PATCH:
            return None
        return patch or (None if events is None else requests_endpoint(events))

    async def _follow(self) -> None:
        """Follow the patch's reports where the engine has them, else the engine's own topic."""
        patch = self._patch_endpoint
        timeout_s = GREET_FIRST_S if self.ingest.report_epoch is None else GREET_KNOWN_S
        key = self.registration.patch_key
        # What was followed on the engine's own topic goes on there at once; the look for the patch goes on beside.
        stock = self.ingest.resume_point is not None and self.registration.events is not None and key is None
        if stock and not self._source_changed and self.registration.events is not None:
            await self._follow_stock(self.registration.events, patch)
        elif (
            patch is not None
            and (hello := await greet(patch, context=self._context, timeout_s=timeout_s, server_key=key)) is not None
        ):
            self._key_problem = None
            await self._follow_reports(patch, hello.epoch)
        elif key is not None:
            # Not the engine's own topic, which anybody could send in its place. libzmq does not say which of these it
            # is.
            self._key_problem = (
                f"no engine patch at {patch} proves the patch_key of this worker: the key is another engine's, the engine "
                "has no KVROUTER_PATCH_CURVE_KEY, or it does not run"
            )
            raise LeaseLost(self._key_problem)
        elif self.registration.events is not None:
            await self._follow_stock(self.registration.events, patch)
        elif patch is not None:
            raise LeaseLost(f"nothing answers at {patch}, and there is no other event endpoint")
        else:
            await self._run_group()

    async def _follow_reports(self, patch: str, epoch: str) -> None:
        self.ingest.follow_reports(epoch)
        self._refresh()
        reports = ReportSubscriber(
            patch,
            context=self._context,
            resume=self.ingest.report_resume,
            refusal=self._allowed.problem,
            server_key=self.registration.patch_key,
            permits=self._permits,
        )
        self._expire = reports.expire
        try:
            await reports.start()
            lost = asyncio.Event()
            await self._run_group(self._receive_reports(reports, lost), self._give_up(lost))
        finally:
            self._expire = None
            await reports.close()

    async def _follow_stock(self, events: str, patch: str | None) -> None:
        self.ingest.follow_stock()
        self._refresh()
        subscriber = Subscriber(
            events,
            self.registration.replay,
            context=self._context,
            resume=self.ingest.resume_point,
            settings=SubscriberSettings(answer_timeout_s=self._config.replay_timeout_s),
            permits=self._permits,
        )
        self._expire = subscriber.expire
        connected = asyncio.Event()

        try:
            await subscriber.start()
            looks = [] if patch is None else [self._look_for_patch(patch, connected)]
            await self._run_group(self._receive(subscriber, connected), *looks)
        finally:
            self._expire = None
            await subscriber.close()

    async def _run_group(self, *work: Coroutine[None, None, None]) -> None:
        """Keep the lease and commit while `work` runs; what ends one ends all."""
        # A new worker has an empty epoch to announce before its stream says anything.
        self._dirty.set()
        try:
            async with asyncio.TaskGroup() as group:
                for coroutine in (
                    self._lease.keep(lambda: self._movable),
                    self._commit(),
                    *self._poll_engine(),
                    *work,
                ):
                    group.create_task(coroutine)
        except ExceptionGroup as group:
            if self._stopping:
                # A failure at the same moment swallows the cancellation, and `stop` would wait for ever.
                raise asyncio.CancelledError from None
            expected, others = group.split((LeaseLost, StoreError, SourceChanged))
            if others is not None or expected is None:
                raise
            first = _first_of(expected)
            raise first if isinstance(first, SourceChanged | HandedOver) else LeaseLost(str(first)) from None
        finally:
            self._poller = None

    def _poll_engine(self) -> list[Coroutine[None, None, None]]:
        url, interval_s = self.registration.url, self._config.health_interval_s
        self._poller = None
        if url is None or self._http is None or not interval_s:
            return []

        def tell(sign: VitalSign) -> None:
            self.ingest.on_liveness(sign)
            self._lives += isinstance(sign, EngineLost | EngineRestarted)
            if isinstance(sign, EngineBack | EngineRestarted) and self._expire is not None:
                self._expire("the engine answers again" if isinstance(sign, EngineBack) else sign.reason)
                self.ingest.wants_snapshot = None
            self._refresh()
            self._dirty.set()

        def take_disk(signs: DiskSigns) -> None:
            self.disk.observe(signs, self._clock())
            if self._state_fields() != self._state_told:
                self._dirty.set()

        self._poller = EnginePoller(
            url,
            session=self._http,
            interval_s=interval_s,
            clock=self._clock,
            rng=self._rng,
            tell=tell,
            load=self._engine_load,
            ranks=self._take_engine_ranks,
            disk=take_disk,
            dp_rank=self.worker.dp_rank,
            start_s=self._engine_start_s,
        )
        return [self._poller.run()]

    async def _look_for_patch(self, patch: str, connected: asyncio.Event) -> None:
        pause_s = PROBE_PAUSE_FIRST_S
        while True:
            with contextlib.suppress(TimeoutError):
                # Not wait_for, which swallows a cancellation at the moment of the event up to Python 3.11.
                async with asyncio.timeout(pause_s):
                    await connected.wait()
            pause_s = PROBE_PAUSE_FIRST_S if connected.is_set() else min(2 * pause_s, PROBE_PAUSE_LAST_S)
            connected.clear()
            if await greet(patch, context=self._context, timeout_s=PROBE_S) is not None:
                raise SourceChanged(f"a patched engine answers at {patch}")

    async def _receive(self, subscriber: Subscriber, connected: asyncio.Event) -> None:
        while True:
            items = await subscriber.next()
            now = turn = self._received_s = self._clock()
            for item in items:
                self.ingest.apply(item, now)
                if isinstance(item, Connected):
                    connected.set()
                    if self._poller is not None:
                        self._poller.ask_now()
                turn = await self._yield_turn(turn)
            await self._apply_backpressure()

    async def _receive_reports(self, reports: ReportSubscriber, lost: asyncio.Event) -> None:
        giving_up: asyncio.TimerHandle | None = None
        while True:
            items = await reports.next()
            now = turn = self._received_s = self._clock()
            for item in items:
                self.ingest.apply(item, now)
                if isinstance(item, PatchSilent | PatchHeard) and giving_up is not None:
                    giving_up.cancel()
                if isinstance(item, PatchSilent):
                    giving_up = asyncio.get_running_loop().call_later(REPORTS_LOST_S, lost.set)
                if self.ingest.wants_snapshot is not None:
                    reports.request_snapshot(self.ingest.wants_snapshot)
                    self.ingest.wants_snapshot = None
                turn = await self._yield_turn(turn)
            await self._apply_backpressure()

    async def _give_up(self, lost: asyncio.Event) -> None:
        await lost.wait()
        raise SourceChanged(f"the engine's patch was not heard for {REPORTS_LOST_S:.0f} s")

    async def _yield_turn(self, turn: float) -> float:
        """Lets others run, and the store catch up, once this worker's turn is over; returns when its turn began."""
        if self._clock() - turn < TURN_S and self.ingest.blocks.pending_blocks <= MAX_PENDING_BLOCKS:
            return turn
        await self._apply_backpressure()
        await asyncio.sleep(0)
        return self._clock()

    async def _apply_backpressure(self) -> None:
        assert self._lead is not None
        self._refresh()
        backlog = self._lead.backlog
        if not backlog.is_empty or self._state_fields() != self._state_told:
            self._dirty.set()
        give_up_s = self._clock() + BACKPRESSURE_S
        while backlog.is_full:
            if self._lease.away or self._clock() > give_up_s:
                self._give_up_backlog()
                return
            self._drained.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(BACKPRESSURE_S):
                    await self._drained.wait()

    def _state_fields(self) -> dict[str, bytes]:
        if self._poller is not None and self._poller.vitals.start_s is not None:
            self._engine_start_s = self._poller.vitals.start_s
        return state_fields(
            self.ingest.state, self.ingest.reason, self.view.credited, self._engine_start_s, self.disk_problem
        )

    async def _commit(self) -> None:
        while True:
            await self._dirty.wait()
            self._dirty.clear()
            if self._unwritten_since_s is None:
                self._unwritten_since_s = self._clock()
            await asyncio.sleep(self._config.flush_interval_s)
            taken_s = self._clock()
            await self._write()
            self._unwritten_since_s = taken_s if self._dirty.is_set() else None

    async def _write(self) -> None:
        """Have in the store all that it lacks now."""
        flush, state = self._next_commit(), self._state_fields()
        self._drained.set()
        if flush is not None:
            if flush.opens_epoch or state != self._state_told:
                flush = msgspec.structs.replace(flush, meta=flush.meta | state)
            self._sending = flush
            await self._lease.write(flush)
            self._sending = None
        elif state != self._state_told:
            await self._lease.note(self.ingest.epoch, state)
        self._state_told = state

    async def _write_rest(self) -> None:
        """What the store lacks of a worker that is given up: whoever is next may have no replay to learn it from."""
        if self._lease.away or not self._lease.held:
            return
        try:
            async with asyncio.timeout(LAST_COMMIT_S):
                if self._sending is not None:
                    await self._lease.write(self._sending)
                await self._write()
        except (LeaseLost, StoreError, TimeoutError) as error:
            log.warning("last commit not written", extra={"worker": self.worker, "reason": str(error) or "Redis hangs"})

    def _next_commit(self) -> PendingCommit | None:
        assert self._lead is not None
        flush = self._lead.take(self.ingest)
        if flush is not None and flush.epoch != self.visible_epoch:
            # Rewritten: the same residency under another name.
            self.shown(flush.epoch, self.visible_seq)
            self._refresh()
        return flush


def _first_of(error: BaseException) -> BaseException:
    """The first plain exception of a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
