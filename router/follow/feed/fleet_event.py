# SPDX-License-Identifier: Apache-2.0
"""An event of the fleet as `GET /events` sends it, and a client's choice of events. Pure."""

from __future__ import annotations

import msgspec

from kvrouter.contract.fleet_event import EventType, FleetEvent
from kvrouter.router.index.ingest.net_changes import Hashes

# Stands in place of a state for a worker that was dropped.
UNREGISTERED = "unregistered"


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


def sse(numbered: NumberedEvent, life: str, *, with_hashes: bool) -> bytes:
    """Return the event in the format of Server-Sent Events (HTML standard, 9.2).

    Args:
        numbered: The event.
        life: The life of the feed, which is part of the event's id.
        with_hashes: Whether to include the block hashes.
    """
    data = _json(numbered.event)
    if with_hashes and numbered.hashes is not None:
        # Hex, as /query_by_hash takes block hashes. `bytes.hex` runs in C, which matters because a worker that is
        # loaded has some hundred thousand.
        hexes = numbered.hashes.astype(">u8").tobytes().hex(",", 8).replace(",", '","')
        data = b'%b,"block_hashes":["%b"]}' % (data[:-1], hexes.encode())
    return b"id: %b\nevent: %b\ndata: %b\n\n" % (event_id(life, numbered.number), numbered.event.type.encode(), data)


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
