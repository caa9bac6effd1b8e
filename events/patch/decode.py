# SPDX-License-Identifier: Apache-2.0
"""Decoding of payloads from the engine patch's sockets to checked messages. Pure; never raises, whatever the bytes.

The checks cover the properties that every reader relies on: all hashes are complete (8 bytes each), the number of the
next message is a valid seq, and an epoch is short. The readers themselves check whether the counts and sums add up.
"""

from __future__ import annotations

import msgspec

from kvrouter.events.patch.messages import (
    CatalogMessage,
    Events,
    Heartbeat,
    Hello,
    PlaceSummary,
    Refused,
    Reply,
    Report,
    ReportCleared,
    ReportRemoved,
    ReportStored,
    SnapshotPart,
)
from kvrouter.events.vllm.messages import DECODE_ERRORS, MAX_ERROR_CHARS, MAX_NAME_CHARS
from kvrouter.events.vllm.wire import MAX_SEQ

# A greeting or a catalog is kept as long as the worker. This fits some ten groups, and 1,024 LoRAs with long paths.
MAX_CATALOG_BYTES = 4 << 20

# Epochs are remembered, so their length is limited; ours have 16 characters.
MAX_EPOCH_CHARS = 64

_REPORT_TYPES = frozenset(("events", "heartbeat", "catalog"))
_REPLY_TYPES = frozenset(("hello", "snapshot", "refused"))


class Unreadable(msgspec.Struct, frozen=True):
    """A payload that is no message, or one that no reader can use."""

    reason: str
    # Whether the payload calls itself `events`, so that it has used up its seq.
    uses_seq: bool = False
    # None if the epoch is not readable either.
    epoch: str | None = None


class _Head(msgspec.Struct):
    type: str
    # Any type, as a message that calls itself `events` has used up its seq even if its epoch is damaged.
    epoch: object = None


_reports: msgspec.msgpack.Decoder[Events | Heartbeat | CatalogMessage] = msgspec.msgpack.Decoder(Report)
_replies: msgspec.msgpack.Decoder[Hello | SnapshotPart | Refused] = msgspec.msgpack.Decoder(Reply)
_head = msgspec.msgpack.Decoder(_Head)


def read_report(payload: bytes) -> Events | Heartbeat | CatalogMessage | Unreadable | None:
    """Return a message of the PUB socket; None for one of a type that this version does not have."""
    try:
        message = _reports.decode(payload)
    except DECODE_ERRORS as error:
        return _unreadable(error, payload, _REPORT_TYPES)
    if not 0 < len(message.epoch) <= MAX_EPOCH_CHARS:
        reason = f"an epoch of {len(message.epoch)} characters: expected 1 to {MAX_EPOCH_CHARS}"
        return Unreadable(reason, isinstance(message, Events))
    if isinstance(message, Events):
        for event in message.events:
            if not isinstance(event, ReportCleared) and len(event.hashes) % 8:
                reason = f"an event with {len(event.hashes)} bytes of hashes: expected a multiple of 8"
                return Unreadable(reason, True, message.epoch)
            if (problem := _long_name(event)) is not None:
                return Unreadable(problem, True, message.epoch)
    elif isinstance(message, Heartbeat):
        for place in message.places:
            if (problem := _long_name(place)) is not None:
                return Unreadable(problem)
    elif len(payload) > MAX_CATALOG_BYTES:
        return Unreadable(f"a catalog of {len(payload)} bytes: expected at most {MAX_CATALOG_BYTES}")
    return message


def read_answer(frames: list[bytes]) -> Hello | SnapshotPart | Refused | Unreadable | None:
    """Return an answer of the ROUTER socket; None for one of a type that this version does not have."""
    if len(frames) != 2 or frames[0]:
        return Unreadable(f"{len(frames)} frames: expected an empty one and the payload")
    payload = frames[1]
    try:
        reply = _replies.decode(payload)
    except DECODE_ERRORS as error:
        return _unreadable(error, payload, _REPLY_TYPES)
    if not isinstance(reply, Refused):
        if not 0 < len(reply.epoch) <= MAX_EPOCH_CHARS:
            return Unreadable(f"an epoch of {len(reply.epoch)} characters: expected 1 to {MAX_EPOCH_CHARS}")
        if not 0 <= reply.next_seq <= MAX_SEQ:
            return Unreadable(f"an answer whose next seq is {reply.next_seq}: expected 0 to {MAX_SEQ}")
    if isinstance(reply, Hello) and len(payload) > MAX_CATALOG_BYTES:
        return Unreadable(f"a greeting of {len(payload)} bytes: expected at most {MAX_CATALOG_BYTES}")
    return reply


def _long_name(item: ReportStored | ReportRemoved | ReportCleared | PlaceSummary) -> str | None:
    """Return the problem if a name is too long to be kept, else None."""
    names = (item.medium, item.ownership, item.kind if isinstance(item, ReportStored) else None)
    longest = max(len(name) for name in names if name is not None)
    return f"a name of {longest} characters: expected at most {MAX_NAME_CHARS}" if longest > MAX_NAME_CHARS else None


def _unreadable(error: BaseException, payload: bytes, known_types: frozenset[str]) -> Unreadable | None:
    """Return why the payload cannot be read; None if its type is unknown."""
    reason = f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS]
    try:
        head = _head.decode(payload)
    except DECODE_ERRORS:
        return Unreadable(reason)
    if head.type not in known_types:
        return None
    epoch = head.epoch if isinstance(head.epoch, str) and len(head.epoch) <= MAX_EPOCH_CHARS else None
    return Unreadable(reason, head.type == "events", epoch)
