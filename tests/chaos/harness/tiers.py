# SPDX-License-Identifier: Apache-2.0
"""A model of an offloading engine's tiers, CPU memory and a disk below it; it does no I/O.

Each tier evicts by itself the block that was stored first.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from dataclasses import dataclass

from tests.chaos.harness.history import Place

# The owner of the disk in the events of a secondary tier.
OWNER = "chaos-disk"


@dataclass(frozen=True, slots=True)
class Moved:
    """A block's arrival in a tier (`stored`) or its removal from it."""

    stored: bool
    group_idx: int
    block_hash: bytes
    medium: str
    owner: str | None = None


class Tiers:
    """The CPU tier and the disk tier; a block evicted from the CPU tier may move to the disk."""

    def __init__(self, cpu_blocks: int, disk_blocks: int, rng: random.Random) -> None:
        self._room = {"CPU": cpu_blocks, "STORAGE": disk_blocks}
        self._held: dict[str, OrderedDict[tuple[int, bytes], None]] = {"CPU": OrderedDict(), "STORAGE": OrderedDict()}
        self._rng = rng
        self._moves: list[Moved] = []

    def offload(self, group_idx: int, block_hash: bytes) -> None:
        """Store a block of the GPU in the CPU tier."""
        self._put("CPU", group_idx, block_hash)

    def clear(self, medium: str) -> None:
        """Empty a tier without a move for each block, as the engine sends a single event for all of them."""
        self._held[medium].clear()

    def take_moves(self) -> list[Moved]:
        moves, self._moves = self._moves, []
        return moves

    def held(self) -> dict[Place, set[int]]:
        hashes_by_place: dict[Place, set[int]] = {}
        for medium, blocks in self._held.items():
            for group_idx, block_hash in blocks:
                hashes_by_place.setdefault((group_idx, medium, _owner(medium)), set()).add(short(block_hash))
        return hashes_by_place

    def _put(self, medium: str, group_idx: int, block_hash: bytes) -> None:
        blocks, room = self._held[medium], self._room[medium]
        if not room or (group_idx, block_hash) in blocks:
            return
        if len(blocks) == room:
            group, oldest = blocks.popitem(last=False)[0]
            self._moves.append(Moved(False, group, oldest, medium, _owner(medium)))
            if medium == "CPU" and self._rng.random() < 0.5:
                self._put("STORAGE", group, oldest)
        blocks[group_idx, block_hash] = None
        self._moves.append(Moved(True, group_idx, block_hash, medium, _owner(medium)))


def short(block_hash: bytes) -> int:
    """Return a hash in the form that events have, its last 8 bytes."""
    return int.from_bytes(block_hash[-8:], "big")


def _owner(medium: str) -> str | None:
    return OWNER if medium == "STORAGE" else None
