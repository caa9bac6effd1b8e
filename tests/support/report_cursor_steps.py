# SPDX-License-Identifier: Apache-2.0
"""Helpers that feed reports and snapshots to a `ReportCursor`."""

from __future__ import annotations

from collections import Counter
from typing import Any

from kvrouter.events.patch.cursor import ReportCursor
from kvrouter.events.patch.items import ReportBatch, ReportItem
from kvrouter.events.patch.messages import DeclaredCatalog, Events, Heartbeat, Hello, SnapshotPart
from tests.support.fake_reporter import parts, stored

A, B, C = "a" * 16, "b" * 16, "c" * 16
CATALOG = DeclaredCatalog([])
MAX_SEQ = 2**63 - 1


def hello(epoch: str = A, next_seq: int = 0, **fields: Any) -> Hello:
    return Hello(1, epoch, 1.0, next_seq, "tcp://127.0.0.1:1", 1.0, **fields)


def events(epoch: str = A, dropped: int = 0) -> Events:
    return Events(epoch, 1.0, 2.0, [stored(1)], dropped=dropped)


def beat(epoch: str = A, catalog_version: int = 0) -> Heartbeat:
    return Heartbeat(epoch, 1.0, 2.0, 1.0, [], catalog_version)


def snapshot(cursor: ReportCursor, next_seq: int, epoch: str = A) -> list[SnapshotPart]:
    assert cursor.request is not None
    return parts({(0, "GPU"): Counter((5, 6, 6, 7))}, cursor.request, epoch, next_seq)


def load(cursor: ReportCursor, next_seq: int, epoch: str = A) -> None:
    for part in snapshot(cursor, next_seq, epoch):
        cursor.part(part)


def kinds(items: list[ReportItem]) -> list[str]:
    return [type(item).__name__ for item in items]


def seqs(items: list[ReportItem]) -> list[int]:
    return [item.seq for item in items if isinstance(item, ReportBatch)]


def live(cursor: ReportCursor, *seqs: int, epoch: str = A) -> None:
    for seq in seqs:
        cursor.events(seq, events(epoch), 10)


def greeted(**options: Any) -> ReportCursor:
    cursor = ReportCursor(**options)
    cursor.hello(hello())
    cursor.take()
    return cursor


def requested(**options: Any) -> ReportCursor:
    """Return a cursor that has sent its first request for a snapshot."""
    cursor = greeted(**options)
    cursor.on_request_sent()
    return cursor


def reload(cursor: ReportCursor, next_seq: int, epoch: str = A) -> None:
    """Send the request that the cursor wants to be sent, and answer it with a snapshot."""
    cursor.on_request_sent()
    load(cursor, next_seq, epoch)


def in_order(next_seq: int = 10, **options: Any) -> ReportCursor:
    cursor = requested(**options)
    load(cursor, next_seq)
    assert kinds(cursor.take()) == ["Loaded", "CaughtUp"]
    return cursor
