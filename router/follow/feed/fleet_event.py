# SPDX-License-Identifier: Apache-2.0
"""One event of the fleet as `GET /events` sends it, and which events a client wants. Pure."""

from __future__ import annotations

from enum import StrEnum

import msgspec
from msgspec import UNSET, UnsetType

from kvrouter.router.index.ingest.net_changes import Hashes


class EventType(StrEnum):
    """stored, removed: blocks at one place, net of what came and went in between. cleared: the engine dropped a whole
    cache; the removed blocks follow. epoch: what was known of a worker is void, and an empty epoch begins. gap: batches
    are missing. resync: the way back to what the engine holds ended. state: a worker's state or credit changed.
    decision: a request was placed; a sample. lost: events that the client missed are not kept any longer."""

    STORED = "stored"
    REMOVED = "removed"
    CLEARED = "cleared"
    EPOCH = "epoch"
    GAP = "gap"
    RESYNC = "resync"
    STATE = "state"
    DECISION = "decision"
    LOST = "lost"


# In place of a state, of a worker that was dropped.
UNREGISTERED = "unregistered"


class FleetEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """Fields that an event does not have are left out. time_s: seconds since 1970. group_idx None: the one group of an
    engine that names none. seq: the worker's last batch that is part of the event. blocks: how many. count: how often
    it happened since the event before (gap, resync, cleared). credited: whether what is known of the worker counts.

    Of a decision: what was predicted where it went and at the best worker, why it went elsewhere, and skipped: how many
    decisions before it were not sent."""

    type: EventType
    time_s: float
    model: str | UnsetType = UNSET
    worker_id: str | UnsetType = UNSET
    dp_rank: int | UnsetType = UNSET
    epoch: str | UnsetType = UNSET
    seq: int | UnsetType = UNSET
    group_idx: int | UnsetType | None = UNSET
    medium: str | UnsetType = UNSET
    owner: str | UnsetType = UNSET
    blocks: int | UnsetType = UNSET
    count: int | UnsetType = UNSET
    state: str | UnsetType = UNSET
    credited: bool | UnsetType = UNSET
    reason: str | UnsetType = UNSET
    selection_id: str | UnsetType = UNSET
    num_tokens: int | UnsetType = UNSET
    predicted_tokens: int | UnsetType = UNSET
    best_tokens: int | UnsetType = UNSET
    lost_by: str | UnsetType = UNSET
    skipped: int | UnsetType = UNSET


class EventFilter(msgspec.Struct, frozen=True):
    """None: all. with_hashes: stored and removed come with their block hashes. Equal filters see the same."""

    models: frozenset[str] | None = None
    workers: frozenset[str] | None = None
    types: frozenset[EventType] | None = None
    with_hashes: bool = False

    def wants(self, event: FleetEvent) -> bool:
        if self.types is not None and event.type not in self.types:
            return False
        if self.models is not None and event.model not in self.models:
            return False
        return self.workers is None or event.worker_id in self.workers


class NumberedEvent(msgspec.Struct, frozen=True, eq=False):
    """An event with its number in the feed. hashes: uint64, of the blocks that it is about."""

    number: int
    event: FleetEvent
    hashes: Hashes | None = None


_encode = msgspec.json.Encoder().encode


def sse(one: NumberedEvent, life: str, *, with_hashes: bool) -> bytes:
    """The event in the format of Server-Sent Events (HTML standard, 9.2). life: of the feed; part of the event's id."""
    data = _json(one.event)
    if with_hashes and one.hashes is not None:
        # As /query_by_hash takes them; in C, as a worker that is loaded has some hundred thousand.
        hexes = one.hashes.astype(">u8").tobytes().hex(",", 8).replace(",", '","')
        data = b'%b,"block_hashes":["%b"]}' % (data[:-1], hexes.encode())
    return b"id: %b\nevent: %b\ndata: %b\n\n" % (event_id(life, one.number), one.event.type.encode(), data)


def _json(event: FleetEvent) -> bytes:
    try:
        return _encode(event)
    except UnicodeEncodeError:
        # Half a surrogate pair, which UTF-8 does not know: text in Redis is anybody's.
        texts = {name: value for name in event.__struct_fields__ if type(value := getattr(event, name)) is str}
        clean = {name: value.encode(errors="replace").decode() for name, value in texts.items()}
        return _encode(msgspec.structs.replace(event, **clean))


def event_id(life: str, number: int) -> bytes:
    return f"{life}-{number}".encode()
