# SPDX-License-Identifier: Apache-2.0
"""The items that a report subscriber yields: residency in order, facts about the publisher, and announcements of what
is missing. Values only.

A consumer knows the publisher's ledger from `Loaded` (or its resume point) on, as long as it applies every
`ReportBatch`. `ReportGap` ends that, and `NewEpoch` voids all it knew; after either, no batch follows before a
`Loaded`. After `Loaded` come the batches that arrived during the snapshot, and then `CaughtUp`.
`FellBehind` comes before each later `Loaded`.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from kvrouter.events.patch.messages import DeclaredCatalog, Events, Heartbeat, Hello, PlaceSummary
from kvrouter.events.transport.progress import CaughtUp, FellBehind
from kvrouter.events.vllm.messages import HashArray
from kvrouter.events.vllm.stream_items import Connected, Disconnected, Flooded, Malformed


class ReportResume(msgspec.Struct, frozen=True):
    """What a consumer has stored: the state before `events` message `next_seq` of this life."""

    epoch: str
    next_seq: int


class SnapshotPlace(msgspec.Struct, frozen=True, eq=False):
    """All blocks of one place. Compared by identity: an array has no single truth value."""

    group_idx: int | None
    medium: str
    ownership: str | None
    # (n,) native uint64, distinct.
    hashes: HashArray
    # The hashes among them that have two copies or more, and the number of copies.
    copied: list[tuple[int, int]]
    locality: str | None = None


class Snapshot(msgspec.Struct, frozen=True, eq=False):
    """All that is resident before `events` message `next_seq`; its places add up to `summary`."""

    epoch: str
    started_s: float
    next_seq: int
    places: list[SnapshotPlace]
    summary: list[PlaceSummary]

    @property
    def size_bytes(self) -> int:
        """Bytes of its hashes."""
        return sum(place.hashes.nbytes for place in self.places)


class Greeted(msgspec.Struct, frozen=True):
    """The requests socket answered; repeated with every answer."""

    hello: Hello


class ReportBatch(msgspec.Struct, frozen=True):
    """One `events` message: in order and exactly once; it follows the last batch or the loaded snapshot."""

    seq: int
    message: Events
    # As on the wire.
    size_bytes: int = 0


class ReportGap(msgspec.Struct, frozen=True):
    """Messages first_seq up to next_seq - 1 are lost; a snapshot is requested. Equal: the resume point is
    contradicted.

    dropped: how many of them the publisher reports as dropped.
    """

    first_seq: int
    next_seq: int
    dropped: int
    reason: str


class NewEpoch(msgspec.Struct, frozen=True):
    """Another life of the publisher: everything known is void; a snapshot is requested. The first life is not
    announced."""

    epoch: str
    started_s: float
    reason: str


class Expired(msgspec.Struct, frozen=True):
    """Earlier items may belong to a life that has ended; everything after this item was requested since, catalog and
    snapshot first."""


class Loaded(msgspec.Struct, frozen=True):
    """The exact residency before `next_seq`. The batches held meanwhile follow, and then `CaughtUp`."""

    snapshot: Snapshot


class HeartbeatSeen(msgspec.Struct, frozen=True):
    """A heartbeat for exactly the batches yielded so far: its sums must equal the consumer's."""

    next_seq: int
    message: Heartbeat


class Declared(msgspec.Struct, frozen=True):
    """The engine's catalog, once for each version in a life."""

    version: int
    catalog: DeclaredCatalog


class SnapshotFailed(msgspec.Struct, frozen=True):
    """A snapshot failed; another is requested after a pause."""

    reason: str


class PatchSilent(msgspec.Struct, frozen=True):
    """No message arrived for this long, though several heartbeats were due."""

    silent_s: float


class PatchHeard(msgspec.Struct, frozen=True):
    """Messages arrive again after `PatchSilent`."""


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
