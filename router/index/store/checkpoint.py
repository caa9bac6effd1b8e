# SPDX-License-Identifier: Apache-2.0
"""A worker's checkpoint: the blocks that it held at one moment, in Redis beside its log, one STRING a place. Pure.

Invariant: the checkpoint and the log's entries after it, applied in order, give the blocks that the worker holds. So a
commit writes one log entry, and its changes are written a second time only when many commits have gathered. The second
time they are part of a whole array, which costs Redis a copy, where a member of a SET costs an entry of a hash table.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from kvrouter.router.base.common.checksum import checksum
from kvrouter.router.base.common.ids import Place, WorkerKey
from kvrouter.router.base.redis_client.errors import StoredValueError
from kvrouter.router.base.redis_client.resp import Hashes, command, hashes_from_bytes, hashes_to_bytes, long_command
from kvrouter.router.index.ingest.net_changes import ResidencyDelta
from kvrouter.router.index.store import keys

# Bytes of one hash in the STRING.
HASH_BYTES = 8

# The cost of one log entry besides its hashes, for the log and for a router that loads it: as much as this many hashes,
# some 130 bytes.
ENTRY_BLOCKS = 16
# A tail up to this size, 128 KiB, is never too long.
TAIL_BLOCKS = 16_384
# A longer tail may have up to this part of the blocks held. Each change is then written some four times as part of a
# checkpoint, and a log takes a quarter of the memory of its checkpoint.
TAIL_SHARE = 4


class Checkpoint(msgspec.Struct, frozen=True):
    """The blocks that a worker held at one moment."""

    worker: WorkerKey
    epoch: str
    # The last seq of `epoch` that was committed by then.
    seq: int
    # The distinct hashes at each place.
    places: Mapping[Place, Hashes]


class LogTail:
    """The size of a worker's log behind its checkpoint, in entries and transitions."""

    __slots__ = ("blocks", "entries")

    def __init__(self, entries: int = 0, blocks: int = 0) -> None:
        self.entries = entries
        self.blocks = blocks

    def add(self, changes: Iterable[ResidencyDelta]) -> None:
        """Count one more entry with these changes."""
        self.entries += 1
        self.blocks += sum(len(change.added) + len(change.removed) for change in changes)

    def clear(self) -> None:
        """Reset the size to nothing, as after a new checkpoint."""
        self.entries = self.blocks = 0

    @property
    def weight_blocks(self) -> int:
        """Cost of the tail, in hashes."""
        return self.blocks + ENTRY_BLOCKS * self.entries

    def is_long(self, held_blocks: int) -> bool:
        """Return whether a worker that holds `held_blocks` is due for its next checkpoint."""
        return self.weight_blocks >= max(TAIL_BLOCKS, held_blocks // TAIL_SHARE)


def pack_places(places: Mapping[Place, Hashes]) -> dict[Place, bytes]:
    """Return the hashes of each place in their stored form."""
    return {place: hashes_to_bytes(hashes) for place, hashes in places.items()}


def checkpoint_commands(
    checkpoint: Checkpoint, packed: Mapping[Place, bytes], stored: Iterable[str]
) -> Iterable[bytes]:
    """Yield the commands that write a checkpoint.

    Args:
        checkpoint: The checkpoint.
        packed: Its places, as `pack_places` returned them.
        stored: The texts of the places of the checkpoint that it replaces.
    """
    worker, epoch = checkpoint.worker, checkpoint.epoch
    full = {place: value for place, value in packed.items() if value}
    for place, value in full.items():
        yield long_command("SET", keys.residents(worker, epoch, place), value)
    empty = {*map(keys.parse_place, stored)} - full.keys()
    if empty:
        yield command("UNLINK", *(keys.residents(worker, epoch, place) for place in empty))


class StoredPlace(msgspec.Struct, frozen=True):
    """One place of a checkpoint, as `meta` describes it."""

    # The number of its blocks.
    blocks: int
    # The checksum of its hashes in their stored form.
    checksum: bytes


def places_text(packed: Mapping[Place, bytes]) -> bytes:
    """Return each place with the number of its hashes and their checksum, as `meta` keeps them."""
    return b" ".join(
        b"%s=%d=%s" % (keys.place_text(place).encode("ascii"), len(value) // HASH_BYTES, checksum(value))
        for place, value in packed.items()
    )


def parse_places(text: bytes) -> dict[str, StoredPlace]:
    """Return the stored places by their texts. Raises ValueError for a value that `places_text` never writes."""
    places = {}
    for part in text.decode("ascii").split(" ") if text else ():
        place, blocks, digest = part.rsplit("=", 2)
        keys.parse_place(place)
        places[place] = StoredPlace(keys.parse_number(blocks.encode()), digest.encode())
    return places


def parse_residents(key: str, value: Any, place: StoredPlace) -> Hashes:
    """Return the hashes stored at `key`. Raises StoredValueError if number or checksum differ from those of `place`."""
    blocks = place.blocks
    if value is None and not blocks:
        return np.empty(0, np.uint64)
    if not isinstance(value, bytes) or len(value) != HASH_BYTES * blocks:
        shown = value if value is None or not isinstance(value, bytes) else f"{len(value)} bytes for {blocks} hashes"
        raise StoredValueError(key, "", shown)
    if checksum(value) != place.checksum:
        raise StoredValueError(key, "", f"{blocks} hashes with another checksum than they were written with")
    return hashes_from_bytes(value)


def apply_changes(base: Mapping[Place, Hashes], changes: Iterable[ResidencyDelta]) -> dict[Place, Hashes]:
    """Return the hashes at each place after the changes, which are in order."""
    by_place: dict[Place, list[ResidencyDelta]] = {}
    for change in changes:
        by_place.setdefault(change.place, []).append(change)
    held = dict(base)
    for place, parts in by_place.items():
        held[place] = _changed(base.get(place, np.empty(0, np.uint64)), parts)
    return held


def _changed(base: Hashes, changes: Sequence[ResidencyDelta]) -> Hashes:
    """Return the hashes of one place after its changes, which are in order."""
    parts = [part for change in changes for part in (change.removed, change.added)]
    arrivals = np.repeat(np.tile([False, True], len(changes)), [len(part) for part in parts])
    hashes = np.concatenate(parts)
    if not len(hashes):
        return base
    # Only the last change of each hash counts.
    order = np.argsort(hashes, kind="stable")
    hashes, arrivals = hashes[order], arrivals[order]
    last = np.append(hashes[1:] != hashes[:-1], True)
    hashes, arrivals = hashes[last], arrivals[last]
    at = np.minimum(np.searchsorted(hashes, base), len(hashes) - 1)
    return np.concatenate([base[hashes[at] != base], hashes[arrivals]])
