# SPDX-License-Identifier: Apache-2.0
"""The items that a report subscriber yields: residency in order, facts about the publisher, and losses. Values only.

A consumer knows the publisher's ledger from `Loaded` (or its resume point) on, as long as it applies every
`ReportBatch`. `ReportGap` ends that, and `NewEpoch` voids all that the consumer knew; after either, no batch follows
before a `Loaded`. After `Loaded` come the batches that arrived during the snapshot, and then `CaughtUp`. `FellBehind`
comes before each later `Loaded`.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from kvrouter.events.patch.messages import DeclaredCatalog, Events, Heartbeat, Hello, PlaceSummary
from kvrouter.events.transport.progress import CaughtUp, FellBehind
from kvrouter.events.vllm.messages import HashArray
from kvrouter.events.vllm.stream_items import Connected, Disconnected, Flooded, Malformed


class ReportResume(msgspec.Struct, frozen=True):
    """The state that a consumer has stored: that before `events` message `next_seq` of this life."""

    epoch: str
    next_seq: int


class SnapshotPlace(msgspec.Struct, frozen=True, eq=False):
    """All blocks of one place. Places are compared by identity, as an array has no single truth value."""

    group_idx: int | None
    medium: str
    ownership: str | None
    # (n,) native uint64, distinct.
    hashes: HashArray
    # The hashes among them that have two copies or more, and the number of copies.
    copied: list[tuple[int, int]]
    locality: str | None = None


class Snapshot(msgspec.Struct, frozen=True, eq=False):
    """All blocks that are resident before `events` message `next_seq`. The places add up to `summary`."""

    epoch: str
    started_s: float
    next_seq: int
    places: list[SnapshotPlace]
    summary: list[PlaceSummary]

    @property
    def size_bytes(self) -> int:
        """Bytes of the hashes."""
        return sum(place.hashes.nbytes for place in self.places)


class Greeted(msgspec.Struct, frozen=True):
    """An answer of the requests socket. The item comes with every answer."""

    hello: Hello


class ReportBatch(msgspec.Struct, frozen=True):
    """One `events` message, in order and exactly once. It follows the last batch or the loaded snapshot."""

    seq: int
    message: Events
    # The size on the wire.
    size_bytes: int = 0


class ReportGap(msgspec.Struct, frozen=True):
    """The loss of messages first_seq up to next_seq - 1. A snapshot is requested.

    If first_seq == next_seq, the publisher contradicts the resume point.
    """

    first_seq: int
    next_seq: int
    # How many of the messages the publisher reports as dropped.
    dropped: int
    reason: str


class NewEpoch(msgspec.Struct, frozen=True):
    """The start of another life of the publisher, which voids everything known. A snapshot is requested.

    The first life is not announced.
    """

    epoch: str
    started_s: float
    reason: str


class Expired(msgspec.Struct, frozen=True):
    """A report that the known life may have ended, to which earlier items belong.

    Everything after this item was requested since, catalog and snapshot first.
    """


class Loaded(msgspec.Struct, frozen=True):
    """The exact residency before `next_seq`, from a snapshot. The held batches follow, and then `CaughtUp`."""

    snapshot: Snapshot


class HeartbeatSeen(msgspec.Struct, frozen=True):
    """A heartbeat for exactly the batches yielded so far, so its sums must equal the consumer's."""

    next_seq: int
    message: Heartbeat


class Declared(msgspec.Struct, frozen=True):
    """The engine's catalog. The item comes once for each version in a life."""

    version: int
    catalog: DeclaredCatalog


class SnapshotFailed(msgspec.Struct, frozen=True):
    """The failure of a snapshot. Another one is requested after a pause."""

    reason: str


class PatchSilent(msgspec.Struct, frozen=True):
    """A silence of the publisher in which several heartbeats were due."""

    silent_s: float


class PatchHeard(msgspec.Struct, frozen=True):
    """The end of a silence: messages arrive again after `PatchSilent`."""


ReportItem: TypeAlias = (
    Connected
    | Disconnected
    | FellBehind
    | CaughtUp
    | Greeted
    | Declared
    | ReportBatch
    | ReportGap
    | NewEpoch
    | Expired
    | Loaded
    | HeartbeatSeen
    | SnapshotFailed
    | PatchSilent
    | PatchHeard
    | Malformed
    | Flooded
)
