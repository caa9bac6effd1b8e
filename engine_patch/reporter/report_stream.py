# SPDX-License-Identifier: Apache-2.0
"""Turns changes into the frames of one epoch: numbers them, keeps the ledger in step, and encodes.

Invariant: the ledger equals the state of a reader that applied every message below `next_seq`. A message that is not
sent still uses up its seq, so that readers see the gap and load a snapshot. When the ledger itself misses changes,
nothing can be proven against it, so a new epoch begins with an empty ledger. Readers then credit too little until
blocks are stored again, never too much. No sockets, no threads.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeAlias

import msgspec

from kvrouter.engine_patch.reporter.counters import Counters
from kvrouter.engine_patch.reporter.event_queue import EventsDropped, EventsLost, Item, Message
from kvrouter.engine_patch.reporter.ledger import Ledger, Scope
from kvrouter.engine_patch.setup.throttled_log import ThrottledLog
from kvrouter.events.patch.messages import (
    REPORT_TOPIC,
    CatalogMessage,
    DeclaredCatalog,
    Events,
    Heartbeat,
    Report,
    ReportEvent,
)
from kvrouter.events.vllm.wire import SEQ_BYTES

log = logging.getLogger("vllm.kvrouter.reports")

# (topic, seq, payload)
Frames: TypeAlias = tuple[bytes, bytes, bytes]


class ReportStream:
    """One publisher's messages, in order.

    More than 15 attributes: six of them belong to one epoch and are set together by `_begin`.
    """

    def __init__(
        self,
        *,
        max_ledger_blocks: int,
        heartbeat_s: float,
        dp_rank: int,
        counters: Counters,
        wall_clock: Callable[[], float],
        clock: Callable[[], float],
        new_epoch: Callable[[], str],
    ) -> None:
        """Begin the first epoch.

        Args:
            max_ledger_blocks: Distinct blocks, over all places, that the ledger may count.
            heartbeat_s: The interval that heartbeats announce.
            dp_rank: The engine's data-parallel rank.
            counters: Counters to update.
            wall_clock: Returns seconds since 1970.
            clock: Returns monotonic seconds.
            new_epoch: Returns a new epoch's name.
        """
        self.catalog: DeclaredCatalog | None = None
        self.catalog_version = 0
        # The scope that is no longer reported and the reasons. They hold for all later epochs, too.
        self._scope = Scope.NOTHING
        self.withheld = self.tiers_withheld = ""
        self._max_ledger_blocks = max_ledger_blocks
        self._heartbeat_s = heartbeat_s
        self._dp_rank = dp_rank
        self._counters = counters
        self._wall_clock = wall_clock
        self._new_epoch = new_epoch
        self._log = ThrottledLog(log, clock)
        self._encoder = msgspec.msgpack.Encoder()
        self._begin()

    def pass_on(self, item: Item) -> Frames | None:
        """Return the frames to send for an item of the queue, or None if there are none."""
        if isinstance(item, Message):
            return self._message(item)
        if isinstance(item, EventsDropped):
            self._dropped(item)
        else:
            self._lost(item)
        return None

    def lose(self, reason: str, kind: str) -> None:
        """Begin a new epoch because the ledger misses changes.

        Args:
            reason: The reason for the log.
            kind: The kind of the reason, by which the log is throttled.
        """
        self._counters.epochs_lost += 1
        self._log.warning(kind, "ledger lost, new epoch", reason=reason, epoch=self.epoch, next_seq=self.next_seq)
        self._begin()

    def heartbeat(self) -> Frames:
        """Return the frames of a heartbeat that sums up the resident blocks."""
        message = Heartbeat(
            self.epoch,
            self.started_s,
            self._wall_clock(),
            self._heartbeat_s,
            self.ledger.places(),
            self.catalog_version,
            self._epoch_dropped,
            self.ledger.untracked,
            self.withheld,
            self.tiers_withheld,
        )
        return self._frames(message)

    def withhold(self, scope: Scope, reason: str) -> Frames | None:
        """Stop reporting the blocks that the scope covers.

        Returns:
            The frames that withdraw the blocks from readers, or None if readers hold none.
        """
        if scope <= self._scope:
            return None
        self._scope = scope
        if scope is Scope.EVERYTHING:
            self.withheld = reason
        else:
            self.tiers_withheld = reason
        events = self.ledger.withhold(scope, reason)
        return self._numbered(events, None, self._wall_clock()) if events else None

    def declare(self, catalog: DeclaredCatalog) -> bool:
        """Keep the catalog, and return whether it differs from the last one."""
        if catalog == self.catalog:
            return False
        self.catalog = catalog
        self.catalog_version += 1
        return True

    def catalog_message(self) -> Frames | None:
        """Return the frames of the catalog, or None while there is none."""
        if self.catalog is None:
            return None
        return self._frames(CatalogMessage(self.epoch, self.started_s, self.catalog_version, self.catalog))

    def _begin(self) -> None:
        self.epoch = self._new_epoch()
        self.started_s = self._wall_clock()
        self.next_seq = 0
        self.ledger = Ledger(self._max_ledger_blocks, self._scope)
        # Messages dropped in this epoch, and since the last message that was sent.
        self._epoch_dropped = 0
        self._unannounced = 0

    def _message(self, message: Message) -> Frames | None:
        try:
            events = self.ledger.report(message.make())
        except Exception as error:
            self._counters.failed += 1
            self._counters.dropped += 1
            self.lose(f"events cannot be read: {error!r}", f"make {type(error).__name__}")
            return None
        if not events and message.batch_seq is None and not self._unannounced:
            return None
        return self._numbered(events, message.batch_seq, message.ts)

    def _numbered(self, events: list[ReportEvent], batch_seq: int | None, ts: float) -> Frames | None:
        """Return the frames of the next message, or None if it cannot be encoded.

        The number of a message that cannot be encoded is a gap for readers.
        """
        report = Events(
            self.epoch,
            self.started_s,
            ts,
            events,
            self._dp_rank,
            batch_seq,
            self._unannounced,
        )
        try:
            frames = self._frames(report)
        except Exception as error:
            self._log.warning(f"encode {type(error).__name__}", "message not encoded", error=repr(error))
            self._counters.failed += 1
            self._skip()
            return None
        self.next_seq += 1
        self._unannounced = 0
        return frames

    def _dropped(self, item: EventsDropped) -> None:
        try:
            self.ledger.report(item.events)
        except Exception as error:
            self._counters.failed += 1
            self._counters.dropped += 1
            self.lose(f"events cannot be counted: {error!r}", f"count {type(error).__name__}")
            return
        if not self._unannounced:
            self._log.warning("dropped", "queue full, messages dropped", epoch=self.epoch, seq=self.next_seq)
        self._skip()

    def _lost(self, item: EventsLost) -> None:
        self._counters.dropped += 1
        if item.given_up is None:
            self._counters.failed += 1
        else:
            self._counters.dropped += len(item.given_up) + item.unread
            item.given_up.clear()
        self.lose(item.reason, "queue")

    def _skip(self) -> None:
        self.next_seq += 1
        self._unannounced += 1
        self._epoch_dropped += 1
        self._counters.dropped += 1

    def _frames(self, report: Report) -> Frames:
        return REPORT_TOPIC, self.next_seq.to_bytes(SEQ_BYTES, "big"), self._encoder.encode(report)
