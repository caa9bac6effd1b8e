# SPDX-License-Identifier: Apache-2.0
"""One worker as this process knows it: where its following stands, what its events and other routers said, and the view
made of these. Synchronous; the parts of `worker_stream.py` share it.

Invariant: after `refresh` the view, and during a lead the mirror, show all that is known.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec

from kvrouter.events.vllm.codec import BatchDecoder
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
from kvrouter.router.model.workers.engine_cache import EngineCache
from kvrouter.router.model.workers.provenance import ranks_allowed
from kvrouter.router.model.workers.registration import Registration
from kvrouter.router.model.workers.stream_state import PROVEN, StreamState

log = logging.getLogger("kvrouter.stream")

# How long what is over is still said of a worker that is live: long enough to be read by who looks because of it.
INCIDENT_SHOWN_S = 60.0


class Shown(msgspec.Struct):
    """How far the mirror shows the worker."""

    # When the items in hand were received.
    received_s: float
    epoch: str | None = None
    seq: int | None = None
    # How long it took from receiving the last items until they were shown.
    lag_s: float | None = None

    def advance(self, epoch: str, seq: int | None) -> None:
        """Note the epoch and seq that are shown now. seq: None if it did not change."""
        self.seq = seq if seq is not None or epoch != self.epoch else self.seq
        self.epoch = epoch


class WorkerRecord:
    """The state that all parts of one worker's stream share. `view` is the part that the matcher may know; call
    `refresh` after each change.

    It has 18 attributes, because everything that several parts need is here and none of them keeps a copy."""

    def __init__(self, registration: Registration, services: StreamServices, changed: Callable[[], None]) -> None:
        """changed: called when `view` did."""
        self.registration = registration
        # A registration that changes them has a stream of its own.
        self.endpoints = Endpoints.of(registration)
        self._services = services
        self._changed = changed
        self.phase = Phase.WAITING
        self.facts = Facts(refusal=services.allowed.registration_problem(registration))
        # Set when the store took what waited for it, or when it went away; and when something waits for it.
        self.drained = asyncio.Event()
        self.dirty = asyncio.Event()
        self.peer = PeerView(registration, services.config.none_hash_seed)
        self.events = WorkerEvents(registration.worker, services.feed)
        # Set from when this process leads the mirror until others may.
        self.lead: MirrorLead | None = None
        self.shown = Shown(services.clock())
        # Since when the state and the reason are what they are. A timer ends the credit of a state in doubt.
        self.since_s = self._reason_s = services.clock()
        self._credit_end: asyncio.TimerHandle | None = None
        self.lives = EngineLives()
        # Since when nothing proves that the shown blocks are right; None: something does.
        self._doubted_since_s: float | None = None
        self.ingest = self._ingest()
        word = self._word()
        self.view = self._view(shown_state(self.phase, self.facts, word), word)

    @property
    def is_elsewhere(self) -> bool:
        """Whether what others say of the worker is shown, as they follow it."""
        return self.phase is Phase.ELSEWHERE

    @property
    def profile(self) -> WorkerProfile:
        """What explains the worker: our own ingest, or what another process wrote."""
        return self.peer.profile if self.is_elsewhere else self.ingest.profile

    @property
    def incidents(self) -> Incidents:
        """Of the worker's life so far."""
        if self.is_elsewhere:
            # Until it was loaded nothing is known that was not before.
            return self.peer.incidents if self.facts.log_loaded else self.events.incidents or Incidents()
        tally = self.ingest.profile.tally
        return Incidents(tally.gaps, tally.clears, tally.resyncs)

    @property
    def disk_problem(self) -> str:
        """What is wrong with the disk below the engine's offload tier; empty when nothing is."""
        return self.peer.disk_problem if self.is_elsewhere else self.facts.disk.problem(self._services.clock())

    @property
    def cache(self) -> EngineCache:
        """Return the engine's description of its KV cache."""
        return self.peer.cache if self.is_elsewhere else self.facts.cache

    def state_fields(self) -> dict[str, bytes]:
        """The state as the other processes are to know it."""
        ingest = self.ingest
        start_s = self.facts.vitals.start_s
        return state_fields(
            ingest.state, ingest.reason, self.view.credited, start_s, self.disk_problem, self.facts.cache
        )

    def step(self, event: Event) -> Action:
        self.phase, action = step(self.phase, event, self.endpoints)
        return action

    def forget_ingest(self) -> None:
        """Begin with nothing known; what was counted stays."""
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
        """The ranks that its events may name; None: any."""
        return ranks_allowed(self.registration.worker.dp_rank, self.facts.alone, self.facts.engine_ranks)

    def store_changed(self, problem: str | None) -> None:
        """problem: why the store takes no commits."""
        self.facts.store_problem = problem
        self.drained.set()
        self.refresh()
        # The lease may be another one, under which nothing was written yet.
        self.have_written()

    def have_written(self) -> None:
        """Have what is known now written; from now on it waits, whatever the writer is busy with."""
        if self.lead is not None:
            waiting = self._services.held.unwritten_since_s
            waiting.setdefault(keys.worker_tag(self.registration.worker), self._services.clock())
        self.dirty.set()

    def pause(self, incident: str) -> None:
        """Nobody reads its stream for now."""
        self.ingest.pause(incident)
        self.refresh()

    def settle(self) -> None:
        """What happened to a live worker is said for a while, and then only what holds now."""
        view = self.view
        is_over = self._services.clock() > self._reason_s + INCIDENT_SHOWN_S
        if view.state is StreamState.LIVE and view.reason and is_over:
            self.ingest.profile.forget_incident()
            self.refresh()

    def refresh(self) -> None:
        """Bring mirror and view up to what is known, both before anything else runs."""
        if (incidents := self.incidents) != self.events.incidents:
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
                # The other processes must know, also when it is not the stream that says so.
                self.have_written()
            self._changed()

    def _draw(self) -> None:
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
        if self.is_elsewhere:
            return Word(self.peer.state, self.peer.reason, self.peer.credited, self.peer.problem)
        return Word(self.ingest.state, self.ingest.reason)

    def _observe_life(self, word: Word) -> None:
        elsewhere = self.is_elsewhere
        self.lives.observe(
            start_s=self.peer.engine_start_s if elsewhere else self.facts.vitals.start_s,
            epoch=self.peer.epoch if elsewhere and self.facts.log_loaded else None,
            voids=self.ingest.profile.lives_ended,
            is_down=word.state is StreamState.DOWN,
        )

    def _view(self, state: StreamState, word: Word) -> WorkerView:
        config, profile = self._services.config, self.profile
        shown = credit(self.phase, self.facts, word, state, config.suspect_credit_s)
        explained = profile.identity.explained and state is not StreamState.UNHASHABLE
        return WorkerView(
            worker=self.registration.worker,
            url=self.registration.url,
            state=state,
            credited=shown.credited,
            reason=shown.reason,
            epoch=self.peer.epoch if self.is_elsewhere else self.ingest.held.epoch,
            catalog=profile.catalog,
            scheme=profile.identity.scheme if explained else None,
            lora_paths=profile.spec.lora_paths,
            approximate=self._is_guessed(state),
            life=self.lives.number,
        )

    def _is_guessed(self, state: StreamState) -> bool:
        """Return whether the prompts sent there are all that is known of it. An engine that reuses nothing earns
        nothing."""
        usable = not self.endpoints.are_none and state is not StreamState.UNHASHABLE
        wanted = bool(self._services.config.approximate_ttl_s)
        return wanted and not usable and state is not StreamState.DOWN and not self.cache.problem

    def _time_credit(self, state: StreamState) -> None:
        """Credit doubt for a while from its beginning. A doubt that stops and returns without a proof in between keeps
        its first beginning."""
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
        if self._credit_end is not None:
            self._credit_end.cancel()
            self._credit_end = None
