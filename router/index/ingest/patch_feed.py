# SPDX-License-Identifier: Apache-2.0
"""The reports of the engine patch, applied to a worker's profile and epoch. Pure.

The reports bring the declared catalog, snapshots, and heartbeats that prove the index.

Invariant: after a heartbeat that agrees, the blocks held are those of the engine, block for block. A heartbeat that
does not agree ends all credit until a snapshot is loaded.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvrouter.events.patch.items import (
    Declared,
    Expired,
    Greeted,
    HeartbeatSeen,
    Loaded,
    NewEpoch,
    PatchHeard,
    PatchSilent,
    ReportBatch,
    ReportGap,
    ReportItem,
    ReportResume,
    Snapshot,
    SnapshotFailed,
)
from kvrouter.events.patch.messages import Events, Heartbeat, ReportCleared, ReportStored, unpack_hashes
from kvrouter.events.vllm.messages import BlockStored
from kvrouter.events.vllm.stream_items import Connected, Disconnected, Flooded, StreamItem
from kvrouter.router.base.common.ids import GPU, Place
from kvrouter.router.index.ingest.residency import EMPTY_SUM, MAX_PLACES, PlaceSum, Runs
from kvrouter.router.index.ingest.worker_epoch import WorkerEpoch

PROVING = "waiting for a heartbeat to prove that nothing was missed"


class PatchFeed:
    """The reports of one worker's patch, and their effect on its epoch and profile."""

    def __init__(self, epoch: WorkerEpoch) -> None:
        self._epoch = epoch
        self._profile = epoch.profile
        self._contact = epoch.profile.contact
        self._patch = epoch.profile.patch
        # Why a snapshot is needed; the owner of the sockets requests it.
        self.wants_snapshot: str | None = None

    def begin(self, epoch: str | None) -> None:
        """Start to follow the patch's topic.

        Args:
            epoch: The life of the engine whose patch answers, or None if it is not known.
        """
        self._contact.expired = self._patch.silent = False
        self._patch.withheld = self._patch.tiers_withheld = ""
        if self._profile.declared is not None and self._patch.epoch is None:
            # It is not known which life of the engine declared the catalog.
            self._profile.forget_learned()
        if epoch is not None and self._patch.epoch not in (None, epoch):
            self._distrust("another life of the engine answers; loading what it holds, no credit meanwhile")
        if self._patch.epoch is None:
            self._load_first("a patched engine answers; loading what it holds")

    def end(self) -> None:
        """Stop taking items, because they come from the engine's own topic from now on."""
        if self._patch.epoch is not None:
            self._patch.epoch = None
            self._epoch.void_life(
                "the engine's patch no longer answers; what is cached is learned again from its own topic"
            )
        elif self._profile.declared is not None:
            self._profile.forget_learned()
        if self._epoch.seq is None:
            # No batch and no snapshot was applied in this epoch, so nothing can be missing from it.
            self._contact.unproven = self._contact.missing = False
        self._contact.expired = False
        self._patch.greeting = None
        self._patch.tiers_withheld = ""

    def _load_first(self, incident: str) -> None:
        """Note that no snapshot was loaded yet, so any blocks held are from the engine's own topic."""
        self._contact.behind = True
        if self._epoch.seq is None:
            self._profile.wait_for(incident)
        else:
            self._doubt(incident)

    @property
    def resume(self) -> ReportResume | None:
        """Where to continue in the reports, None if a snapshot is needed first."""
        seq = self._epoch.seq
        return None if self._patch.epoch is None else ReportResume(self._patch.epoch, 0 if seq is None else seq + 1)

    def apply(self, item: StreamItem | ReportItem, now: float) -> None:
        """Apply the next item at `now`, in seconds of a monotonic clock."""
        profile = self._profile
        if self._contact.expired and isinstance(item, ReportBatch | HeartbeatSeen | Loaded):
            return
        if isinstance(item, ReportBatch | HeartbeatSeen):
            # A message may arrive before the item about its connection.
            self._contact.linked = True
        if isinstance(item, ReportBatch):
            self._report(item.seq, item.message, now)
        elif isinstance(item, HeartbeatSeen):
            self._patch.last_heartbeat_s = now
            profile.tally.heartbeats += 1
            self._patch.withheld, self._patch.tiers_withheld = item.message.withheld, item.message.tiers_withheld
            self._compare(item.message)
        elif isinstance(item, Loaded):
            self._load(item.snapshot)
        elif isinstance(item, ReportGap):
            profile.tally.gaps += 1
            profile.tally.missed_batches += item.next_seq - item.first_seq
            self._distrust(
                f"messages {item.first_seq} to {item.next_seq - 1} are missing ({item.reason}); loading a snapshot, "
                "no credit meanwhile"
            )
        elif isinstance(item, Expired):
            self._contact.expired = False
        elif isinstance(item, NewEpoch):
            profile.tally.restarts += 1
            self._epoch.void_life("")
            self._distrust(
                f"the engine's publisher started again ({item.reason}); loading a snapshot, no credit meanwhile"
            )
        elif isinstance(item, SnapshotFailed):
            profile.wait_for(f"no snapshot ({item.reason}); asking again; residency before it is not complete")
        elif isinstance(item, PatchSilent):
            self._patch.silent = True
            self._doubt(f"not heard for {item.silent_s:.1f} s; the last known residency is shown")
        elif isinstance(item, PatchHeard):
            self._patch.silent = False
            self._doubt(f"heard again; {PROVING}")
        elif isinstance(item, Greeted):
            self._patch.greeting = item
        elif isinstance(item, Declared):
            profile.declare(item.catalog)
        elif isinstance(item, Connected | Disconnected):
            self._connection(item)
        elif isinstance(item, Flooded):
            profile.flooded(item)

    def suspect_life(self, reason: str) -> None:
        """Request a snapshot, because the engine's HTTP shows that another life may have begun."""
        self.wants_snapshot = f"the engine may have restarted ({reason})"
        self._distrust(f"{self.wants_snapshot}; loading a snapshot, no credit meanwhile")

    def _connection(self, item: Connected | Disconnected) -> None:
        if isinstance(item, Disconnected):
            self._contact.linked = False
            lost = self._contact.flood or "connection to the engine's patch lost"
            self._doubt(f"{lost}; the last known residency is shown")
            self._contact.flood = ""
        elif self._patch.epoch is None:
            self._contact.linked = True
            self._load_first("loading a snapshot of what the engine holds")
        else:
            self._contact.linked = True
            self._doubt(f"connected; {PROVING}")

    def _doubt(self, incident: str) -> None:
        """Mark the blocks held as unproven: nothing shows that they are wrong, or proves that they are right."""
        self._contact.unproven = True
        self._profile.wait_for(incident)

    def _distrust(self, incident: str) -> None:
        """Mark the blocks held as known to differ from the engine's."""
        self._contact.unproven = self._contact.missing = True
        self._profile.wait_for(incident)

    def _report(self, seq: int, message: Events, now: float) -> None:
        profile = self._profile
        self._contact.last_event_s = now
        profile.tally.batches += 1
        profile.tally.events += len(message.events)
        profile.tally.foreign += not profile.is_own(message.dp_rank)
        runs = Runs(self._epoch.blocks)
        for event in message.events:
            if isinstance(event, ReportCleared):
                runs.end()
                self._clear(event)
                continue
            hashes = unpack_hashes(event.hashes)
            profile.tally.blocks += len(hashes)
            stores = isinstance(event, ReportStored)
            if profile.declared is None and isinstance(event, ReportStored):
                self._learn(event, hashes)
            if len(hashes):
                runs.add(Place(event.group_idx, event.medium, event.ownership), stores, hashes)
        runs.end()
        self._epoch.advance(seq, seq)

    def _learn(self, event: ReportStored, hashes: NDArray[np.uint64]) -> None:
        # In a report, a chunk of the offload tier is one hash, so its size says nothing, as with a placeholder.
        self._profile.learner.stored(
            BlockStored(
                block_hashes=hashes,
                parent_block_hash=event.parent_hash,
                block_size=event.block_size if event.medium == GPU else 0,
                medium=event.medium,
                group_idx=event.group_idx,
                kind=event.kind,
                sliding_window=event.sliding_window,
            ),
            shows_tier=False,
        )

    def _clear(self, event: ReportCleared) -> None:
        self._profile.tally.clears += 1
        for place in list(self._epoch.blocks.places):
            if place.medium == event.medium and event.ownership in (None, place.ownership):
                self._epoch.blocks.clear(place)

    def _load(self, snapshot: Snapshot) -> None:
        """Make the residency equal to the snapshot.

        The epoch continues if the snapshot's seqs and places allow it; otherwise a new one begins.
        """
        profile, epoch, is_same_life = self._profile, self._epoch, self._patch.epoch == snapshot.epoch
        profile.tally.snapshots += 1
        last = snapshot.next_seq - 1
        places = _places_of(snapshot)
        # Places that are empty now count too; a new epoch begins without any.
        continues = is_same_life and epoch.can_jump(last) and len(places.keys() | epoch.blocks.places) <= MAX_PLACES
        if is_same_life:
            self._count_differences({place: hashes for place, (hashes, _) in places.items()})
        if not continues:
            epoch.void("")
        if not is_same_life:
            declared = profile.declared
            profile.forget_learned()
            if declared is not None:
                # This life declared its catalog before its snapshot.
                profile.declare(declared)
        epoch.blocks.replace(places)
        self._patch.epoch = snapshot.epoch
        if last >= 0:
            epoch.jump(last)
        self._contact.unproven, self._contact.missing = self._patch.silent, False
        # The messages that came during the snapshot are still to be applied.
        self._contact.behind = True
        self.wants_snapshot = None
        profile.wait_for("the snapshot is loaded; applying what came meanwhile")

    def _count_differences(self, truth: dict[Place, NDArray[np.uint64]]) -> None:
        """Count the blocks in which the index differs from a snapshot of the same life."""
        blocks, tally = self._epoch.blocks, self._profile.tally
        for place in {*truth, *blocks.places}:
            held, wanted = blocks.hashes(place), truth.get(place, np.empty(0, np.uint64))
            common = len(np.intersect1d(held, wanted))
            tally.ghost_blocks += len(held) - common
            tally.lost_blocks += len(np.unique(wanted)) - common

    def _compare(self, beat: Heartbeat) -> None:
        """Compare the blocks held with a heartbeat, which describes exactly this state of the stream."""
        reported: dict[Place, PlaceSum] = {}
        # Places that the engine reports as several localities. A block may be in more than one of them, so their sums
        # do not give the sum of the place.
        mixed: set[Place] = set()
        for summary in beat.places:
            place = Place(summary.group_idx, summary.medium, summary.ownership)
            if place in reported:
                mixed.add(place)
            reported[place] = PlaceSum(summary.blocks, summary.copies, summary.digest)
        held = self._epoch.blocks.sums()
        wrong = [
            place
            for place in sorted(reported.keys() | held.keys(), key=lambda place: place.text)
            if place not in mixed and reported.get(place, EMPTY_SUM) != held.get(place, EMPTY_SUM)
        ]
        if wrong:
            place = wrong[0]
            self._profile.tally.mismatches += 1
            self.wants_snapshot = (
                f"the engine holds {reported.get(place, EMPTY_SUM).blocks} blocks in {place.text}, the index "
                f"{held.get(place, EMPTY_SUM).blocks}, or others"
            )
            self._distrust(f"{self.wants_snapshot}; loading a snapshot, no credit meanwhile")
            return
        self._contact.missing = False
        self._profile.prove()


def _places_of(snapshot: Snapshot) -> dict[Place, tuple[NDArray[np.uint64], dict[int, int]]]:
    """Return hashes and copies by place; the localities of one place are counted together."""
    places: dict[Place, tuple[NDArray[np.uint64], dict[int, int]]] = {}
    for part in snapshot.places:
        place = Place(part.group_idx, part.medium, part.ownership)
        hashes, copied = part.hashes, dict(part.copied)
        if place in places:
            others, other_copies = places[place]
            for block_hash in np.intersect1d(hashes, others).tolist():
                copied[block_hash] = copied.get(block_hash, 1) + other_copies.get(block_hash, 1)
            hashes, copied = np.union1d(hashes, others), {**other_copies, **copied}
        places[place] = (hashes, copied)
    return places
