# SPDX-License-Identifier: Apache-2.0
"""Everything that this process knows of one worker, and what it shows of it.

The state joins the phase of following the worker, the knowledge from its events and from other routers, and the view
made of these. It is synchronous; the task in `follower.py` and its parts report to it what happens.
"""

from __future__ import annotations

import logging

import msgspec

from kvrouter.contract.worker_status import EngineCache
from kvrouter.events.patch.messages import Hello
from kvrouter.router.follow.streams.mirror_lead import MirrorLead
from kvrouter.router.follow.streams.offload_watch import OffloadSigns
from kvrouter.router.follow.streams.peer_view import RESTORE_ERRORS, engine_start_s
from kvrouter.router.follow.streams.shown_worker import ShownWorker
from kvrouter.router.follow.streams.stream_machine import Action, Event, step
from kvrouter.router.follow.streams.stream_view import (
    IMAGE_UNCONFIRMED,
    NO_FOLLOWER_YET,
)
from kvrouter.router.index.ingest.engine_liveness import EngineBack, EngineLost, EngineRestarted, VitalSign
from kvrouter.router.index.ingest.ingest import Copies
from kvrouter.router.index.store.commit import WorkerImage
from kvrouter.router.index.store.log_entry import LogEntry
from kvrouter.router.model.workers.registration import Registration
from kvrouter.router.model.workers.stream_state import StreamState

log = logging.getLogger("kvrouter.stream")

# How long a past incident stays in the reason of a live worker: long enough for a person who looks because of it.
INCIDENT_SHOWN_S = 60.0


