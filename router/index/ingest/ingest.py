# SPDX-License-Identifier: Apache-2.0
"""One worker's stream, from typed items to net changes of its residency, whichever of its two feeds is followed.

Pure: no sockets, no Redis, no clock of its own.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from typing import TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from kvrouter.events.patch.items import ReportItem
from kvrouter.events.transport.progress import CaughtUp, FellBehind
from kvrouter.events.vllm.codec import BatchDecoder
from kvrouter.events.vllm.stream_items import Batch, Connected, Disconnected, ResumePoint, StreamItem
from kvrouter.router.base.common.ids import Place
from kvrouter.router.index.ingest.engine_liveness import (
    EngineAbsent,
    EngineBack,
    EngineLost,
    EnginePresent,
    EngineRestarted,
    EngineSame,
    VitalSign,
)
from kvrouter.router.index.ingest.patch_feed import PatchFeed
from kvrouter.router.index.ingest.stock_feed import StockFeed
from kvrouter.router.index.ingest.worker_epoch import WorkerEpoch
from kvrouter.router.index.ingest.worker_profile import SILENT, WorkerProfile
from kvrouter.router.model.workers.registration import Registration
from kvrouter.router.model.workers.stream_state import StreamState

# The items that only the patch's reports have; items about connections come from both streams.
_REPORT_ITEMS = tuple(set(get_args(ReportItem)) - set(get_args(StreamItem)))

# The number of copies by place and block hash.
Copies: TypeAlias = dict[tuple[Place, int], int]


class Ingest:
    """The state machine of one worker.

    It is single-threaded: call `apply` with items in order, and `held.take` to flush.
    """

    def __init__(
        self, registration: Registration, *, seed: str | None, decoder: BatchDecoder, new_epoch: Callable[[], str]
    ) -> None:
        self.profile = WorkerProfile(registration, seed)
        self.held = WorkerEpoch(self.profile, new_epoch)
        self.reports = PatchFeed(self.held)
        self.stock = StockFeed(self.held, decoder)
        self._follows_reports = False

    @property
    def state(self) -> StreamState:
        """Return the state of the worker's event stream, derived from its profile."""
        return self.profile.state

    @property
    def reason(self) -> str:
        """Why the state is what it is, and what happened last; empty if there is nothing to say."""
        return self.profile.reason(self.held.blocks)

    def follow_reports(self, epoch: str | None = None) -> None:
        """Switch to the items of the patch's topic.

        Args:
            epoch: The life of the engine that answers there, None if not known.
        """
        self._follows_reports = True
        self.reports.begin(epoch)

    def follow_stock(self) -> None:
        """Switch to the items of the engine's own topic."""
        self._follows_reports = False
        self.reports.end()

    @property
    def resume_point(self) -> ResumePoint | None:
        """The last batch of the engine's own topic that was applied, None if there is none."""
        contact, seq = self.profile.contact, self.held.seq
        if seq is None or self.profile.patch.epoch is not None:
            return None
        return ResumePoint(seq, contact.fingerprint, contact.incomplete)

    def restore(
        self, epoch: str, seq: int, places: dict[Place, NDArray[np.uint64]], copies: Copies, meta: dict[str, bytes]
    ) -> None:
        """Continue from the state that Redis holds.

        The blocks are credited as they are, but stay suspect until the stream proves that nothing was missed. Raises
        ValueError or an error of msgspec for values that no router writes; begin with a new object then.
        """
        copied: dict[Place, dict[int, int]] = {}
        for (place, block_hash), count in copies.items():
            if count < 2:
                raise ValueError(f"a block of {place.text} is stored with {count} copies: expected 2 or more")
            copied.setdefault(place, {})[block_hash] = count
        for place, hashes in places.items():
            counts = copied.get(place, {})
            # Copies are read after the blocks, so they may name a block that was stored in between and is missing here.
            present = np.isin(np.fromiter(counts, np.uint64), hashes).tolist()
            self.held.blocks.load(place, hashes, dict(itertools.compress(counts.items(), present)))
        self.held.continue_from(epoch, seq)
        self.profile.load(meta)
        self.profile.contact.unproven = True
        self.profile.wait_for(
            f"restored from Redis at seq {seq}; the stream has not shown yet that nothing was missed since"
        )

    def begin_unreadable(self, problem: str) -> None:
        """Report that the worker's state in Redis cannot be read, so that nothing of it is used."""
        self.profile.report(f"what Redis holds of it cannot be read ({problem}): it is learned again")

    def pause(self, incident: str) -> None:
        """Note that nobody reads the stream for now.

        The blocks stay until the stream shows whether something was missed.
        """
        contact = self.profile.contact
        contact.unproven = self.held.seq is not None
        contact.gap_open = contact.expired = contact.linked = contact.behind = contact.same_life = False
        contact.next_seq_s = contact.reported_start_s = None
        if not contact.missing:
            self.profile.wait_for(incident)

    def apply_next(self, items: deque[StreamItem], now: float) -> None:
        """Apply the next item of the engine's own topic, or the next batches at once, and take it from the queue."""
        if isinstance(items[0], Batch):
            for _ in range(self.stock.apply_batches(items, now)):
                items.popleft()
        else:
            self.apply(items.popleft(), now)

    def apply(self, item: StreamItem | ReportItem, now: float) -> None:
        """Apply the next item of either stream at `now`, in seconds of a monotonic clock."""
        contact = self.profile.contact
        if isinstance(item, FellBehind):
            contact.behind = True
            contact.missing |= item.missing
        elif isinstance(item, CaughtUp):
            # A connection from before the engine's process changed says nothing about the stream that follows.
            if not contact.expired:
                self.profile.catch_up()
        elif isinstance(item, _REPORT_ITEMS) or (self._follows_reports and isinstance(item, Connected | Disconnected)):
            self.reports.apply(item, now)
        else:
            self.stock.apply(item, now)

    def on_liveness(self, sign: VitalSign) -> None:
        """Apply a sign of the engine's life or death that was seen over HTTP.

        After `EngineBack` and `EngineRestarted` the caller must read the stream again, because the engine's process may
        be another one.
        """
        contact = self.profile.contact
        if isinstance(sign, EngineAbsent):
            contact.absent = sign.reason
        elif isinstance(sign, EnginePresent):
            contact.absent = ""
        elif isinstance(sign, EngineLost):
            self.profile.tally.losses += 1
            contact.down = f"the engine is gone ({sign.reason}); what it held is void"
            self.held.void_life(contact.down)
        elif isinstance(sign, EngineSame):
            self.stock.compare_process(sign)
        else:
            self._begin_life(sign)

    def _begin_life(self, sign: EngineBack | EngineRestarted) -> None:
        self.profile.contact.down = ""
        if self.profile.is_silent:
            self.profile.report(SILENT)
        else:
            what = "answers again" if isinstance(sign, EngineBack) else f"is another process ({sign.reason})"
            self.held.void_life(f"the engine {what}; its stream is read again")
            self.profile.contact.expired = True
        if self._follows_reports:
            self.reports.suspect_life("answers again" if isinstance(sign, EngineBack) else sign.reason)

    def allow_ranks(self, allowed: frozenset[int] | None) -> bool:
        """Limit the ranks that the worker's events may name, and return whether the stream must be read again.

        It must be read again if batches that are the worker's own were left out.

        Args:
            allowed: The ranks, None for any.
        """
        self.profile.ranks.allowed = allowed
        return self.profile.is_own(None) and self.profile.ranks.skips
