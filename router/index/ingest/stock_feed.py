# SPDX-License-Identifier: Apache-2.0
"""The items of the engine's own topic, applied to a worker's profile and epoch.

Pure: no sockets, no clock of its own. The catalog and the hash scheme are learned from the events.

Invariant: no block is credited that a lost removal might have taken away: a gap, a restart or an unreadable removal
begins a new, empty epoch.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec

from kvrouter.events.patch.items import ReportItem
from kvrouter.events.vllm.codec import BatchDecoder, CodecError
from kvrouter.events.vllm.messages import AllBlocksCleared, BlockRemoved, BlockStored, Event, EventBatch, HashArray
from kvrouter.events.vllm.stream_items import (
    Batch,
    Connected,
    Disconnected,
    Flooded,
    GapClosed,
    GapLost,
    GapOpened,
    Incomplete,
    Malformed,
    Proven,
    ReplayFailed,
    Restarted,
    RingReread,
    StreamItem,
)
from kvrouter.router.base.common.ids import Place
from kvrouter.router.index.ingest.engine_liveness import EngineSame
from kvrouter.router.index.ingest.event_runs import EventRun, RunBatch, RunReader
from kvrouter.router.index.ingest.residency import Runs
from kvrouter.router.index.ingest.worker_epoch import WorkerEpoch
from kvrouter.router.model.workers.stream_state import StreamState

AnEvent = TypeVar("AnEvent", bound=Event)

# Tags of events that can take blocks away; None stands for an unreadable tag. Such an event that cannot be read may
# leave ghost blocks behind, so the epoch is voided.
REMOVING_TAGS = frozenset({None, "BlockRemoved", "AllBlocksCleared"})

# At most this much of the plain batches that wait is applied as one. That takes less than a millisecond, in which answers
# wait.
MAX_JOINED_BATCHES = 64
MAX_JOINED_BYTES = 1 << 16

# The most combinations of group, medium, block size, kind and window that are remembered, because a stored block of a
# known combination usually shows nothing new about the catalog. An engine has some ten combinations.
MAX_SHAPES = 1_024

# How long the engine's HTTP may take to show that its process is the same, where the next seq is the only other proof:
# several times the interval of its polls.
SAME_PROCESS_WAIT_S = 10.0


class StockFeed:
    """The items of one worker's own topic, and their effect on its epoch and profile."""

    def __init__(self, epoch: WorkerEpoch, decoder: BatchDecoder) -> None:
        self._epoch = epoch
        self._profile = epoch.profile
        self._contact = epoch.profile.contact
        self._decoder = decoder
        self._reader = RunReader()
        # The number of next batches that are applied one by one, because one of them has an event that may teach
        # something.
        self._one_by_one = 0
        # Shapes that `_learner` has seen.
        self.known_shapes: set[tuple[object, ...]] = set()
        self._learner = epoch.profile.learner

    def apply_batches(self, items: Sequence[StreamItem | ReportItem], now: float) -> int:
        """Apply the batches with which the items begin, at least one of them, and return how many were applied.

        Plain batches are applied together, because a message of one block costs more on its own than its block does.
        """
        most = 1 if self._one_by_one or self._may_learn else MAX_JOINED_BATCHES
        batches: list[Batch] = []
        room_bytes = MAX_JOINED_BYTES
        for item in itertools.islice(items, most):
            if not isinstance(item, Batch):
                break
            room_bytes -= len(item.payload)
            if batches and room_bytes < 0:
                break
            batches.append(item)
        return self._batches(batches, now)

    @property
    def _may_learn(self) -> bool:
        """Whether any event may teach something, so that each one has to be looked at."""
        learner = self._profile.learner
        return self._profile.identity.wants_tokens or learner.in_doubt or learner.wants_parents

    def apply(self, item: StreamItem | ReportItem, now: float) -> None:
        """Apply the next item at `now`, in seconds of a monotonic clock."""
        profile, contact = self._profile, self._contact
        events = profile.registration.events
        if isinstance(item, Batch):
            self._batches([item], now)
        elif isinstance(item, Connected):
            contact.linked, contact.flood = True, ""
            self._connected()
        elif isinstance(item, Disconnected):
            contact.linked = contact.same_life = False
            # Without a batch there is nothing to prove.
            contact.unproven = self._epoch.seq is not None
            contact.next_seq_s = contact.reported_start_s = None
            if not contact.missing:
                shown = "; the last known residency is shown" if contact.unproven else ""
                lost = contact.flood or f"connection to {events} lost"
                profile.wait_for(f"{lost}{shown}")
        elif isinstance(item, GapOpened):
            self._count_gap(item.first_seq, item.next_seq)
            contact.missing = True
            profile.wait_for(
                f"batches {item.first_seq} to {item.next_seq - 1} are missing; asking the replay endpoint, no credit meanwhile"
            )
        elif isinstance(item, GapClosed):
            contact.gap_open = False
            profile.tally.replays += 1
        elif isinstance(item, GapLost):
            if not contact.gap_open:
                self._count_gap(item.first_seq, item.next_seq)
            contact.gap_open = False
            profile.tally.relearned += 1
            lost = f"batches {item.first_seq} to {item.next_seq - 1} are lost"
            if item.first_seq == item.next_seq:
                lost = f"it cannot be proven that nothing was missed before seq {item.next_seq}"
            self._epoch.void_life(
                f"{lost} ({item.reason}); residency before seq {item.next_seq} was dropped and is learned again"
            )
        elif isinstance(item, Incomplete):
            contact.incomplete = True
        elif isinstance(item, RingReread):
            self._epoch.void_life(
                "the replay endpoint answers again: all that it still has is read again, with what was given up"
            )
        elif isinstance(item, Restarted):
            contact.gap_open = contact.expired = False
            profile.tally.restarts += 1
            self._epoch.void_life(f"the engine restarted ({item.reason}); what it held before is void")
            # This life has not named its rank yet.
            profile.ranks.published, profile.ranks.problem, profile.ranks.skips = None, "", False
        elif isinstance(item, Proven):
            if item.how == "next_seq":
                self._follow_next_seq(item.seq + 1, now)
            else:
                contact.same_life = True
                profile.wait_for(f"the engine is the same; reading what it sent after batch {item.seq}")
        elif isinstance(item, ReplayFailed):
            self._replay_failed(item)
        elif isinstance(item, Malformed):
            profile.tally.malformed += 1
        elif isinstance(item, Flooded):
            profile.flooded(item)

    def compare_process(self, sign: EngineSame) -> None:
        """Take the sign that the engine's HTTP names the same process as before.

        Where a proof is awaited since a new connection, the blocks held are proven if this process sent them, and void
        otherwise.
        """
        contact = self._contact
        if not contact.unproven:
            contact.reported_start_s = sign.start_s if contact.linked else None
        elif contact.next_seq_s is not None and sign.requested_s >= contact.next_seq_s:
            if sign.start_s == contact.process_start_s:
                contact.next_seq_s = None
                self._profile.prove()
            else:
                self._void_unproven(self._epoch.seq or 0, "the engine's process is another, or was not known before")

    def _follow_next_seq(self, seq: int, now: float) -> None:
        """Wait for proof that batch `seq`, the first after a new connection, is of the same life.

        There is no replay endpoint to ask, and another life may happen to have reached the same seq. Without a URL of
        the engine nothing can prove it, so the blocks are void at once.
        """
        if self._profile.registration.url is None:
            self._void_unproven(seq, "there is neither a replay endpoint nor a url to ask")
        else:
            self._contact.next_seq_s = now
            self._profile.wait_for(
                f"seq {seq} follows; waiting for the engine's HTTP to say that its process is the same"
            )

    def _void_unproven(self, seq: int, reason: str) -> None:
        """Void the blocks, because nothing proves that no batch before `seq` was missed."""
        self._profile.tally.relearned += 1
        self._epoch.void_life(
            f"it cannot be proven that nothing was missed before seq {seq} ({reason}); residency before it was dropped and is "
            "learned again"
        )

    def _void_blocks(self, incident: str) -> None:
        """Void the blocks after something that could not be read.

        While nothing proves that the engine is the same as before, also void everything learned of it, because the void
        ends the wait for a proof.
        """
        contact = self._contact
        if contact.unproven and not contact.same_life:
            self._epoch.void_life(incident)
        else:
            self._epoch.void(incident)

    def _count_gap(self, first_seq: int, next_seq: int) -> None:
        self._contact.gap_open = True
        self._profile.tally.gaps += 1
        self._profile.tally.missed_batches += next_seq - first_seq

    def _connected(self) -> None:
        profile, contact, registration = self._profile, self._contact, self._profile.registration
        if contact.expired or contact.missing or contact.next_seq_s is not None:
            return
        if contact.unproven:
            profile.wait_for(f"connected to {registration.events}; waiting for proof that nothing was missed")
        elif contact.behind:
            profile.wait_for("replaying what the engine still remembers")
        elif registration.replay:
            # Batches arrived before this item, and the replay that they started is over.
            profile.settle()
        else:
            profile.report("no replay endpoint: what was cached before is learned as it is used")

    def _replay_failed(self, item: ReplayFailed) -> None:
        profile = self._profile
        if profile.stage is StreamState.CATCHING_UP:
            profile.report(f"replay failed ({item.reason}): what was cached before is learned as it is used")
        elif self._contact.unproven:
            profile.wait_for(
                f"replay failed ({item.reason}); suspect until it answers, or the next batch comes and voids"
            )

    def _batches(self, items: Sequence[Batch], now: float) -> int:
        """Apply the first batch, and with it the next ones up to the first that is not plain; return their number."""
        profile, contact, epoch = self._profile, self._contact, self._epoch
        if contact.expired:
            return len(items)
        first = items[0]
        if contact.reported_start_s is not None:
            # The engine still sends batches over the same connection, so its process is the one that answered over
            # HTTP.
            contact.process_start_s, contact.reported_start_s = contact.reported_start_s, None
        if contact.next_seq_s is not None and now - contact.next_seq_s > SAME_PROCESS_WAIT_S:
            self._void_unproven(first.seq, "the engine's HTTP did not say that its process is the same")
        contact.last_event_s = now
        count = 1
        try:
            batch: EventBatch | RunBatch | None = self._read_runs(items)
            if isinstance(batch, RunBatch):
                count = batch.batches
            else:
                batch = self._decoder.decode(first.payload, with_tokens=profile.identity.wants_tokens)
        except CodecError as error:
            profile.tally.broken += 1
            profile.learner.miss_event()
            self._void_blocks(f"batch {first.seq} could not be decoded ({error}); residency before it was dropped")
        else:
            if profile.is_own(batch.dp_rank):
                profile.ranks.skips = False
                if first.seq == 0:
                    profile.learner.begin_life()
                self._take(batch)
            else:
                self._skip(count)
        profile.tally.batches += count
        self._one_by_one = max(0, self._one_by_one - count)
        # The batch may arrive before the item about its connection.
        contact.linked = True
        profile.settle()
        last = items[count - 1]
        contact.fingerprint = last.fingerprint
        epoch.advance(first.seq, last.seq)
        return count

    def _read_runs(self, items: Sequence[Batch]) -> RunBatch | None:
        """Return the first batches as runs, or None if an event may teach something or the first one is not plain."""
        learner = self._profile.learner
        if learner is not self._learner:
            self._learner = learner
            self.known_shapes.clear()
        # The first stores of a life, which begins with seq 0, teach more than later ones.
        if items[0].seq == 0 or self._may_learn:
            return None
        batch = self._reader.read([item.payload for item in items])
        if batch is None or all(map(self._is_known, batch.runs)):
            return batch
        if batch.batches == 1:
            return None
        self._one_by_one = batch.batches
        return self._read_runs(items[:1])

    def _is_known(self, run: EventRun | Event) -> bool:
        event = run.event if isinstance(run, EventRun) else run
        if isinstance(event, BlockStored):
            event = _with_medium(event, self._profile.engine.media)
            return _shape(event) in self.known_shapes
        return isinstance(event, AllBlocksCleared) or self._learner.knows(event.group_idx)

    def _skip(self, count: int) -> None:
        """Leave out batches of another rank; the blocks held from before them cannot be trusted either."""
        self._profile.tally.foreign += count
        self._profile.learner.miss_event()
        if not self._profile.ranks.skips:
            self._void_blocks("")
            self._profile.ranks.skips = True

    def _take(self, batch: EventBatch | RunBatch) -> None:
        runs, media, count = Runs(self._epoch.blocks), self._profile.engine.media, 0
        events: Sequence[EventRun | Event] = batch.runs if isinstance(batch, RunBatch) else batch.events
        for event in events:
            if isinstance(event, EventRun):
                count += event.count
                shape = _with_medium(event.event, media)
                if isinstance(shape, BlockStored):
                    if len(event.roots) and self._learner.wants_roots:
                        self._learner.roots(shape, event.roots.tolist())
                    if event.several:
                        self._learner.learn_whole_size(shape)
                self._count(shape, event.hashes, runs)
            else:
                count += 1
                self._event(_with_medium(event, media), runs)
        runs.end()
        self._learner.elapse(count)
        self._profile.tally.events += count
        if isinstance(batch, EventBatch):
            self._miss(batch)

    def _miss(self, batch: EventBatch) -> None:
        """Count the events that could not be read, and void the blocks if one of them may have removed some."""
        tally = self._profile.tally
        tally.unknown += batch.unknown
        tally.broken += len(batch.broken)
        if batch.unknown or batch.broken:
            self._learner.miss_event()
        unreadable = [event for event in batch.broken if event.tag in REMOVING_TAGS]
        if unreadable:
            self._void_blocks(
                f"{len(unreadable)} event(s) that may have removed blocks could not be decoded ({unreadable[0].error}); "
                "residency before them was dropped"
            )

    def _event(self, event: Event, runs: Runs) -> None:
        if isinstance(event, AllBlocksCleared):
            runs.end()
            self._clear(event)
            return
        if isinstance(event, BlockStored):
            self._learn(event)
        self._count(event, event.block_hashes, runs)

    def _count(self, event: BlockStored | BlockRemoved, hashes: HashArray, runs: Runs) -> None:
        """Count the blocks that one event, or all events of a run, bring or take."""
        if isinstance(event, BlockRemoved):
            if event.group_idx is None and (places := self._places_of_stray(event.medium, runs)):
                for place in places:
                    runs.add(place, False, hashes)
                return
            self._learner.removed(event)
        if len(hashes):
            self._profile.tally.blocks += len(hashes)
            runs.add(Place(event.group_idx, event.medium, event.ownership), isinstance(event, BlockStored), hashes)

    def _places_of_stray(self, medium: str, runs: Runs) -> list[Place]:
        """Return the places from which a removal without a group may take blocks.

        These are all places of its medium if events named a group for each of them; else none, and the removal counts
        for the unnamed group.
        """
        runs.end()
        places = [place for place in self._epoch.blocks.places if place.medium == medium]
        return [] if any(place.group_idx is None for place in places) else places

    def _learn(self, event: BlockStored) -> None:
        learner = self._learner
        shape = _shape(event)
        if len(self.known_shapes) >= MAX_SHAPES:
            # The set only saves looking at events that show nothing new.
            self.known_shapes.clear()
        if shape not in self.known_shapes or event.medium != "GPU" or learner.in_doubt:
            learner.stored(event, shows_tier=self._profile.engine.tiers_shown)
            self.known_shapes.add(shape)
        if len(event.block_hashes) > 1:
            learner.learn_whole_size(event)
        if event.medium == "GPU" and learner.wants_parents:
            learner.parent(event)
        if event.parent_block_hash is None and learner.wants_roots:
            learner.roots(event, event.block_hashes[:1].tolist())
        if event.token_ids is not None:
            self._profile.identity.judge(event)

    def _clear(self, event: AllBlocksCleared) -> None:
        """Remove all blocks, or the blocks of the medium and group that the event names.

        Stock vLLM names nothing, so every medium is cleared: less credit, not more.
        """
        self._profile.tally.clears += 1
        for place in list(self._epoch.blocks.places):
            if event.medium in (None, place.medium) and event.group_idx in (None, place.group_idx):
                self._epoch.blocks.clear(place)


def _shape(event: BlockStored) -> tuple[object, ...]:
    return event.group_idx, event.medium, event.block_size, event.kind, event.sliding_window


def _with_medium(event: AnEvent, media: Mapping[str, str]) -> AnEvent:
    """Return the event with the index's name of its medium in place of the engine's."""
    name = media.get(event.medium or "") if media else None
    return event if name is None else msgspec.structs.replace(event, medium=name)
