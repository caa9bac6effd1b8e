# SPDX-License-Identifier: Apache-2.0
"""One worker as this process knows it.

The record joins the phase of following the worker, the knowledge from its events and from other routers, and the view
made of these. It is synchronous, and the parts of `worker_stream.py` share it.

Invariant: after `refresh`, the view and (during a lead) the mirror show everything that is known.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec

from kvrouter.contract.worker_status import EngineCache
from kvrouter.events.patch.messages import PeerAddress
from kvrouter.events.vllm.codec import BatchDecoder
from kvrouter.router.follow.streams.clear_watch import ClearWatch
from kvrouter.router.follow.streams.engine_lives import EngineLives
from kvrouter.router.follow.streams.mirror_lead import MirrorLead
from kvrouter.router.follow.streams.peer_view import PeerView, state_fields
from kvrouter.router.follow.streams.stream_machine import Action, Endpoints, Event, Phase, step
from kvrouter.router.follow.streams.stream_services import StreamServices
from kvrouter.router.follow.streams.stream_view import Facts, Word, credit, shown_state
from kvrouter.router.follow.streams.worker_events import Incidents, WorkerEvents
from kvrouter.router.index.ingest.ingest import Ingest
from kvrouter.router.index.ingest.worker_profile import WorkerProfile
from kvrouter.router.index.matching.matcher import WorkerView
from kvrouter.router.index.store import keys
from kvrouter.router.model.kvcache.block_hash import HashScheme
from kvrouter.router.model.kvcache.registered_peer import registered_peer
from kvrouter.router.model.workers.engine_cache import cache_problem
from kvrouter.router.model.workers.lending_address import lending_address
from kvrouter.router.model.workers.provenance import ranks_allowed
from kvrouter.router.model.workers.registration import Registration
from kvrouter.router.model.workers.stream_state import PROVEN, StreamState

log = logging.getLogger("kvrouter.stream")

# How long a past incident stays in the reason of a live worker: long enough for a person who looks because of it.
INCIDENT_SHOWN_S = 60.0


class Shown(msgspec.Struct):
    """The position in the worker's events up to which the mirror has them, and how late it has them."""

    # When the items that are being applied were received.
    received_s: float
    epoch: str | None = None
    seq: int | None = None
    # The time from receiving the last items until the mirror showed them.
    lag_s: float | None = None

    def advance(self, epoch: str, seq: int | None) -> None:
        """Note the epoch and the seq that are shown now; a `seq` of None keeps the seq of the same epoch."""
        self.seq = seq if seq is not None or epoch != self.epoch else self.seq
        self.epoch = epoch


