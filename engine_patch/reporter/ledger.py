# SPDX-License-Identifier: Apache-2.0
"""What the publisher has reported as resident: the copies of every block hash by place.

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

# `reason` of the clear for readers when a medium outgrew the ledger.
UNTRACKED = "untracked"


class Scope(IntEnum):
    """The media that a publisher has stopped reporting, for good; each member includes the ones before it."""

    NOTHING = 0
    # All media except the GPU.
    TIERS = 1
    EVERYTHING = 2

    def covers(self, medium: str) -> bool:
        return self is Scope.EVERYTHING or (self is Scope.TIERS and medium != GPU)


class FrozenPlace(msgspec.Struct, frozen=True, eq=False):
    """One place at one moment. hashes: (n,) sorted; copied: those with two copies or more, sorted, and how many."""

    summary: PlaceSummary
    hashes: HashArray
    copied: HashArray
    counts: CountArray

    def slices(self, size: int) -> Iterator[tuple[bytes, list[tuple[int, int]]]]:
        """At most `size` hashes at a time, packed, with the copies of those that have several."""
        for start in range(0, len(self.hashes), size):
            part = self.hashes[start : start + size]
            first, end = np.searchsorted(self.copied, part[0]), np.searchsorted(self.copied, part[-1], "right")
            copied = zip(self.copied[first:end].tolist(), self.counts[first:end].tolist(), strict=True)
            yield pack_hashes(part), list(copied)


class FrozenLedger(msgspec.Struct, frozen=True, eq=False):
    """The ledger at one moment; shares its arrays, and no later change is seen in it."""

    places: list[FrozenPlace]

    def summaries(self) -> list[PlaceSummary]:
        """What the places add up to."""
        return [place.summary for place in self.places]


class Ledger:
    """Copies of every resident block hash, by place; bounded in distinct (place, hash) pairs. withheld: the scope whose
    blocks are neither counted nor reported."""

    def __init__(self, max_blocks: int, withheld: Scope = Scope.NOTHING) -> None:
        self.max_blocks = max_blocks
        self._withheld = withheld
        # Distinct hashes over all places.
        self.blocks = 0
        # Removals of hashes that were not resident: after a new epoch, of blocks that were stored before it.
        self.unknown_removals = 0
        self._places: dict[Place, HashCounts] = {}
        self._untracked: set[str] = set()

    @property
    def untracked(self) -> list[str]:
        """Media that outgrew the bound and were not cleared since, sorted."""
        return sorted(self._untracked)

    def apply(self, event: ReportEvent) -> None:
        """Counts the event. Raises ValueError when its hashes are no whole number of hashes."""
        if isinstance(event, ReportCleared):
            self._clear(event)
        elif event.medium not in self._untracked:
            self._change(event)
            while self.blocks > self.max_blocks:
                self._forget_largest()

    def report(self, events: Iterable[ReportEvent]) -> list[ReportEvent]:
        """Applies the events. Returns those to send, so that readers know exactly what the ledger does."""
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
        """Forget all blocks that the scope covers, ignore them from now on, and return the messages that withdraw
        them."""
        self._withheld = max(self._withheld, scope)
        media = sorted({place[1] for place in self._places if scope.covers(place[1])})
        self._drop(place for place in self._places if scope.covers(place[1]))
        return [ReportCleared(medium, reason) for medium in media]

    def places(self) -> list[PlaceSummary]:
        """Every place with at least one block."""
        return [_summary(place, held) for place, held in self._places.items()]

    def freeze(self) -> FrozenLedger:
        """All of it as it is now."""
        return FrozenLedger(
            [FrozenPlace(_summary(place, held), *held.freeze()) for place, held in self._places.items()]
        )

    def _change(self, event: ReportStored | ReportRemoved) -> None:
        hashes = unpack_hashes(event.hashes)
        place = (event.group_idx, event.medium, event.ownership, event.locality)
        held = self._places.get(place)
        if isinstance(event, ReportRemoved):
            if held is None:
                self.unknown_removals += len(hashes)
                return
            before = held.blocks
            self.unknown_removals += held.remove(hashes)
            if not held.blocks:
                del self._places[place]
        elif len(hashes):
            if held is None:
                held = self._places[place] = HashCounts()
            before = held.blocks
            held.add(hashes)
        else:
            return
        self.blocks += held.blocks - before

    def _clear(self, event: ReportCleared) -> None:
        if event.ownership is None:
            self._untracked.discard(event.medium)
        self._drop(
            place
            for place in self._places
            if place[1] == event.medium and (event.ownership is None or place[2] == event.ownership)
        )

    def _forget_largest(self) -> None:
        # Not the one that grew last: a small GPU tier must not pay for a disk that grows without end.
        sizes: dict[str, int] = {}
        for (_, medium, _, _), held in self._places.items():
            sizes[medium] = sizes.get(medium, 0) + held.blocks
        largest = max(sizes, key=lambda medium: sizes[medium])
        self._untracked.add(largest)
        self._drop(place for place in self._places if place[1] == largest)

    def _drop(self, places: Iterable[Place]) -> None:
        for place in list(places):
            self.blocks -= self._places.pop(place).blocks


def _summary(place: Place, held: HashCounts) -> PlaceSummary:
    group_idx, medium, ownership, locality = place
    return PlaceSummary(group_idx, medium, held.blocks, held.copies, held.digest, ownership, locality)
