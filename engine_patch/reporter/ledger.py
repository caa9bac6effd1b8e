# SPDX-License-Identifier: Apache-2.0
"""The blocks that the publisher has reported as resident: the copies of every block hash by place.

It is kept beside the engine for snapshots and for the sums in heartbeats. It equals the state of a reader that applied
every message: a medium that outgrows the bound is cleared for readers too, and not reported until the engine clears it.
No I/O, clock or lock; one thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import IntEnum
from typing import TypeAlias

import msgspec
import numpy as np

from kvrouter.engine_patch.reporter.hash_counts import CountArray, HashCounts
from kvrouter.events.patch.messages import (
    PlaceSummary,
    ReportCleared,
    ReportEvent,
    ReportRemoved,
    ReportStored,
    pack_hashes,
    unpack_hashes,
)
from kvrouter.events.vllm.messages import GPU, HashArray

# (group_idx, medium, ownership, locality)
Place: TypeAlias = tuple[int | None, str, str | None, str | None]

# The `reason` in the clear that is sent to readers when a medium outgrew the ledger.
UNTRACKED = "untracked"


class Scope(IntEnum):
    """The media that a publisher has stopped reporting, for good; each member includes the ones before it."""

    NOTHING = 0
    # All media except the GPU.
    TIERS = 1
    EVERYTHING = 2

    def covers(self, medium: str) -> bool:
        """Return whether the blocks of a medium are no longer reported."""
        return self is Scope.EVERYTHING or (self is Scope.TIERS and medium != GPU)


class FrozenPlace(msgspec.Struct, frozen=True, eq=False):
    """One place at one moment."""

    summary: PlaceSummary
    # (n,) all hashes, sorted.
    hashes: HashArray
    # The hashes with two copies or more, sorted.
    copied: HashArray
    # The copies of each hash of `copied`.
    counts: CountArray

    def slices(self, size: int) -> Iterator[tuple[bytes, list[tuple[int, int]]]]:
        """Yield at most `size` hashes at a time, packed, with the copies of the hashes that have several."""
        for start in range(0, len(self.hashes), size):
            hashes = self.hashes[start : start + size]
            first, end = np.searchsorted(self.copied, hashes[0]), np.searchsorted(self.copied, hashes[-1], "right")
            copied = zip(self.copied[first:end].tolist(), self.counts[first:end].tolist(), strict=True)
            yield pack_hashes(hashes), list(copied)


class FrozenLedger(msgspec.Struct, frozen=True, eq=False):
    """The ledger at one moment, which shares the ledger's arrays and does not change with it."""

    places: list[FrozenPlace]

    def summaries(self) -> list[PlaceSummary]:
        """Return the sums of every place."""
        return [place.summary for place in self.places]


class Ledger:
    """Copies of every resident block hash, by place; bounded in distinct (place, hash) pairs."""

    def __init__(self, max_blocks: int, withheld: Scope = Scope.NOTHING) -> None:
        """Start empty.

        Args:
            max_blocks: Distinct (place, hash) pairs that may be counted.
            withheld: The scope whose blocks are neither counted nor reported.
        """
        self.max_blocks = max_blocks
        self._withheld = withheld
        # Distinct hashes over all places.
        self.blocks = 0
        # Removals of hashes that were not resident. After a new epoch these are removals of blocks that were stored
        # before it.
        self.unknown_removals = 0
        self._places: dict[Place, HashCounts] = {}
        self._untracked: set[str] = set()

    @property
    def untracked(self) -> list[str]:
        """Media that outgrew the bound and were not cleared since, sorted."""
        return sorted(self._untracked)

    def apply(self, event: ReportEvent) -> None:
        """Count the event. Raise ValueError if its bytes are not a whole number of hashes."""
        if isinstance(event, ReportCleared):
            self._clear(event)
        elif event.medium not in self._untracked:
            self._change(event)
            while self.blocks > self.max_blocks:
                self._forget_largest()

    def report(self, events: Iterable[ReportEvent]) -> list[ReportEvent]:
        """Apply the events, and return those to send.

        A reader that applies the returned events has the same blocks as the ledger: events of media that are not
        reported are left out, and a medium that outgrows the bound is cleared.
        """
        reported: list[ReportEvent] = []
        for event in events:
            if self._withheld.covers(event.medium):
                continue
            before = frozenset(self._untracked)
            self.apply(event)
            if isinstance(event, ReportCleared) or event.medium not in before:
                reported.append(event)
            if len(self._untracked) > len(before):
                reported += [ReportCleared(medium, UNTRACKED) for medium in self.untracked if medium not in before]
        return reported

    def withhold(self, scope: Scope, reason: str) -> list[ReportEvent]:
        """Forget and ignore from now on all blocks that the scope covers; return the events that withdraw them."""
        self._withheld = max(self._withheld, scope)
        media = sorted({place[1] for place in self._places if scope.covers(place[1])})
        self._drop(place for place in self._places if scope.covers(place[1]))
        return [ReportCleared(medium, reason) for medium in media]

    def places(self) -> list[PlaceSummary]:
        """Return the number of blocks and copies, and the digest, of every place that holds at least one block.

        A place is a KV cache group on a medium.
        """
        return [_summary(place, counts) for place, counts in self._places.items()]

    def freeze(self) -> FrozenLedger:
        """Return a copy of the present state."""
        return FrozenLedger(
            [FrozenPlace(_summary(place, counts), *counts.freeze()) for place, counts in self._places.items()]
        )

    def _change(self, event: ReportStored | ReportRemoved) -> None:
        hashes = unpack_hashes(event.hashes)
        place = (event.group_idx, event.medium, event.ownership, event.locality)
        counts = self._places.get(place)
        if isinstance(event, ReportRemoved):
            if counts is None:
                self.unknown_removals += len(hashes)
                return
            blocks_before = counts.blocks
            self.unknown_removals += counts.remove(hashes)
            if not counts.blocks:
                del self._places[place]
        elif len(hashes):
            if counts is None:
                counts = self._places[place] = HashCounts()
            blocks_before = counts.blocks
            counts.add(hashes)
        else:
            return
        self.blocks += counts.blocks - blocks_before

    def _clear(self, event: ReportCleared) -> None:
        if event.ownership is None:
            self._untracked.discard(event.medium)
        self._drop(
            place
            for place in self._places
            if place[1] == event.medium and (event.ownership is None or place[2] == event.ownership)
        )

    def _forget_largest(self) -> None:
        # The largest medium goes and not the one that grew last: a small GPU tier must not pay for a disk that grows
        # without end.
        sizes: dict[str, int] = {}
        for (_, medium, _, _), counts in self._places.items():
            sizes[medium] = sizes.get(medium, 0) + counts.blocks
        largest = max(sizes, key=lambda medium: sizes[medium])
        self._untracked.add(largest)
        self._drop(place for place in self._places if place[1] == largest)

    def _drop(self, places: Iterable[Place]) -> None:
        for place in list(places):
            self.blocks -= self._places.pop(place).blocks


def _summary(place: Place, counts: HashCounts) -> PlaceSummary:
    group_idx, medium, ownership, locality = place
    return PlaceSummary(group_idx, medium, counts.blocks, counts.copies, counts.digest, ownership, locality)
