# SPDX-License-Identifier: Apache-2.0
"""Helpers that feed batches and replays to a `Cursor` and build the items that it should return."""

from __future__ import annotations

from typing import Any

from kvrouter.events.vllm.batch_cursor import Cursor
from kvrouter.events.vllm.stream_items import Batch, ResumePoint, StreamItem, fingerprint


def body(seq: int, life: str = "a") -> bytes:
    return f"{life}{seq}".encode()


def batch(seq: int, life: str = "a", *, replayed: bool = False) -> Batch:
    return Batch(seq, body(seq, life), fingerprint(body(seq, life)), replayed)


def again(*seqs: int, life: str = "a") -> list[Batch]:
    return [batch(seq, life, replayed=True) for seq in seqs]


def point(seq: int, life: str = "a") -> ResumePoint:
    return ResumePoint(seq, fingerprint(body(seq, life)))


def live(cursor: Cursor, *seqs: int, life: str = "a") -> list[StreamItem]:
    for seq in seqs:
        cursor.live(seq, body(seq, life))
    return cursor.take()


def replay(cursor: Cursor, *seqs: int, life: str = "a", end: bool = True) -> list[StreamItem]:
    for seq in seqs:
        cursor.replayed(seq, body(seq, life))
    if end:
        cursor.replay_ended()
    return cursor.take()


def asked(cursor: Cursor) -> int | None:
    return None if cursor.request is None else cursor.request.start


def joined(**options: Any) -> Cursor:
    """Return a connected cursor with a replay endpoint."""
    cursor = Cursor(replay=True, **options)
    cursor.connected()
    return cursor


def reconnect(cursor: Cursor) -> None:
    cursor.disconnected()
    cursor.connected()


def following(*seqs: int, **options: Any) -> Cursor:
    """Return a connected cursor with a replay endpoint that has already handed out the batches `seqs`."""
    cursor = joined(**options)
    replay(cursor, *seqs)
    assert cursor.request is None
    return cursor
