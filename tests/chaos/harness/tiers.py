# SPDX-License-Identifier: Apache-2.0
"""CPU memory and a disk below it, as an offloading engine has them: each evicts by itself, what was stored first.
Pure."""

from __future__ import annotations

import random
from collections import OrderedDict
from dataclasses import dataclass

from tests.chaos.harness.history import Place

# Who owns the disk, as a secondary tier's events name it.
OWNER = "chaos-disk"


@dataclass(frozen=True, slots=True)
class Moved:
    """A block came to a tier or left it."""

    stored: bool
    group_idx: int
    block_hash: bytes
    medium: str
    owner: str | None = None


class Tiers:
    """Both tiers. A block evicted from the CPU may go to disk."""

    def __init__(self, cpu_blocks: int, disk_blocks: int, rng: random.Random) -> None:
        self._room = {"CPU": cpu_blocks, "STORAGE": disk_blocks}
        self._held: dict[str, OrderedDict[tuple[int, bytes], None]] = {"CPU": OrderedDict(), "STORAGE": OrderedDict()}
        self._rng = rng
        self._moves: list[Moved] = []

    def offload(self, group_idx: int, block_hash: bytes) -> None:
        """Store a block of the GPU below."""
        self._put("CPU", group_idx, block_hash)

    def clear(self, medium: str) -> None:
        """Forget a tier, without a move: the engine says it in one word."""
        self._held[medium].clear()

    def take_moves(self) -> list[Moved]:
        moves, self._moves = self._moves, []
        return moves

    def held(self) -> dict[Place, set[int]]:
        found: dict[Place, set[int]] = {}
        for medium, blocks in self._held.items():
            for group_idx, block_hash in blocks:
                found.setdefault((group_idx, medium, _owner(medium)), set()).add(short(block_hash))
        return found

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
    """A hash as the wire has it: the last 8 bytes."""
    return int.from_bytes(block_hash[-8:], "big")


def _owner(medium: str) -> str | None:
    return OWNER if medium == "STORAGE" else None