class WorkerState(ShownWorker):
    """The only owner of what this process knows of one worker, and of what it shows.

    Each happening has one method. It notes the happening, then publishes if the worker's residency may have changed, and
    only shows otherwise. Nothing else changes the facts, the ingest, the lead or what is shown.

    Invariant: while this process leads the mirror, no view is credited of which the mirror lacks a change.
    """

    # Happenings of the registration

    def on_registration(self, registration: Registration) -> None:
        """Take over a registration that differs only in fields on which following the worker does not depend."""
        if registration.drains != self.registration.drains:
            self.drains_since_s = self._services.clock() if registration.drains else None
        self.registration = registration
        self.facts.refusal = self._services.allowed.registration_problem(registration)
        self._show()

    def on_judged(self, *, alone: bool, contradiction: str, note: str, refused: str = "") -> bool:
        """Take the verdict on this worker that follows from judging all registrations together.

        Args:
            alone: Whether no other rank of the worker id is registered.
            contradiction: Why the worker's events must come from another engine; empty if they need not.
            note: Another problem of its registration; empty if there is none.
            refused: Why its engine refuses this router's queries; empty if it does not.

        Returns:
            Whether the worker's stream must be read again, because batches of its own were left out.
        """
        facts = self.facts
        for what, new, old in (
            ("registration contradicted", contradiction, facts.contradiction),
            ("registration doubtful", note, self.note),
            ("engine refuses the router", refused, self.refused),
        ):
            if new != old and new:
                log.warning(what, extra={"worker": self.worker, "reason": new})
        changed = (alone, contradiction, note) != (facts.alone, facts.contradiction, self.note)
        facts.alone, facts.contradiction, self.note, self.refused = alone, contradiction, note, refused
        return changed and self._allow_ranks()

    # Happenings of the store and of other routers

    def on_prepared(self, image: WorkerImage, copies: Copies, problem: str = "") -> None:
        """Prepare the ingest from the worker's state in Redis.

        Args:
            image: The state of the worker in Redis.
            copies: The number of copies of each block that has several.
            problem: Why the state cannot be read; empty if it can.
        """
        self._forget_ingest()
        self.facts.engine_start_s = engine_start_s(image.meta)
        if image.epoch is not None and image.seq is not None:
            try:
                self.ingest.restore(image.epoch, image.seq, image.places, copies, image.meta)
            except RESTORE_ERRORS as error:
                # Use no part of a value whose meaning is unknown.
                log.warning("stored state not readable", extra={"worker": self.worker, "error": str(error)})
                self._forget_ingest()
                problem = str(error)
            # The tally has the gaps of the worker's whole life, and other processes have counted those in their metrics.
            self.counted.gaps = self.ingest.profile.tally.gaps
        if problem:
            self.ingest.begin_unreadable(problem)
        self._publish()

    def on_image(self, image: WorkerImage) -> None:
        """Note that the image was loaded from Redis into the mirror."""
        before = self.peer.position
        self.peer.take_image(image)
        if self.peer.position.lease != before.lease or self.peer.position.commits < before.commits:
            # The last judgement of the follower was about other entries than those that the image has.
            self.facts.follower_problem = IMAGE_UNCONFIRMED
        self.facts.log_loaded = True
        self.shown.epoch, self.shown.seq = image.epoch or "", image.seq
        self.events.load(image.epoch or "", image.seq, image.places)
        self._publish()

    def on_image_problem(self, reason: str) -> None:
        """Note why the mirror lacks the worker's blocks in Redis, so the worker earns no credit; "" if it has them."""
        self.facts.image_problem = reason
        self._show()

    def on_entry(self, entry: LogEntry) -> None:
        """Note that a log entry was applied to the mirror."""
        shapes = self.peer.take_entry(entry, self._services.clock())
        if entry.opened_epoch:
            self.events.begin_epoch(entry.epoch, self.peer.reason)
        seq = self.shown.seq if entry.last_seq is None else entry.last_seq
        self.events.changed(entry.epoch, seq, entry.changes)
        self.shown.advance(entry.epoch, entry.last_seq)
        if shapes and self.is_elsewhere:
            self._publish()

    def on_log_heard(self, heard: bool) -> None:
        """Note whether the worker's log in the store can be read, through which other routers share their knowledge."""
        self.facts.log_heard = heard
        self._show()

    def on_follower_heard(self, problem: str | None) -> None:
        """Note why the other router that follows the worker is not heard, None if it is."""
        if problem != self.facts.follower_problem:
            self.facts.follower_problem = problem
            if self.is_elsewhere:
                self._show()

    def on_store_problem(self, problem: str | None) -> None:
        """Note why the store takes no commits, None if it takes them."""
        self.facts.store_problem = problem
        self.drained.set()
        self._show()
        # The lease may be a new one, under which nothing was written yet.
        self.schedule_write()

    # Happenings of the following

    def step(self, event: Event) -> Action:
        """Move to the next phase, and return the follower's action, which shows what follows from the phase."""
        self.phase, action = step(self.phase, event, self.endpoints)
        return action

    def on_elsewhere(self) -> None:
        """Note that another process follows the worker: forget what this process learned, and show what that one does."""
        self.facts.hold_problem = None
        # Until the next judgement of the followers, no router vouches for the stored state.
        self.facts.follower_problem = NO_FOLLOWER_YET
        self._forget_ingest()
        self.lead = None
        self._publish()

    def on_log_left(self) -> bool:
        """Note that the log is not read into the mirror from now on; return whether the mirror has what it read so far."""
        self.lead = None
        was_loaded, self.facts.log_loaded = self.facts.log_loaded, False
        return was_loaded

    def on_mirror_taken(self, *, has_log: bool) -> None:
        """Lead the mirror with the blocks of the ingest.

        Args:
            has_log: Whether the mirror has the log up to the position that is shown.
        """
        lead, held = MirrorLead(self.worker, self._services.mirror), self.ingest.held
        # A mirror that read the log up to the same commit already shows the same blocks.
        if not has_log or (self.shown.epoch, self.shown.seq) != (held.epoch, held.seq):
            self.events.load(held.epoch, held.seq, lead.show_all(held))
            self.shown.advance(held.epoch, held.seq)
        self.lead = lead

    def on_lead_begun(self) -> Action:
        """Note that mirror and memory are ready for the next commit; return the follower's action."""
        self.facts.hold_problem = self.facts.follower_problem = None
        action = self.step(Event.LEAD_BEGUN if self.ingest.resume_point is None else Event.LEAD_RESUMED)
        self._publish()
        return action

    def on_not_held(self, problem: str) -> None:
        """Note why this process does not have the worker's lease."""
        self.facts.hold_problem = problem
        self._show()

    def on_epoch_renamed(self, epoch: str) -> None:
        """Note that the same residency has another epoch's name now, because the store gets all of it again."""
        self.shown.advance(epoch, self.shown.seq)
        self._show()

    # Happenings of the worker's stream

    def on_greeted(self, hello: Hello | None) -> None:
        """Note what the engine's patch answered to a greeting, None if nothing."""
        if hello is not None:
            self.facts.key_problem = None
        patch, withheld = self.ingest.profile.patch, "" if hello is None else hello.withheld
        if withheld != patch.withheld:
            patch.withheld = withheld
            self._show()

    def on_silence(self, problem: str) -> None:
        """Note why no stream can be followed. The end of the lease shows it."""
        if self.endpoints.key is not None:
            self.facts.key_problem = problem

    def on_stock_followed(self) -> None:
        """Note that the engine's own topic is read from now on."""
        self.ingest.follow_stock()
        self._publish()

    def on_reports_followed(self, epoch: str) -> None:
        """Note that the reports of the engine's patch are read from now on, which names this epoch of its own."""
        self.ingest.follow_reports(epoch)
        self._publish()

    def on_items(self, received_s: float) -> None:
        """Note that items which were received at this time have been applied to the ingest."""
        self._received_s = received_s
        self._publish()

    def on_snapshot_requested(self) -> None:
        """Note that the snapshot which the ingest wants was requested."""
        self.ingest.reports.wants_snapshot = None

    def on_paused(self, incident: str) -> None:
        """Note that the worker's stream is not read for now, and why."""
        self.ingest.pause(incident)
        self._publish()

    # Happenings of the engine's HTTP

    def on_engine_start(self, start_s: float | None) -> None:
        """Note when the engine's process started, as far as its answers show it."""
        self.facts.engine_start_s = start_s

    def on_life_sign(self, sign: VitalSign) -> None:
        """Note a sign of the engine's life or death."""
        self.ingest.on_liveness(sign)
        if isinstance(sign, EngineLost):
            self.facts.forget_process()
        if isinstance(sign, EngineBack | EngineRestarted):
            # The stream is read again, which brings a snapshot.
            self.ingest.reports.wants_snapshot = None
        self._publish()
        self.schedule_write()

    def on_ranks(self, ranks: tuple[int, ...]) -> bool:
        """Note the ranks of the engine's cores; return whether the stream must be read again, as for `on_judged`."""
        self.facts.engine_ranks = ranks
        return self._allow_ranks()

    def on_metrics_page(self, life: float | None, offload: OffloadSigns | None, cache: EngineCache | None) -> None:
        """Note what a metrics page shows of the engine.

        Args:
            life: When the engine's process started, None if the page does not say.
            offload: The offload tiers, None if the page does not have them.
            cache: The KV cache, None if the page does not have it.
        """
        facts = self.facts
        if life is not None and facts.engine_start_s not in (None, life):
            # The page comes from another process than the previous page.
            facts.forget_process()
        if offload is not None:
            facts.offload.observe(offload, self._services.clock())
        if cache is not None and cache != facts.cache:
            facts.cache = cache
            self._show()
            self.schedule_write()

    # Happenings of time

    def settle(self) -> None:
        """Drop a past incident from the reason of a live worker once it was shown for INCIDENT_SHOWN_S."""
        view = self.view
        is_over = self._services.clock() > self._reason_s + INCIDENT_SHOWN_S
        if view.state is StreamState.LIVE and view.reason and is_over:
            self.ingest.profile.forget_incident()
            self._show()

    def on_counted(self) -> None:
        """Note that the metrics include all counts of the ingest."""
        self.counted = msgspec.structs.replace(self.ingest.profile.tally)

    def on_stopped(self) -> None:
        """Note that nobody follows the worker in this process from now on."""
        self._credit_timer.stop()

    def _forget_ingest(self) -> None:
        """Replace the ingest by an empty one, but keep the counts."""
        tally = self.ingest.profile.tally
        self.ingest = self._empty_ingest()
        self.ingest.profile.tally = tally

    def _allow_ranks(self) -> bool:
        must_read_again = self.ingest.allow_ranks(self._allowed_ranks())
        self._show()
        return must_read_again
