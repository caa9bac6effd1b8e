# SPDX-License-Identifier: Apache-2.0
"""One worker as this process knows it, and the two ways in which others learn of it: it is published, and it is shown.

The knowledge joins the phase of following the worker, its registration, its events, and what other routers wrote of it.
"""

from __future__ import annotations

import asyncio
import logging

import msgspec

from kvrouter.contract.worker_status import EngineCache
from kvrouter.events.patch.messages import PeerAddress
from kvrouter.events.vllm.codec import BatchDecoder
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.follow.streams.clear_watch import ClearWatch
from kvrouter.router.follow.streams.credit_timer import CreditTimer
from kvrouter.router.follow.streams.engine_lives import EngineLives
from kvrouter.router.follow.streams.mirror_lead import MirrorLead
from kvrouter.router.follow.streams.peer_view import PeerView, state_fields
from kvrouter.router.follow.streams.stream_machine import Endpoints, Phase
from kvrouter.router.follow.streams.stream_services import StreamServices
from kvrouter.router.follow.streams.stream_view import Facts, Word, credit, shown_state
from kvrouter.router.follow.streams.worker_events import Incidents, WorkerEvents
from kvrouter.router.index.ingest.counters import IngestCounters
from kvrouter.router.index.ingest.ingest import Ingest
from kvrouter.router.index.ingest.worker_profile import WorkerProfile
from kvrouter.router.index.matching.matcher import WorkerView
from kvrouter.router.index.store import keys
from kvrouter.router.index.store.commit import WorkerImage
from kvrouter.router.model.kvcache.block_hash import HashScheme
from kvrouter.router.model.kvcache.registered_peer import registered_peer
from kvrouter.router.model.workers.engine_cache import cache_problem
from kvrouter.router.model.workers.lending_address import lending_address
from kvrouter.router.model.workers.provenance import ranks_allowed
from kvrouter.router.model.workers.registration import Registration
from kvrouter.router.model.workers.stream_state import StreamState

log = logging.getLogger("kvrouter.stream")


class Shown(msgspec.Struct):
    """The position in the worker's events up to which the mirror has them, and how late it has them."""

    epoch: str | None = None
    seq: int | None = None
    # The time from receiving the last items until the mirror showed them.
    lag_s: float | None = None

    def advance(self, epoch: str, seq: int | None) -> None:
        """Note the epoch and the seq that are shown now; a `seq` of None keeps the seq of the same epoch."""
        self.seq = seq if seq is not None or epoch != self.epoch else self.seq
        self.epoch = epoch