class WorkerRecord:
    """The state that all parts of one worker's stream share; none of them keeps a copy.

    `view` is what the matcher sees. Every change must be followed by `refresh`, which updates it.
    """

    def __init__(self, registration: Registration, services: StreamServices, changed: Callable[[], None]) -> None:
        """Begin with nothing known.

        Args:
            registration: The worker's registration.
            services: The services that all streams of the process share.
            changed: Called when `view` changed.
        """
        self.registration = registration
        # Constant, because a registration with other endpoints gets another stream.
        self.endpoints = Endpoints.of(registration)
        self._services = services
        self._changed = changed
        self.phase = Phase.WAITING
        self.facts = Facts(refusal=services.allowed.registration_problem(registration))
        # Set when the waiting changes were taken for the store, or when the store's availability changed.
        self.drained = asyncio.Event()
        # Set when something waits to be written to the store.
        self.dirty = asyncio.Event()
        self.peer = PeerView(registration, services.config.none_hash_seed)
        self.events = WorkerEvents(registration.worker, services.feed)
        # Present from when this process leads the worker's mirror until others may.
        self.lead: MirrorLead | None = None
        self.shown = Shown(services.clock())
        # When the state, and when the reason, last changed.
        self.since_s = self._reason_s = services.clock()
        # Ends the credit of a state in doubt.
        self._credit_end: asyncio.TimerHandle | None = None
        self.lives = EngineLives()
        self.clears = ClearWatch()
        # The time since which nothing (an event, a heartbeat, a snapshot) has confirmed the shown blocks; None while they are
        # confirmed.
        self._doubted_since_s: float | None = None
        # The address at which the engine lends chunks: as declared last, with the URL then, and as other engines reach it.
        self._last_address: tuple[PeerAddress | None, str | None, PeerAddress | None] = (None, None, None)
        self.ingest = self._ingest()
        word = self._word()
        self.view = self._view(shown_state(self.phase, self.facts, word), word)

    @property
    def is_elsewhere(self) -> bool:
        """Whether another process follows the worker, so that the state which it publishes is shown."""
        return self.phase is Phase.ELSEWHERE

    @property
    def profile(self) -> WorkerProfile:
        """The worker's catalog and identity, from this process's ingest or as another follower published them."""
        return self.peer.profile if self.is_elsewhere else self.ingest.profile

    @property
    def incidents(self) -> Incidents:
        """The incidents of the worker's life so far."""
        if self.is_elsewhere:
            # Until the log is loaded, the last known counts remain.
            return self.peer.incidents if self.facts.log_loaded else self.events.incidents or Incidents()
        tally = self.ingest.profile.tally
        return Incidents(tally.gaps, tally.clears, tally.resyncs)

    @property
    def disk_problem(self) -> str:
        """The problem of the disk below the engine's offload tier, "" if there is none."""
        return self.peer.disk_problem if self.is_elsewhere else self.facts.offload.disk_problem(self._services.clock())

    @property
    def engine_start_s(self) -> float | None:
        """When the engine's process started, None if it is unknown."""
        return self.peer.engine_start_s if self.is_elsewhere else self.facts.vitals.start_s

    @property
    def cache(self) -> EngineCache:
        """The engine's description of its KV cache."""
        return self.peer.cache if self.is_elsewhere else self.facts.cache

    def state_fields(self) -> dict[str, bytes]:
        """Return the state as fields of `meta`, for the other processes."""
        ingest = self.ingest
        start_s = self.facts.vitals.start_s
        return state_fields(
            ingest.state,
            ingest.reason,
            self.view.credited,
            start_s,
            self.disk_problem,
            self.facts.cache,
            ingest.profile.declared_peer,
        )

    def step(self, event: Event) -> Action:
        """Move to the next phase, and return the action for the shell."""
        self.phase, action = step(self.phase, event, self.endpoints)
        return action

    def forget_ingest(self) -> None:
        """Replace the ingest by an empty one, but keep the counts."""
        tally = self.ingest.profile.tally
        self.ingest = self._ingest()
        self.ingest.profile.tally = tally

    def _ingest(self) -> Ingest:
        services = self._services
        ingest = Ingest(
            self.registration,
            seed=services.config.none_hash_seed,
            decoder=BatchDecoder(),
            new_epoch=services.new_epoch,
        )
        ingest.allow_ranks(self.allowed_ranks())
        return ingest

    def allowed_ranks(self) -> frozenset[int] | None:
        """Return the ranks that the worker's events may name, or None if any is allowed."""
        return ranks_allowed(self.registration.worker.dp_rank, self.facts.alone, self.facts.engine_ranks)

    def store_changed(self, problem: str | None) -> None:
        """Note why the store takes no commits, None if it takes them."""
        self.facts.store_problem = problem
        self.drained.set()
        self.refresh()
        # The lease may be a new one, under which nothing was written yet.
        self.schedule_write()

    def schedule_write(self) -> None:
        """Schedule a write of the present state. Its waiting time counts from now, even if the writer is busy."""
        if self.lead is not None:
            waiting = self._services.held.unwritten_since_s
            waiting.setdefault(keys.worker_tag(self.registration.worker), self._services.clock())
        self.dirty.set()

    def pause(self, incident: str) -> None:
        """Note that the worker's stream is not read for now, and why."""
        self.ingest.pause(incident)
        self.refresh()

    def settle(self) -> None:
        """Drop a past incident from the reason of a live worker once it was shown for INCIDENT_SHOWN_S."""
        view = self.view
        is_over = self._services.clock() > self._reason_s + INCIDENT_SHOWN_S
        if view.state is StreamState.LIVE and view.reason and is_over:
            self.ingest.profile.forget_incident()
            self.refresh()

    def refresh(self) -> None:
        """Bring the mirror and the view up to date with all knowledge, in one step of the event loop."""
        if (incidents := self.incidents) != (before := self.events.incidents):
            if before is not None and incidents.clears > before.clears:
                self.clears.record(incidents.clears, self._services.clock())
            self.events.happened(incidents, self._word().reason)
        self._draw()
        word, old = self._word(), self.view
        self._observe_life(word)
        state = shown_state(self.phase, self.facts, word)
        if state is not old.state:
            self.since_s = self._services.clock()
            self._time_credit(state)
        view = self.view = self._view(state, word)
        self.events.viewed(view)
        if view.reason != old.reason:
            self._reason_s = self._services.clock()
        if msgspec.structs.astuple(old) != msgspec.structs.astuple(view):
            if (old.state, old.credited) != (view.state, view.credited):
                log.info(
                    "stream state",
                    extra={"worker": view.worker, "state": view.state.value, "reason": view.reason},
                )
            if (old.state, old.credited, old.peer) != (view.state, view.credited, view.peer):
                # The other processes must learn this, even if the change does not come from the stream.
                self.schedule_write()
            self._changed()

    def _draw(self) -> None:
        """Apply new changes of the worker's blocks to the mirror and publish them, if this process leads the mirror."""
        if self.lead is None:
            return
        flush = self.lead.draw(self.ingest.held)
        if flush is not None:
            self.shown.advance(flush.epoch, None if flush.seqs is None else flush.seqs[1])
            if flush.opens_epoch:
                self.events.begin_epoch(flush.epoch, self.ingest.reason)
            self.events.changed(flush.epoch, self.shown.seq, flush.changes)
            if flush.seqs is not None:
                self.shown.lag_s = self._services.clock() - self.shown.received_s

    def _word(self) -> Word:
        """Return the state that the worker's follower publishes, which may be this process's ingest."""
        if self.is_elsewhere:
            return Word(self.peer.state, self.peer.reason, self.peer.credited, self.peer.problem)
        return Word(self.ingest.state, self.ingest.reason)

    def _observe_life(self, word: Word) -> None:
        elsewhere = self.is_elsewhere
        self.lives.observe(
            start_s=self.engine_start_s,
            epoch=self.peer.epoch if elsewhere and self.facts.log_loaded else None,
            voids=self.ingest.profile.lives_ended,
            is_down=word.state is StreamState.DOWN,
        )

    def _view(self, state: StreamState, word: Word) -> WorkerView:
        config, profile = self._services.config, self.profile
        shown = credit(self.phase, self.facts, word, state, config.suspect_credit_s)
        explained = profile.identity.explained and state is not StreamState.UNHASHABLE
        scheme = profile.identity.scheme if explained else None
        return WorkerView(
            worker=self.registration.worker,
            url=self.registration.url,
            state=state,
            credited=shown.credited,
            reason=shown.reason,
            epoch=self.peer.epoch if self.is_elsewhere else self.ingest.held.epoch,
            catalog=profile.catalog,
            scheme=scheme,
            lora_paths=profile.spec.lora_paths,
            approximate=self._is_guessed(state),
            life=self.lives.number,
            # Only while the worker is credited does the index show the blocks that it can lend.
            peer=self._lending_address(scheme) if shown.credited else None,
        )

    def _lending_address(self, scheme: HashScheme | None) -> PeerAddress | None:
        """Return where other engines reach this one to fetch its chunks, or None if it lends none.

        An address that the engine declares comes before a registered one. The last answer is remembered.
        """
        declared = self.peer.declared_peer if self.is_elsewhere else self.ingest.profile.declared_peer
        stated = declared or registered_peer(self.registration, self.profile.catalog, scheme)
        url = self.registration.url
        if stated is None:
            return None
        if (stated, url) != self._last_address[:2]:
            self._last_address = (
                stated,
                url,
                lending_address(stated, (self.endpoints.patch, self.endpoints.events, url)),
            )
        return self._last_address[2]

    def _is_guessed(self, state: StreamState) -> bool:
        """Return whether the worker's blocks are only guessed from the prompts that were sent to it.

        An engine that reuses nothing earns nothing, so its blocks are not guessed.
        """
        usable = not self.endpoints.are_none and state is not StreamState.UNHASHABLE
        wanted = bool(self._services.config.approximate_ttl_s)
        return wanted and not usable and state is not StreamState.DOWN and not cache_problem(self.cache)

    def _time_credit(self, state: StreamState) -> None:
        """Set the timer that ends the credit of a doubtful worker, or stop it.

        Credit lasts for `suspect_credit_s` from the beginning of the doubt. A doubt that stops and returns
        while nothing confirmed the blocks in between keeps its first beginning.
        """
        if state in PROVEN:
            self._doubted_since_s = None
        self.facts.overdue = False
        self.end_timer()
        if state is StreamState.SUSPECT:
            now_s = self._services.clock()
            if self._doubted_since_s is None:
                self._doubted_since_s = now_s
            left_s = self._doubted_since_s + self._services.config.suspect_credit_s - now_s
            self.facts.overdue = left_s <= 0
            if not self.facts.overdue:
                self._credit_end = asyncio.get_running_loop().call_later(left_s, self._end_credit)

    def _end_credit(self) -> None:
        self.facts.overdue = True
        self.refresh()

    def end_timer(self) -> None:
        """Cancel the timer that ends the credit of a state in doubt."""
        if self._credit_end is not None:
            self._credit_end.cancel()
            self._credit_end = None
