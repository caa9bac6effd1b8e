# SPDX-License-Identifier: Apache-2.0
"""The blocks that one worker holds, by place and number of copies, and the net changes since the last flush.

Invariant: the changes that `take_changes` returned so far, applied in order to nothing, give the set of blocks with at
least one copy. No I/O, no clock; does not depend on streams or epochs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvrouter.router.base.common.ids import Place
from kvrouter.router.index.ingest.copy_counts import MAX_COPIES, CopyTable
from kvrouter.router.index.ingest.net_changes import NetChanges, ResidencyDelta

Hashes = NDArray[np.uint64]

MASK_64 = (1 << 64) - 1
# Adding so few numbers one by one takes less time than a call of numpy, some 4 us.
FEW_HASHES = 64

# An engine has some ten groups and a handful of media and owners; each place costs a table, a Redis key and a bit. The
# bound is that of a snapshot (events/patch/snapshot_assembly.py), so that an accepted snapshot always fits.
MAX_PLACES = 1_024

# The bound is that of a snapshot. That many blocks take 0.2 GB here and 0.8 GB in Redis; an offload tier of 2 TB with
# blocks of 128 KB has 16 million.
MAX_BLOCKS = 20_000_000


class PlaceSum(msgspec.Struct, frozen=True):
    """One place in three numbers, by which two views of it are compared."""

    # Distinct blocks.
    blocks: int
    # Physical copies.
    copies: int
    # The sum of the distinct hashes modulo 2**64.
    digest: int


EMPTY_SUM = PlaceSum(0, 0, 0)


class _Held:
    """The copies in one place, with their sums kept up to date."""

    __slots__ = ("copies", "digest", "table")

    def __init__(self) -> None:
        self.table = CopyTable()
        self.copies = 0
        self.digest = 0

    def take(self, hashes: Hashes, copied: Mapping[int, int]) -> None:
        """Fill an empty place.

        Args:
            hashes: Distinct hashes.
            copied: The number of copies (at most MAX_COPIES) of each of these hashes that has two or more.
        """
        self.table.set(hashes, np.ones(len(hashes), np.uint16))
        self.copies, self.digest = len(hashes), _sum(hashes)
        if copied:
            self.table.set(np.fromiter(copied.keys(), np.uint64), np.fromiter(copied.values(), np.uint16))
            self.copies += sum(copied.values()) - len(copied)


class Residency:
    """The blocks of one worker.

    `add_copies` and `remove_copies` follow the worker's events; `take_changes` and `take_copies` return and empty the
    pending changes.
    """

    def __init__(self, *, max_places: int = MAX_PLACES, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_places = max_places
        self._max_blocks = max_blocks
        # Copies that were refused because their place or their blocks exceeded a bound. They earn no credit, and their
        # later removal changes nothing.
        self.refused_blocks = 0
        self._held: dict[Place, _Held] = {}
        self._pending: dict[Place, NetChanges] = {}
        # The new counts since the last flush of blocks that have, or had, two copies or more.
        self._multiple: dict[tuple[Place, int], int] = {}
        # Whether the next flush brings all blocks held, because none of them is known to be stored elsewhere.
        self._pending_all = False

    @property
    def places(self) -> Collection[Place]:
        """Every place that was seen, including places that hold nothing now."""
        return self._held.keys()

    @property
    def pending_blocks(self) -> int:
        """Number of transitions and copy counts that wait for a flush."""
        return sum(transitions.count for transitions in self._pending.values()) + len(self._multiple)

    @property
    def bytes(self) -> int:
        """Memory of the tables of all places."""
        return sum(held.table.bytes for held in self._held.values())

    def counts(self) -> dict[str, int]:
        """Return the number of distinct blocks by the text of their place."""
        return {
            place.text: len(held.table) for place, held in sorted(self._held.items(), key=lambda item: item[0].text)
        }

    def hashes(self, place: Place) -> Hashes:
        """Return the distinct blocks of one place, in no order."""
        held = self._held.get(place)
        return np.empty(0, np.uint64) if held is None else held.table.hashes()

    def sums(self) -> dict[Place, PlaceSum]:
        """Return the number of blocks and copies, and the digest, of each place that holds something."""
        return {
            place: PlaceSum(len(held.table), held.copies, held.digest)
            for place, held in self._held.items()
            if len(held.table)
        }

    def add_copies(self, place: Place, hashes: Hashes) -> None:
        """Add one copy of each hash, in order, or refuse all of them if they could exceed a bound."""
        entry = self._at(place)
        if entry is None or self.blocks + len(hashes) > self._max_blocks:
            self.refused_blocks += len(hashes)
            return
        held, pending = entry
        counts = held.table.add_copies(hashes)
        held.copies += len(hashes)
        arrived = hashes
        if held.table.multiple:
            self._note(place, hashes, counts, counts >= 2, 0)
            arrived = hashes[counts == 1]
        held.digest = (held.digest + _sum(arrived)) & MASK_64
        pending.arrived(arrived)

    def remove_copies(self, place: Place, hashes: Hashes) -> None:
        """Remove one copy of each hash, in order; blocks that are not held are ignored."""
        entry = self._at(place)
        if entry is None:
            return
        held, pending = entry
        counts = held.table.remove_copies(hashes)
        held.copies -= len(hashes) - held.table.absent
        left = hashes
        if held.table.multiple or held.table.absent:
            self._note(place, hashes, counts, counts >= 2, 1)
            left = hashes[counts == 1]
        held.digest = (held.digest - _sum(left)) & MASK_64
        pending.left(left)

    def clear(self, place: Place) -> None:
        """Remove all blocks of a place."""
        entry = self._at(place)
        if entry is None:
            return
        held, pending = entry
        pending.left(held.table.hashes())
        for block_hash in held.table.multiples().tolist():
            self._multiple[place, block_hash] = 0
        self._held[place] = _Held()

    def replace(self, wanted: Mapping[Place, tuple[Hashes, Mapping[int, int]]]) -> None:
        """Make the blocks held equal to `wanted`.

        Args:
            wanted: By place, the hashes, and the number of copies of each hash that has two or more.
        """
        for place in [place for place in self._held if place not in wanted]:
            self.clear(place)
        for place, (hashes, copied) in wanted.items():
            entry = self._at(place)
            if entry is None:
                self.refused_blocks += len(hashes)
                continue
            held, pending = entry
            before, after = held.table.hashes(), np.unique(hashes)
            pending.left(np.setdiff1d(before, after, assume_unique=True))
            pending.arrived(np.setdiff1d(after, before, assume_unique=True))
            for block_hash in held.table.multiples().tolist():
                self._multiple[place, block_hash] = 0
            copies = {h: min(n, MAX_COPIES) for h, n in copied.items() if n > 1 and _has(after, h)}
            held = self._held[place] = _Held()
            held.take(after, copies)
            for block_hash, count in copies.items():
                self._multiple[place, block_hash] = count

    def load(self, place: Place, hashes: Hashes, copied: Mapping[int, int]) -> None:
        """Take over the blocks of a place that are stored elsewhere already, so that none of them is pending."""
        held = self._held[place] = _Held()
        held.take(hashes, {block_hash: min(count, MAX_COPIES) for block_hash, count in copied.items()})

    def forget(self) -> None:
        """Drop all blocks and all pending changes, because the epoch is void."""
        self._held.clear()
        self.drop_pending()

    def drop_pending(self) -> None:
        """Drop the pending changes and keep the blocks."""
        self._pending.clear()
        self._multiple.clear()
        self._pending_all = False

    def mark_all_pending(self) -> None:
        """Let the next flush bring all blocks held, as into an empty epoch. This takes no memory until then."""
        self.drop_pending()
        self._pending_all = True

    def take_changes(self) -> list[ResidencyDelta]:
        """Return the net transitions since the last flush, place by place."""
        if self._pending_all:
            self._take_all()
        changes = []
        for place, transitions in self._pending.items():
            added, removed = transitions.net()
            if len(added) or len(removed):
                changes.append(ResidencyDelta(place, added, removed))
        self._pending.clear()
        return changes

    def _take_all(self) -> None:
        self.drop_pending()
        for place, held in self._held.items():
            if len(held.table):
                pending = self._pending[place] = NetChanges()
                pending.arrived(held.table.hashes())
                for block_hash, count in held.table.copied().items():
                    self._multiple[place, block_hash] = count

    def take_copies(self) -> list[tuple[Place, int, int]]:
        """Return (place, hash, copies) of each block whose count changed from or to two or more since the last flush.

        A count of 1 or 0 means that the block no longer has several copies. Call it after `take_changes`.
        """
        copies = [(place, block_hash, count) for (place, block_hash), count in self._multiple.items()]
        self._multiple.clear()
        return copies

    @property
    def blocks(self) -> int:
        """Number of distinct blocks of each place, added over all places."""
        return sum(len(held.table) for held in self._held.values())

    def _at(self, place: Place) -> tuple[_Held, NetChanges] | None:
        """Return the table and the pending changes of a place, or None if no further place is allowed."""
        held = self._held.get(place)
        if held is None:
            if len(self._held) >= self._max_places:
                return None
            held = self._held[place] = _Held()
        pending = self._pending.get(place)
        if pending is None:
            pending = self._pending[place] = NetChanges()
        return held, pending

    def _note(
        self, place: Place, hashes: Hashes, counts: NDArray[np.uint16], chosen: NDArray[np.bool_], less: int
    ) -> None:
        """Note for the next flush the counts of the chosen hashes, each lowered by `less`."""
        for block_hash, count in zip(hashes[chosen].tolist(), counts[chosen].tolist(), strict=True):
            self._multiple[place, block_hash] = count - less


class Runs:
    """A buffer that counts events into a Residency, with one call for each run of events of one place and direction."""

    def __init__(self, blocks: Residency) -> None:
        self._blocks = blocks
        self._place: Place | None = None
        self._stores = False
        self._parts: list[Hashes] = []

    def add(self, place: Place, stores: bool, hashes: Hashes) -> None:
        """Append the blocks of one event. Another place or direction than before ends the run first."""
        if place != self._place or stores is not self._stores:
            self.end()
            self._place, self._stores = place, stores
        self._parts.append(hashes)

    def end(self) -> None:
        """Count the appended blocks into the Residency. Call it before anything else reads or changes the Residency."""
        if self._place is not None and self._parts:
            hashes = self._parts[0] if len(self._parts) == 1 else np.concatenate(self._parts)
            if self._stores:
                self._blocks.add_copies(self._place, hashes)
            else:
                self._blocks.remove_copies(self._place, hashes)
        self._place, self._parts = None, []


def _has(ordered: Hashes, block_hash: int) -> bool:
    """Return whether an ascending array contains this hash."""
    at = int(np.searchsorted(ordered, np.uint64(block_hash)))
    return at < len(ordered) and int(ordered[at]) == block_hash


def _sum(hashes: Hashes) -> int:
    if len(hashes) < FEW_HASHES:
        return int(sum(hashes.tolist())) & MASK_64
    return int(hashes.sum(dtype=np.uint64))