class ShownWorker:
    """The knowledge of one worker in this process, and its way to the mirror and to readers; `WorkerState` decides when.

    `_publish` moves changes of the worker's residency into the mirror and to those who watch the fleet. `_show` makes the
    new `view`, which the matcher reads.
    """

    def __init__(self, registration: Registration, services: StreamServices) -> None:
        """Begin with nothing known.

        Args:
            registration: The worker's registration.
            services: The services that all streams of the process share.
        """
        self._services = services
        self.worker = registration.worker
        # Names the worker in heartbeats.
        self.tag = keys.worker_tag(registration.worker)

        # The registration, and what follows from comparing it with others and with the engine
        self.registration = registration
        # Constant, because a registration with other endpoints gets another follower.
        self.endpoints = Endpoints.of(registration)
        # A problem of the registration that does not end the worker's credit.
        self.note = ""
        # Why the engine refuses this router's queries.
        self.refused = ""
        # Since when the worker gets no new requests, as far as this process knows; None if it gets them.
        self.drains_since_s = services.clock() if registration.drains else None

        # From the worker's events, from other routers and from the store
        self.phase = Phase.WAITING
        self.facts = Facts(refusal=services.allowed.registration_problem(registration))
        self.ingest = self._empty_ingest()
        self.peer = PeerView(registration, services.config.none_hash_seed)
        self.lives = EngineLives()
        self.clears = ClearWatch()

        # For the mirror and the store
        self.events = WorkerEvents(registration.worker, services.feed)
        # Present from when this process leads the worker's mirror until others may.
        self.lead: MirrorLead | None = None
        # Set when the waiting changes were taken for the store, or when the store's availability changed.
        self.drained = asyncio.Event()
        # Set when something waits to be written to the store.
        self.dirty = asyncio.Event()
        # The counts that the metrics include already.
        self.counted = IngestCounters()

        # For readers
        self.shown = Shown()
        # When the items that were applied last were received.
        self._received_s = services.clock()
        # When the state, and when the reason, last changed.
        self.since_s = self._reason_s = services.clock()
        self._credit_timer = CreditTimer(services.config.suspect_credit_s, services.clock)
        # The address at which the engine lends chunks: as declared last, with the URL then, and as other engines reach it.
        self._last_address: tuple[PeerAddress | None, str | None, PeerAddress | None] = (None, None, None)
        word = self._word()
        self.view = self._view_in(shown_state(self.phase, self.facts, word), word)

    def _empty_ingest(self) -> Ingest:
        services = self._services
        ingest = Ingest(
            self.registration,
            seed=services.config.none_hash_seed,
            decoder=BatchDecoder(),
            new_epoch=services.new_epoch,
        )
        ingest.allow_ranks(self._allowed_ranks())
        return ingest

    @property
    def is_elsewhere(self) -> bool:
        """Whether another process follows the worker, so that the state which it publishes is shown."""
        return self.phase is Phase.ELSEWHERE

    @property
    def profile(self) -> WorkerProfile:
        """The worker's catalog and identity, from this process's ingest or as another follower published them."""
        return self.peer.profile if self.is_elsewhere else self.ingest.profile

    @property
    def life(self) -> tuple[WorkerKey, int]:
        """The worker and the number of its engine's life, as far as `EngineLives` distinguishes them."""
        return self.worker, self.lives.number

    @property
    def incidents(self) -> Incidents:
        """The incidents of the worker's life so far."""
        if self.is_elsewhere:
            # Until the log is loaded, the last known counts remain.
            return self.peer.incidents if self.facts.log_loaded else self.events.incidents or Incidents()
        tally = self.ingest.profile.tally
        return Incidents(tally.gaps, tally.clears, tally.resyncs)

    @property
    def problem(self) -> str | None:
        """Why this process's knowledge of the worker cannot reach Redis now, None if it can."""
        return self.facts.hold_problem or self.facts.store_problem

    @property
    def disk_problem(self) -> str:
        """The problem of the disk below the engine's offload tier, "" if there is none."""
        return self.peer.disk_problem if self.is_elsewhere else self.facts.offload.disk_problem(self._services.clock())

    @property
    def engine_start_s(self) -> float | None:
        """When the engine's process started, None if it is unknown."""
        return self.peer.engine_start_s if self.is_elsewhere else self.facts.engine_start_s

    @property
    def cache(self) -> EngineCache:
        """The engine's description of its KV cache."""
        return self.peer.cache if self.is_elsewhere else self.facts.cache

    @property
    def block_size(self) -> int | None:
        """The tokens of one block as the engine describes them, else as registered; None if neither names them."""
        return self.cache.block_size or self.registration.block_size

    @property
    def withheld(self) -> str:
        """Why the worker's blocks beside the GPU earn less than they could, or "" if they do not."""
        return self.profile.withheld(self.peer.places if self.is_elsewhere else self.ingest.held.blocks.places)

    def counts(self) -> dict[str, int]:
        """Return the number of blocks at each place, by the place's text."""
        return self.peer.counts() if self.is_elsewhere else self.ingest.held.blocks.counts()

    def state_fields(self) -> dict[str, bytes]:
        """Return the state as fields of `meta`, for the other processes."""
        ingest = self.ingest
        return state_fields(
            ingest.state,
            ingest.reason,
            self.view.credited,
            self.facts.engine_start_s,
            self.disk_problem,
            self.facts.cache,
            ingest.profile.declared_peer,
        )

    def unreadable(self, image: WorkerImage) -> str:
        """Return why the stored image cannot be interpreted, or "" if it can."""
        peer_view = PeerView(self.registration, self._services.config.none_hash_seed)
        peer_view.take_image(image)
        return peer_view.problem

    def _allowed_ranks(self) -> frozenset[int] | None:
        """Return the ranks that the worker's events may name, or None if any is allowed."""
        return ranks_allowed(self.worker.dp_rank, self.facts.alone, self.facts.engine_ranks)

    def _publish(self) -> None:
        """Publish the incidents and changes since the last call, into the mirror too if this process leads it; then show."""
        if (incidents := self.incidents) != (before := self.events.incidents):
            if before is not None and incidents.clears > before.clears:
                self.clears.record(incidents.clears, self._services.clock())
            self.events.happened(incidents, self._word().reason)
        if self.lead is not None and (flush := self.lead.draw(self.ingest.held)) is not None:
            self.shown.advance(flush.epoch, None if flush.seqs is None else flush.seqs[1])
            if flush.opens_epoch:
                self.events.begin_epoch(flush.epoch, self.ingest.reason)
            self.events.changed(flush.epoch, self.shown.seq, flush.changes)
            if flush.seqs is not None:
                self.shown.lag_s = self._services.clock() - self._received_s
        self._show()

    def _show(self) -> None:
        """Show others all that is known, in one step of the event loop."""
        word, old = self._word(), self.view
        self.lives.observe(
            start_s=self.engine_start_s,
            epoch=self.peer.epoch if self.is_elsewhere and self.facts.log_loaded else None,
            voids=self.ingest.profile.lives_ended,
            is_down=word.state is StreamState.DOWN,
        )
        state = shown_state(self.phase, self.facts, word)
        if state is not old.state:
            self.since_s = self._services.clock()
            self.facts.overdue = self._credit_timer.observe(state, self._end_credit)
        view = self.view = self._view_in(state, word)
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
            self._services.view_changed(self.worker)

    def _end_credit(self) -> None:
        self.facts.overdue = True
        self._show()

    def schedule_write(self) -> None:
        """Schedule a write of the present state. Its waiting time counts from now, even if the writer is busy."""
        if self.lead is not None:
            self._services.held.unwritten_since_s.setdefault(self.tag, self._services.clock())
        self.dirty.set()

    def _word(self) -> Word:
        """Return the state that the worker's follower publishes, which may be this process's ingest."""
        if self.is_elsewhere:
            return Word(self.peer.state, self.peer.reason, self.peer.credited, self.peer.problem)
        return Word(self.ingest.state, self.ingest.reason)

    def _view_in(self, state: StreamState, word: Word) -> WorkerView:
        """Return the view of the worker in this state, of which `word` is what its follower published."""
        config, profile = self._services.config, self.profile
        shown = credit(self.phase, self.facts, word, state, config.suspect_credit_s)
        explained = profile.identity.explained and state is not StreamState.UNHASHABLE
        scheme = profile.identity.scheme if explained else None
        return WorkerView(
            worker=self.worker,
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
