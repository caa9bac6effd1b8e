# SPDX-License-Identifier: Apache-2.0
"""An event of the fleet as `GET /events` sends it, and a client's choice of events. Pure."""

from __future__ import annotations

from enum import StrEnum

import msgspec
from msgspec import UNSET, UnsetType

from kvrouter.router.index.ingest.net_changes import Hashes


class EventType(StrEnum):
    """The type of an event, as clients see it."""

    # Blocks became resident at one place; a block that came and went in between is not reported.
    STORED = "stored"
    # Blocks stopped being resident at one place; net, as for STORED.
    REMOVED = "removed"
    # The engine dropped a whole cache; a REMOVED event with the blocks follows.
    CLEARED = "cleared"
    # The index of a worker is void, and an empty epoch begins.
    EPOCH = "epoch"
    # Batches of a worker's event stream are missing.
    GAP = "gap"
    # The index agrees with the engine again: by a replay, a snapshot, or because everything is learned again.
    RESYNC = "resync"
    # A worker's state or credit changed.
    STATE = "state"
    # A request was placed. Only a sample of the decisions is sent.
    DECISION = "decision"
    # Events that the client missed are no longer kept.
    LOST = "lost"


# Stands in place of a state for a worker that was dropped.
UNREGISTERED = "unregistered"


class FleetEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """One event. A field that the event does not have is UNSET and left out of the JSON."""

    type: EventType
    # Seconds since 1970.
    time_s: float
    model: str | UnsetType = UNSET
    worker_id: str | UnsetType = UNSET
    dp_rank: int | UnsetType = UNSET
    epoch: str | UnsetType = UNSET
    # The worker's last batch that is part of the event.
    seq: int | UnsetType = UNSET
    # None is the one group of an engine that names no groups.
    group_idx: int | UnsetType | None = UNSET
    medium: str | UnsetType = UNSET
    # The owner of a secondary tier.
    owner: str | UnsetType = UNSET
    # The number of blocks.
    blocks: int | UnsetType = UNSET
    # How often it happened since the event before (gap, resync, cleared); how many events are gone (lost).
    count: int | UnsetType = UNSET
    state: str | UnsetType = UNSET
    # Whether predictions count the worker's blocks.
    credited: bool | UnsetType = UNSET
    reason: str | UnsetType = UNSET
    # The fields below are those of a decision.
    selection_id: str | UnsetType = UNSET
    num_tokens: int | UnsetType = UNSET
    # The predicted hit at the chosen worker.
    predicted_tokens: int | UnsetType = UNSET
    # The longest predicted hit of all workers.
    best_tokens: int | UnsetType = UNSET
    # Why the worker with the longest hit was not chosen.
    lost_by: str | UnsetType = UNSET
    # How many decisions before this one were not sent.
    skipped: int | UnsetType = UNSET


class EventFilter(msgspec.Struct, frozen=True):
    """A client's choice of events. Equal filters select the same events with the same bytes."""

    # None selects all models; likewise for the next two fields.
    models: frozenset[str] | None = None
    workers: frozenset[str] | None = None
    types: frozenset[EventType] | None = None
    # Whether stored and removed events come with their block hashes.
    with_hashes: bool = False

    def wants(self, event: FleetEvent) -> bool:
        """Return whether the filter admits the event."""
        if self.types is not None and event.type not in self.types:
            return False
        if self.models is not None and event.model not in self.models:
            return False
        return self.workers is None or event.worker_id in self.workers


class NumberedEvent(msgspec.Struct, frozen=True, eq=False):
    """An event with its number in the feed."""

    number: int
    event: FleetEvent
    # The uint64 block hashes that the event is about; None if it has none.
    hashes: Hashes | None = None


_encode = msgspec.json.Encoder().encode


def sse(one: NumberedEvent, life: str, *, with_hashes: bool) -> bytes:
    """Return the event in the format of Server-Sent Events (HTML standard, 9.2).

    Args:
        one: The event.
        life: The life of the feed, which is part of the event's id.
        with_hashes: Whether to include the block hashes.
    """
    data = _json(one.event)
    if with_hashes and one.hashes is not None:
        # Hex, as /query_by_hash takes block hashes. `bytes.hex` runs in C, which matters because a worker that is
        # loaded has some hundred thousand.
        hexes = one.hashes.astype(">u8").tobytes().hex(",", 8).replace(",", '","')
        data = b'%b,"block_hashes":["%b"]}' % (data[:-1], hexes.encode())
    return b"id: %b\nevent: %b\ndata: %b\n\n" % (event_id(life, one.number), one.event.type.encode(), data)


def _json(event: FleetEvent) -> bytes:
    try:
        return _encode(event)
    except UnicodeEncodeError:
        # Any program may have written text to Redis, and half a surrogate pair has no form in UTF-8.
        texts = {name: value for name in event.__struct_fields__ if type(value := getattr(event, name)) is str}
        clean = {name: value.encode(errors="replace").decode() for name, value in texts.items()}
        return _encode(msgspec.structs.replace(event, **clean))


def event_id(life: str, number: int) -> bytes:
    """Return the id of an event, which a client sends back as Last-Event-ID."""
    return f"{life}-{number}".encode()
