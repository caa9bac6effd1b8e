# SPDX-License-Identifier: Apache-2.0
"""An Ingest that also takes the engine patch's reports: declared catalog, snapshots, and heartbeats that prove the
index. Pure.

Invariant: after a heartbeat that agrees, what is held is what the engine holds, block for block. One that does not
agree ends all credit until a snapshot is loaded.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
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
from kvrouter.events.patch.messages import (
    DeclaredCatalog,
    Events,
    Heartbeat,
    ReportCleared,
    ReportStored,
    unpack_hashes,
)
from kvrouter.events.vllm.codec import BatchDecoder
from kvrouter.events.vllm.messages import BlockStored
from kvrouter.events.vllm.stream_items import Connected, Disconnected, ResumePoint, StreamItem
from kvrouter.router.common.ids import GPU, Place
from kvrouter.router.ingest.declared_catalog import contradictions, declared_problem, declared_spec
from kvrouter.router.ingest.engine_liveness import EngineBack, EngineRestarted, VitalSign
from kvrouter.router.ingest.residency import EMPTY_SUM, MAX_PLACES, PlaceSum, Runs
from kvrouter.router.ingest.stock_ingest import META_LEARNED, StockIngest
from kvrouter.router.kvcache.scheme_verification import HashIdentity
from kvrouter.router.workers.registration import CatalogSpec, Registration
from kvrouter.router.workers.stream_state import StreamState

META_REPORT_EPOCH = "report_epoch"
META_DECLARED = "declared"

NO_EPOCH = b""

PROVING = "waiting for a heartbeat to prove that nothing was missed"


class PatchIngest(StockIngest):
    """The state machine of one worker, whichever of its two streams is followed. See Ingest."""

    def __init__(
        self, registration: Registration, *, seed: str | None, decoder: BatchDecoder, new_epoch: Callable[[], str]
    ) -> None:
        super().__init__(registration, seed=seed, decoder=decoder, new_epoch=new_epoch)
        # The engine's epoch whose reports `seq` counts; None: the residency is from the engine's own topic.
        self.report_epoch: str | None = None
        self.greeting: Greeted | None = None
        self.last_heartbeat_s: float | None = None
        # Why a snapshot is needed, to be asked for by whoever holds the sockets.
        self.wants_snapshot: str | None = None
        self._reports = False
        self._declared: DeclaredCatalog | None = None
        self._note = ""

    @property
    def reason(self) -> str:
        return super().reason or self._note

    def follow_reports(self, epoch: str | None = None) -> None:
        """From now on the items come from the patch's topic. epoch: of the life that answers there."""
        self._reports = True
        self._expired = False
        if self._declared is not None and self.report_epoch is None:
            # Which life declared it is not known.
            self._forget_learned()
        if epoch is not None and self.report_epoch not in (None, epoch):
            self._distrust("another life of the engine answers; loading what it holds, no credit meanwhile")
        if self.report_epoch is None:
            self._load_first("a patched engine answers; loading what it holds")

    def _load_first(self, incident: str) -> None:
        """No snapshot was loaded yet: what is held, if anything, is from the engine's own topic."""
        if self.seq is None:
            self._set(StreamState.CATCHING_UP if self._linked else StreamState.CONNECTING, incident)
        else:
            self._doubt(incident)

    def follow_stock(self) -> None:
        """From now on the items come from the engine's own topic."""
        if self.report_epoch is not None:
            self.report_epoch = None
            self._void_life("the engine's patch no longer answers; what is cached is learned anew from its own topic")
        elif self._declared is not None:
            self._forget_learned()
        self._reports = self._expired = False
        self.greeting = None

    @property
    def report_resume(self) -> ReportResume | None:
        """Where to go on in the reports, None when a snapshot is needed first."""
        if self.report_epoch is None:
            return None
        return ReportResume(self.report_epoch, 0 if self.seq is None else self.seq + 1)

    @property
    def resume_point(self) -> ResumePoint | None:
        return None if self.report_epoch is not None else super().resume_point

    def restore(
        self,
        epoch: str,
        seq: int,
        places: dict[Place, NDArray[np.uint64]],
        copies: dict[tuple[Place, int], int],
        meta: dict[str, bytes],
    ) -> None:
        super().restore(epoch, seq, places, copies, meta)
        self.report_epoch = meta.get(META_REPORT_EPOCH, NO_EPOCH).decode() or None
        if self.report_epoch is not None and META_DECLARED in meta:
            self._declare(msgspec.json.decode(meta[META_DECLARED], type=DeclaredCatalog))

    def apply(self, item: StreamItem | ReportItem, now: float) -> None:
        """Take the next item of either stream. now: seconds, monotonic."""
        if self._expired and isinstance(item, ReportBatch | HeartbeatSeen | Loaded):
            return
        if isinstance(item, ReportBatch):
            self._report(item.seq, item.message, now)
        elif isinstance(item, HeartbeatSeen):
            self.last_heartbeat_s = now
            self.tally.heartbeats += 1
            self._compare(item.message)
        elif isinstance(item, Loaded):
            self._load(item.snapshot)
        elif isinstance(item, ReportGap):
            self.tally.gaps += 1
            self.tally.missed_batches += item.next_seq - item.first_seq
            self._distrust(
                f"messages {item.first_seq} to {item.next_seq - 1} are missing ({item.reason}); loading a snapshot, "
                "no credit meanwhile"
            )
        elif isinstance(item, Expired):
            self._expired = False
        elif isinstance(item, NewEpoch):
            self.tally.restarts += 1
            self._void_life("")
            self._distrust(
                f"the engine's publisher began anew ({item.reason}); loading a snapshot, no credit meanwhile"
            )
        elif isinstance(item, SnapshotFailed):
            self._set(self._state, f"no snapshot ({item.reason}); asking again; residency before it is not complete")
        elif isinstance(item, PatchSilent):
            self._doubt(f"not heard for {item.silent_s:.1f} s; the last known residency is shown")
        elif isinstance(item, PatchHeard):
            self._incident = f"heard again; {PROVING}"
        elif isinstance(item, Greeted):
            self.greeting = item
        elif isinstance(item, Declared):
            self._declare(item.catalog)
        elif self._reports and isinstance(item, Connected | Disconnected):
            self._connection(item)
        else:
            super().apply(item, now)

    def on_liveness(self, sign: VitalSign) -> None:
        super().on_liveness(sign)
        if self._reports and isinstance(sign, EngineBack | EngineRestarted):
            reason = "answers again" if isinstance(sign, EngineBack) else sign.reason
            self.wants_snapshot = f"the engine may have begun anew ({reason})"
            self._distrust(f"{self.wants_snapshot}; loading a snapshot, no credit meanwhile")

    def _connection(self, item: Connected | Disconnected) -> None:
        if isinstance(item, Disconnected):
            self._linked = False
            self._doubt("connection to the engine's patch lost; the last known residency is shown")
        elif self.report_epoch is None:
            self._linked = True
            self._load_first("loading a snapshot of what the engine holds")
        elif self._state is not StreamState.RESYNCING:
            self._doubt(f"connected; {PROVING}")

    def _doubt(self, incident: str) -> None:
        """Nothing is known to be wrong, and nothing proves that it is right."""
        self._unproven = True
        if self._state is StreamState.RESYNCING:
            # Batches are known to be missing: doubt is no better.
            self._incident = incident
        else:
            self._set(StreamState.SUSPECT, incident)

    def _distrust(self, incident: str) -> None:
        """What is held is known not to be what the engine holds."""
        self._unproven = True
        self._set(StreamState.RESYNCING, incident)

    def _report(self, seq: int, message: Events, now: float) -> None:
        self.last_event_s = now
        self.tally.batches += 1
        self.tally.events += len(message.events)
        self.tally.foreign += not self._is_own(message.dp_rank)
        runs = Runs(self.blocks)
        for event in message.events:
            if isinstance(event, ReportCleared):
                runs.end()
                self._cleared(event)
                continue
            hashes = unpack_hashes(event.hashes)
            self.tally.blocks += len(hashes)
            stores = isinstance(event, ReportStored)
            if self._declared is None and isinstance(event, ReportStored):
                self._learn_report(event, hashes)
            if len(hashes):
                runs.add(Place(event.group_idx, event.medium, event.ownership), stores, hashes)
        runs.end()
        self._advance(seq)

    def _learn_report(self, event: ReportStored, hashes: NDArray[np.uint64]) -> None:
        # A chunk of the offload tier is one hash here, so its size says nothing: like a placeholder.
        self._learner.stored(
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

    def _cleared(self, event: ReportCleared) -> None:
        for place in list(self.blocks.places):
            if place.medium == event.medium and event.ownership in (None, place.ownership):
                self.blocks.clear(place)

    def _load(self, snapshot: Snapshot) -> None:
        """Make the residency what the snapshot says: in the same epoch where its seqs and places allow, else in a new
        one."""
        self.tally.snapshots += 1
        last = snapshot.next_seq - 1
        places = _places_of(snapshot)
        goes_on = (
            self.report_epoch == snapshot.epoch
            and self.seq is not None
            and (last > self.seq or (last == self.seq and self._first_seq is not None))
            # Places that are empty by now take room too; a new epoch has it all.
            and len(places.keys() | self.blocks.places) <= MAX_PLACES
        )
        if self.report_epoch == snapshot.epoch:
            self._count_differences({place: hashes for place, (hashes, _) in places.items()})
        if not goes_on:
            self._void("")
        if self.report_epoch != snapshot.epoch:
            declared = self._declared
            self._forget_learned()
            if declared is not None:
                # Said of this life, before its snapshot.
                self._declare(declared)
        self.blocks.replace(places)
        self.report_epoch = snapshot.epoch
        if last >= 0:
            if self._first_seq is None:
                self._first_seq = last if self.seq is None else self.seq + 1
            self.seq = last
        self._unproven = False
        self.wants_snapshot = None
        self._set(StreamState.LIVE, "")

    def _count_differences(self, truth: dict[Place, NDArray[np.uint64]]) -> None:
        for place in {*truth, *self.blocks.places}:
            held, wanted = self.blocks.hashes(place), truth.get(place, np.empty(0, np.uint64))
            common = len(np.intersect1d(held, wanted))
            self.tally.ghost_blocks += len(held) - common
            self.tally.lost_blocks += len(np.unique(wanted)) - common

    def _compare(self, beat: Heartbeat) -> None:
        """A heartbeat for exactly the state that we are in."""
        said: dict[Place, PlaceSum] = {}
        # Blocks of one place here and of two localities there: their sums do not tell the sum of both.
        mixed: set[Place] = set()
        for summary in beat.places:
            place = Place(summary.group_idx, summary.medium, summary.ownership)
            if place in said:
                mixed.add(place)
            said[place] = PlaceSum(summary.blocks, summary.copies, summary.digest)
        held = self.blocks.sums()
        wrong = [
            place
            for place in sorted(said.keys() | held.keys(), key=lambda place: place.text)
            if place not in mixed and said.get(place, EMPTY_SUM) != held.get(place, EMPTY_SUM)
        ]
        if wrong:
            place = wrong[0]
            self.tally.mismatches += 1
            self.wants_snapshot = (
                f"the engine holds {said.get(place, EMPTY_SUM).blocks} blocks in {place.text}, the index "
                f"{held.get(place, EMPTY_SUM).blocks}, or others"
            )
            self._distrust(f"{self.wants_snapshot}; loading a snapshot, no credit meanwhile")
            return
        self._unproven = False
        if self._state is not StreamState.LIVE:
            self._set(StreamState.LIVE, "")

    def _declare(self, catalog: DeclaredCatalog) -> None:
        self._is_own(catalog.dp_rank)
        if catalog == self._declared:
            return
        self._declared = catalog
        stated = self.registration.catalog or CatalogSpec()
        spec = self.spec = declared_spec(catalog, stated)
        problem = declared_problem(catalog)
        try:
            self.identity = HashIdentity(spec, self._seed)
        except ValueError as error:
            problem = problem or f"its hash scheme cannot be computed here: {error}"
        else:
            if catalog.hash_example is not None:
                self.identity.prove(catalog.hash_example.token_ids, catalog.hash_example.block_hash)
        self._learner.declare(spec, problem)
        other = contradictions(spec, stated)
        self._note = ""
        if other:
            names = ", ".join(other)
            self._note = (
                f"the registered catalog says otherwise than the engine about {names}; the engine's word is used"
            )

    def _forget_learned(self) -> None:
        self._declared, self._note = None, ""
        self.spec = self.registration.catalog or CatalogSpec()
        super()._forget_learned()

    def _meta(self) -> dict[str, bytes]:
        meta = super()._meta()
        meta[META_REPORT_EPOCH] = NO_EPOCH if self.report_epoch is None else self.report_epoch.encode()
        if META_LEARNED in meta and self._declared is not None:
            meta[META_DECLARED] = msgspec.json.encode(self._declared)
        return meta


def _places_of(snapshot: Snapshot) -> dict[Place, tuple[NDArray[np.uint64], dict[int, int]]]:
    """Hashes and copies by place; the localities of one place are counted together."""
    found: dict[Place, tuple[NDArray[np.uint64], dict[int, int]]] = {}
    for part in snapshot.places:
        place = Place(part.group_idx, part.medium, part.ownership)
        hashes, copied = part.hashes, dict(part.copied)
        if place in found:
            others, other_copies = found[place]
            for block_hash in np.intersect1d(hashes, others).tolist():
                copied[block_hash] = copied.get(block_hash, 1) + other_copies.get(block_hash, 1)
            hashes, copied = np.union1d(hashes, others), {**other_copies, **copied}
        found[place] = (hashes, copied)
    return found
