# SPDX-License-Identifier: Apache-2.0
"""The parts of a snapshot put together, and checked against the sums that they announce. Pure.

A part that is lost, doubled, out of order or of another moment, or sums that do not match, raise a `SnapshotError`:
nothing is guessed. Memory is bounded, whatever the parts claim.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec
import numpy as np

from kvrouter.events.patch.items import Snapshot, SnapshotPlace
from kvrouter.events.patch.messages import DIGEST_MASK, PlaceSummary, SnapshotPart, unpack_hashes
from kvrouter.events.vllm.messages import MAX_NAME_CHARS, HashArray

# The hashes of this many blocks take 160 MB. A node with 2 TB of offload memory and blocks of 128 KB has 16 million
# blocks.
DEFAULT_MAX_SNAPSHOT_BLOCKS = 20_000_000

# An engine has some ten groups and a handful of media and owners.
MAX_PLACES = 1_024

_Key: TypeAlias = tuple[int | None, str, str | None, str | None]
_Sum: TypeAlias = tuple[int, int, int]


class SnapshotError(Exception):
    """Parts that are no snapshot."""


class _Place:
    __slots__ = ("blocks", "copied", "copies", "digest", "hashes")

    def __init__(self) -> None:
        self.hashes: list[HashArray] = []
        self.copied: list[tuple[int, int]] = []
        self.blocks = 0
        self.copies = 0
        self.digest = 0


class SnapshotAssembly:
    """The parts of one answer so far. It is not used again after a SnapshotError."""

    def __init__(self, max_blocks: int = DEFAULT_MAX_SNAPSHOT_BLOCKS) -> None:
        self.parts = 0
        self._max_blocks = max_blocks
        self._blocks = 0
        self._first: SnapshotPart | None = None
        self._places: dict[_Key, _Place] = {}

    def add(self, part: SnapshotPart) -> Snapshot | None:
        """Add a part. Returns the whole snapshot once `part` is the last. Raises SnapshotError."""
        first = self._first
        if first is None:
            # Keep the first part without its blocks. Only its epoch, start time and next seq are needed, which all
            # parts share.
            first = self._first = msgspec.structs.replace(part, hashes=b"", copied=[])
        elif (part.epoch, part.started_s, part.next_seq) != (first.epoch, first.started_s, first.next_seq):
            raise SnapshotError(
                f"part {self.parts} belongs to seq {part.next_seq} of the engine's life {part.epoch}, "
                f"and the first part to seq {first.next_seq} of life {first.epoch}"
            )
        if part.index != self.parts:
            raise SnapshotError(f"part {part.index} came, and part {self.parts} was expected")
        self.parts += 1
        if part.last:
            return self._finish(first, part)
        self._add_blocks(part)
        return None

    def _add_blocks(self, part: SnapshotPart) -> None:
        try:
            hashes = unpack_hashes(part.hashes)
        except ValueError as error:
            raise SnapshotError(f"part {part.index}: {error}") from error
        self._blocks += len(hashes)
        if not len(hashes):
            raise SnapshotError(f"part {part.index} has no blocks, and only the last part may have none")
        if self._blocks > self._max_blocks:
            raise SnapshotError(f"the snapshot has more than {self._max_blocks} blocks")
        extra = _extra_copies(part, hashes)
        key = (part.group_idx, part.medium, part.ownership, part.locality)
        place = self._places.get(key)
        if place is None:
            if len(self._places) == MAX_PLACES:
                raise SnapshotError(f"the snapshot has more than {MAX_PLACES} places (group, medium, owner)")
            if any(isinstance(name, str) and len(name) > MAX_NAME_CHARS for name in key):
                raise SnapshotError(f"part {part.index} has a name of more than {MAX_NAME_CHARS} characters")
            place = self._places[key] = _Place()
        place.hashes.append(hashes)
        place.copied += part.copied
        place.blocks += len(hashes)
        place.copies += len(hashes) + extra
        # numpy's sum of uint64 wraps, as the digest does.
        place.digest = (place.digest + int(hashes.sum())) & DIGEST_MASK

    def _finish(self, first: SnapshotPart, last: SnapshotPart) -> Snapshot:
        if last.hashes:
            raise SnapshotError("the last part has blocks; it may only have the sums of the places")
        _compare({key: (place.blocks, place.copies, place.digest) for key, place in self._places.items()}, last.places)
        places = [
            SnapshotPlace(group_idx, medium, ownership, np.concatenate(place.hashes), place.copied, locality)
            for (group_idx, medium, ownership, locality), place in self._places.items()
        ]
        return Snapshot(first.epoch, first.started_s, first.next_seq, places, last.places)


def _extra_copies(part: SnapshotPart, hashes: HashArray) -> int:
    """Return the number of copies beyond the first of each block. Raises SnapshotError."""
    if not part.copied:
        return 0
    if any(count < 2 or not 0 <= block_hash <= DIGEST_MASK for block_hash, count in part.copied):
        raise SnapshotError(
            f"part {part.index} has a count of copies below 2, or one for a number that is no block hash"
        )
    copied = np.array([block_hash for block_hash, _ in part.copied], np.uint64)
    if len(np.unique(copied)) != len(copied) or not np.isin(copied, hashes).all():
        raise SnapshotError(f"part {part.index} counts copies of blocks that it does not list, or of one block twice")
    return sum(count - 1 for _, count in part.copied)


def _compare(received: dict[_Key, _Sum], summaries: list[PlaceSummary]) -> None:
    """Raise SnapshotError unless both have the same places with the same sums."""
    announced: dict[_Key, _Sum] = {}
    for place in summaries:
        key = (place.group_idx, place.medium, place.ownership, place.locality)
        if key in announced:
            raise SnapshotError(f"the last part has two sums of place {key}")
        announced[key] = (place.blocks, place.copies, place.digest)
    for key in announced.keys() | received.keys():
        # A place that was emptied has no part, and needs no sum.
        expected, actual = announced.get(key, (0, 0, 0)), received.get(key, (0, 0, 0))
        if expected != actual:
            raise SnapshotError(
                f"place {key}: the parts have blocks, copies and digest {actual[0]}, {actual[1]}, {actual[2]:016x}, "
                f"and the last part announces {expected[0]}, {expected[1]}, {expected[2]:016x}"
            )
