# SPDX-License-Identifier: Apache-2.0
"""A report subscriber over real sockets, with its items so far and the ledger that they add up to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from kvrouter.events.patch.items import (
    HeartbeatSeen,
    Loaded,
    NewEpoch,
    ReportBatch,
    ReportGap,
    ReportItem,
    ReportResume,
)
from kvrouter.events.patch.settings import ReportSettings
from kvrouter.events.patch.subscriber import ReportSubscriber
from kvrouter.events.transport.permits import Permits
from kvrouter.events.transport.progress import CaughtUp
from tests.support.fake_reporter import Context, FakeReporter, Ledger, apply, stored

# The longest wait; only a failing test reaches it.
PATIENCE_S = 15.0
QUICK: dict[str, Any] = {
    "settle_s": 0.02,
    "greeting_pause_s": 0.005,
    "snapshot_pause_s": 0.005,
    "silent_greeting_s": 0.02,
    "reconnect_min_s": 0.01,
    "reconnect_max_s": 0.05,
}


class Stream:
    """A subscriber that runs from entry to exit, with its items so far and the ledger that they add up to."""

    def __init__(self, subscriber: ReportSubscriber) -> None:
        self.subscriber = subscriber
        self.items: list[ReportItem] = []
        self.ledger: Ledger | None = None

    async def __aenter__(self) -> Stream:
        await self.subscriber.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.subscriber.close()

    async def take(self) -> None:
        for item in await self.subscriber.next():
            self.items.append(item)
            match item:
                case Loaded(snapshot):
                    self.ledger = {}
                    for place in snapshot.places:
                        hashes = place.hashes.tolist()
                        extra = [block_hash for block_hash, copies in place.copied for _ in range(copies - 1)]
                        apply(self.ledger, [stored(*hashes, *extra, medium=place.medium)])
                case ReportBatch(_, message):
                    assert self.ledger is not None, "a batch without a state to apply it to"
                    apply(self.ledger, message.events)
                case ReportGap() | NewEpoch():
                    self.ledger = None

    async def until(self, enough: Callable[[list[ReportItem]], object]) -> list[ReportItem]:
        """Wait until `enough` is true for the collected items; then return and forget them."""
        while not enough(self.items):
            await self.take()
        items, self.items = self.items, []
        return items

    async def until_kind(self, kind: type[ReportItem], count: int = 1) -> list[ReportItem]:
        """Return the items up to the `count`th of this kind; if that is a snapshot, up to the `CaughtUp` behind it."""

        def enough(items: list[ReportItem]) -> bool:
            places = [at for at, item in enumerate(items) if isinstance(item, kind)]
            if len(places) < count:
                return False
            return kind is not Loaded or any(isinstance(item, CaughtUp) for item in items[places[count - 1] :])

        return await self.until(enough)

    async def until_proven(self, reporter: FakeReporter) -> list[ReportItem]:
        """Send heartbeats until the subscriber returns one, compare the ledgers, and return the items until then."""
        items: list[ReportItem] = []
        while not any(isinstance(item, HeartbeatSeen) and item.next_seq == reporter.next_seq for item in items):
            reporter.beat()
            try:
                items += await asyncio.wait_for(self.until_kind(HeartbeatSeen), 0.05)
            except TimeoutError:
                continue
        assert self.ledger == reporter.ledger
        return items


def kinds(items: list[ReportItem]) -> list[str]:
    return [type(item).__name__ for item in items]


def only(items: list[ReportItem], *wanted: type[ReportItem]) -> list[str]:
    return [type(item).__name__ for item in items if isinstance(item, wanted)]


MOVED = ["Disconnected", "Connected"]


def seqs(items: list[ReportItem]) -> list[int]:
    return [item.seq for item in items if isinstance(item, ReportBatch)]


def read(
    reporter: FakeReporter | str,
    context: Context,
    *,
    resume: ReportResume | None = None,
    permits: Permits | None = None,
    **options: Any,
) -> Stream:
    endpoint = reporter if isinstance(reporter, str) else reporter.requests_endpoint
    settings = ReportSettings(**(QUICK | options))
    return Stream(ReportSubscriber(endpoint, context=context, resume=resume, settings=settings, permits=permits))


async def eventually(holds: Callable[[], object]) -> None:
    while not holds():
        await asyncio.sleep(0.002)
