# SPDX-License-Identifier: Apache-2.0
"""The router's side of a `World` (`stream_world.py`): the cursor, the ingest, and the store image behind them."""

from __future__ import annotations

import random
from collections import deque

import msgspec

from kvrouter.events.patch.cursor import ReportCursor
from kvrouter.events.patch.items import Declared, Greeted, HeartbeatSeen, Loaded, ReportBatch
from kvrouter.events.patch.messages import Hello, SnapshotPart
from kvrouter.events.vllm.batch_cursor import Cursor
from kvrouter.events.vllm.codec import BatchDecoder
from kvrouter.events.vllm.stream_items import Batch, Connected, Disconnected
from kvrouter.router.index.ingest.engine_liveness import (
    EngineBack,
    EngineLiveness,
    EngineLost,
    EngineRestarted,
    NoPulse,
    Pulse,
)
from kvrouter.router.index.ingest.ingest import Ingest
from kvrouter.router.model.workers.registration import NO_PATCH, CatalogSpec, Registration
from kvrouter.router.model.workers.stream_state import StreamState
from tests.support.model_engine import Life
from tests.support.store_image import WORKER, Misled, StoreImage

MAX_HELD = 6
TRACE_LINES = 80


class RouterEnd:
    """The router that follows one worker, with the messages that are on their way to it.

    `life` is the engine's current life, None between two lives.
    """

    # Whether to count the items after which a worker is live too early, instead of raising `Misled`.
    counts_early = False

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        self.kind = rng.choice(["stock", "stock", "plain", "patched", "patched"])
        self.http = rng.random() < 0.6
        self.trace: deque[str] = deque(maxlen=TRACE_LINES)
        self.store = StoreImage()
        self.epochs = 0
        self.now = 0.0
        self.lives: list[Life] = []
        self.life: Life | None = None
        self.wired = self.joined = False
        # Changes of the connection ("up", "down") that the cursor does not know yet, and the messages under way to it.
        self.news: deque[str] = deque()
        self.live: deque[tuple[int, object]] = deque()
        self.swapped: tuple[int, object] | None = None
        self.answers: deque[tuple[int, bytes] | None] = deque()
        self.served = 0
        self.replay_up = True
        self.hellos: deque[Hello] = deque()
        self.parts: deque[SnapshotPart] = deque()
        self.asked: int | None = None
        # Items that the cursor returned, each with whether it was still reading after it (see `_is_reading`).
        self.inbox: deque[tuple[object, bool]] = deque()
        self.was_reading = False
        # The number of items after which the worker was live, and how many of them came while there was more to read.
        self.live_items = self.early_items = 0
        # For each `Disconnected` in the inbox, the lives that had ended by then.
        self.ends: deque[list[Life]] = deque()
        self.faulty = True
        # Whether this life has sent an odd removal, which takes the router some batches to forget.
        self.odd = False

    @property
    def state(self) -> StreamState:
        return self.ingest.state

    def _new_epoch(self) -> str:
        self.epochs += 1
        return f"e{self.epochs}"

    def _new_ingest(self) -> Ingest:
        registration = Registration(
            WORKER,
            events="tcp://127.0.0.1:1",
            replay=None if self.kind == "plain" else "tcp://127.0.0.1:2",
            patch=None if self.kind == "patched" else NO_PATCH,
            url="http://127.0.0.1:3" if self.http else None,
            catalog=CatalogSpec(offload_blocks_per_chunk=1),
        )
        return Ingest(registration, seed=None, decoder=BatchDecoder(), new_epoch=self._new_epoch)

    def _begin_router(self) -> None:
        """Let a router process take the worker over, from the state in the store."""
        store = self.store
        self.ingest = self._new_ingest()
        self.vitals = EngineLiveness(store.start_s)
        if store.epoch is not None:
            # The mirror of a new process is loaded from the store.
            store.mirror.begin_epoch(WORKER, store.epoch)
            for place, held in store.arrays().items():
                store.mirror.add(WORKER, place, held)
        if store.epoch is not None and store.seq is not None:
            try:
                self.ingest.restore(store.epoch, store.seq, store.arrays(), dict(store.copies), dict(store.meta))
            except (msgspec.MsgspecError, ValueError) as error:
                self.trace.append(f"not restored: {error}")
                self.ingest = self._new_ingest()
        self._follow()

    def _follow(self) -> None:
        """Open sockets to one of the two streams, with a new cursor."""
        self.inbox.clear()
        self.ends.clear()
        self.live.clear()
        self.news.clear()
        self.answers.clear()
        self.parts.clear()
        self.hellos.clear()
        self.swapped = None
        self.wired = self.joined = False
        self.served, self.asked = 0, None
        self.was_reading = False
        ingest = self.ingest
        self.cursor: Cursor | ReportCursor
        if self.kind == "patched" and self.life is not None and self.life.patched:
            ingest.follow_reports()
            self.cursor = ReportCursor(resume=ingest.reports.resume, max_held=MAX_HELD)
        else:
            ingest.follow_stock()
            self.cursor = Cursor(replay=self.kind != "plain", resume=ingest.resume_point, max_held=MAX_HELD)
        self.trace.append(f"follows with {type(self.cursor).__name__}, resume {ingest.resume_point}")

    def change_source(self) -> None:
        """Follow the other stream, as the patch has begun to answer or has been silent for too long."""
        patched = self.life is not None and self.life.patched
        if self.kind != "patched" or self.life is None or patched == isinstance(self.cursor, ReportCursor):
            return
        self.ingest.pause("followed again in a moment")
        if not self.ingest.held.continues(self.store.epoch, self.store.seq):
            self.ingest.held.rewrite_epoch()
        self._follow()

    def change_router(self) -> None:
        """Let another process take over the worker, after an orderly end of the first one or after a crash."""
        if self.rng.random() < 0.5:
            self.process()
            self.commit()
        self._begin_router()

    def spoil(self) -> None:
        self.trace.append(f"spoils {self.store.spoil(self.rng)}")
        self._begin_router()

    def _is_reading(self) -> bool:
        """Return whether the engine is known to have sent more than the cursor has handed out.

        The cursor's request and its held batches show it; items that the cursor announces are not used.
        """
        cursor = self.cursor
        if cursor.held:
            return True
        if isinstance(cursor, ReportCursor):
            return cursor._request is not None
        request = cursor.request
        return request is not None and (not request.silent or request.batches > 0)

    def _take_items(self) -> None:
        """Put the items that the cursor hands out into the inbox.

        Only the last item of one step can end the reading.
        """
        items, reading = self.cursor.take(), self._is_reading()
        inside = [self.was_reading or reading] * len(items)
        if inside:
            inside[-1] = reading
        self.was_reading = reading
        self.inbox.extend(zip(items, inside, strict=True))

    def _collect(self) -> None:
        self._take_items()
        if isinstance(self.cursor, Cursor) and self.cursor.request is not None and self.cursor.held > MAX_HELD:
            raise Misled("more is held than may be")
        if not self.faulty or self.rng.random() < 0.7:
            self.process()

    def process(self) -> None:
        """Apply the items of the inbox to the ingest."""
        ingest = self.ingest
        while self.inbox:
            item, is_early = self.inbox.popleft()
            self.trace.append(f"  {_short(item)}")
            ingest.apply(item, self.now)  # type: ignore[arg-type]
            self._judge_live(is_early=is_early)
            if isinstance(item, Disconnected):
                for life in self.ends.popleft():
                    life.end_heard = True
            elif isinstance(item, Batch | ReportBatch):
                self._hear_new_life(item)
            elif isinstance(item, Connected) and not self.faulty:
                self.pulse()
            if ingest.reports.wants_snapshot is not None and isinstance(self.cursor, ReportCursor):
                self.cursor.request_snapshot()
                ingest.reports.wants_snapshot = None
                self._take_items()

    def _judge_live(self, *, is_early: bool) -> None:
        """Check that the worker is not live between the items of an answer under way, or of batches held behind it."""
        if self.state is StreamState.LIVE:
            self.live_items += 1
            self.early_items += is_early
            if is_early and not self.counts_early:
                raise Misled("live although the stream is known to have more")

    def commit(self) -> None:
        flush = self.ingest.held.take()
        if flush is not None:
            self.store.commit(flush, self.vitals.start_s)
            held = self.ingest.held
            residency = {place: set(held.blocks.hashes(place).tolist()) for place in held.blocks.places}
            if {place: blocks for place, blocks in residency.items() if blocks} != self.store.residency():
                raise Misled("a checkpoint would differ from what was committed")

    def pulse(self) -> None:
        """Query the engine over HTTP, and apply the result to the ingest and the cursor."""
        if not self.http:
            return
        # Messages that were received before the answer are applied before it.
        self.process()
        life = self.life
        pulse = NoPulse("refused", gone=True) if life is None else Pulse(life.start_s)
        for change in self.vitals.observe(pulse, self.now):
            self.ingest.on_liveness(change)
            if isinstance(change, EngineLost | EngineRestarted):
                self._hear_ends()
            if isinstance(change, EngineBack | EngineRestarted):
                if isinstance(self.cursor, ReportCursor):
                    self.cursor.expire()
                else:
                    self.cursor.expire("the engine may be another")
                self.ingest.reports.wants_snapshot = None
                self._collect()

    def _hear_ends(self) -> None:
        for life in self.lives:
            life.end_heard |= life.ended

    def _hear_new_life(self, item: Batch | ReportBatch) -> None:
        life = self.life
        if life is None:
            return
        is_current_batch = isinstance(item, Batch) and any(payload == item.payload for _, payload in life.ring)
        if is_current_batch or (isinstance(item, ReportBatch) and item.message.epoch == life.epoch):
            self._hear_ends()


def _short(item: object) -> str:
    """Return an item as a line of the trace."""
    if isinstance(item, Batch):
        return f"Batch {item.seq}{' replayed' if item.replayed else ''}"
    if isinstance(item, ReportBatch):
        return f"ReportBatch {item.seq} of {item.message.epoch}"
    return type(item).__name__ if isinstance(item, Loaded | HeartbeatSeen | Greeted | Declared) else str(item)
