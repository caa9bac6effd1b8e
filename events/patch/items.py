# SPDX-License-Identifier: Apache-2.0
"""What a report subscriber hands out: residency in order, what the publisher says of itself, and what is missing.
Values only.

For the consumer: it knows the publisher's ledger from `Loaded` on (or from where it resumed) and as long as every
`ReportBatch` is applied. `ReportGap` says that it no longer does, `NewEpoch` that all it knew is void; no batch follows
either before a `Loaded`.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from kvrouter.events.patch.messages import DeclaredCatalog, Events, Heartbeat, Hello, PlaceSummary
from kvrouter.events.vllm.messages import HashArray
from kvrouter.events.vllm.stream_items import Connected, Disconnected, Malformed


class ReportResume(msgspec.Struct, frozen=True):
    """What a consumer has safely kept: the state before `events` message `next_seq` of this life."""

    epoch: str
    next_seq: int


class SnapshotPlace(msgspec.Struct, frozen=True, eq=False):
    """All blocks of one place. Compared by identity: an array has no single truth value."""

    group_idx: int | None
    medium: str
    ownership: str | None
    # (n,) native uint64, distinct.
    hashes: HashArray
    # Of these, those with two copies or more, and how many.
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
    """The requests socket answered; said again with every answer."""

    hello: Hello


class ReportBatch(msgspec.Struct, frozen=True):
    """One `events` message: in order, exactly once, the next seq after the last one or after what was loaded."""

    seq: int
    message: Events
    # As on the wire.
    size_bytes: int = 0


class ReportGap(msgspec.Struct, frozen=True):
    """Messages first_seq up to next_seq - 1 cannot be had; a snapshot is being asked for. Equal: what was kept is
    contradicted.

    dropped: how many of them the publisher itself says that it dropped.
    """

    first_seq: int
    next_seq: int
    dropped: int
    reason: str


class NewEpoch(msgspec.Struct, frozen=True):
    """Another life of the publisher: what was known is void; a snapshot is being asked for. Not said of the first life
    seen."""

    epoch: str
    started_s: float
    reason: str


class Expired(msgspec.Struct, frozen=True):
    """What was handed out may be of a life that has ended; what follows was asked for after that was known: first the
    catalog and a snapshot."""


class Loaded(msgspec.Struct, frozen=True):
    """This, and nothing else, is resident; batches go on at its `next_seq`."""

    snapshot: Snapshot


class HeartbeatSeen(msgspec.Struct, frozen=True):
    """A heartbeat that speaks of exactly what was handed out: its sums must be the consumer's."""

    next_seq: int
    message: Heartbeat


class Declared(msgspec.Struct, frozen=True):
    """The engine's catalog, once a version of a life."""

    version: int
    catalog: DeclaredCatalog


class SnapshotFailed(msgspec.Struct, frozen=True):
    """No snapshot this time; another is asked for after a pause."""

    reason: str


class PatchSilent(msgspec.Struct, frozen=True):
    """Nothing of the publisher's life was heard for this long, though a heartbeat was due several times."""

    silent_s: float


class PatchHeard(msgspec.Struct, frozen=True):
    """After `PatchSilent`: it speaks again."""


ReportItem: TypeAlias = (
    Connected
    | Disconnected
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
)
