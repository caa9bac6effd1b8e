# SPDX-License-Identifier: Apache-2.0
"""The kind and the sizes of a schedule's engine, with the catalog and the prompts that follow from them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum

from kvrouter.events.patch.messages import DeclaredCatalog, DeclaredGroup, HashExample
from kvrouter.simulator.cache.hashing import extend_hashes, root_hash
from kvrouter.simulator.cache.shapes import Geometry
from tests.chaos.harness.tiers import short

# Prompts of a family share a prefix, so that blocks are reused, doubled and evicted.
FAMILIES, PROMPTS = 4, 24


class Kind(StrEnum):
    """The way in which an engine lets a router recover missed messages.

    STOCK has a replay endpoint, PLAIN has none, and PATCHED answers snapshot requests.
    """

    STOCK = "stock"
    PLAIN = "plain"
    PATCHED = "patched"


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of an engine, in blocks and batches."""

    geometry: Geometry
    gpu_blocks: int
    cpu_blocks: int
    disk_blocks: int
    ring: int = 10_000
    hwm: int = 100_000
    report_queue: int = 100_000
    # 1 if the router knows the engine's HTTP address, else 0.
    http: int = 0

    def catalog(self, hash_seed: str) -> DeclaredCatalog:
        """Return the catalog that the engine patch declares."""
        geometry = self.geometry
        size = geometry.hash_block_size
        tokens = list(range(size))
        example: list[bytes] = []
        extend_hashes(example, tokens, size, root_hash(hash_seed))
        classes = {group_idx: number for number, ids in enumerate(geometry.classes) for group_idx in ids}
        return DeclaredCatalog(
            groups=[
                DeclaredGroup(i, group.kind, group.block_size, group.sliding_window, spec_class=classes[i])
                for i, group in enumerate(geometry.groups)
            ],
            hash_block_size=size,
            scheduler_block_size=geometry.scheduler_block_size,
            align=geometry.scheduler_block_size,
            partial_hits=False,
            hash_algo="sha256",
            none_hash=root_hash(hash_seed).hex(),
            hash_example=HashExample(tokens, short(example[0])),
            offload_blocks_per_chunk=1,
        )

    def prompts(self, rng: random.Random) -> list[list[int]]:
        """Return the prompts of the engine's load; those of a family share a prefix."""
        size = self.geometry.scheduler_block_size
        families = [[rng.randrange(30_000) for _ in range(size * rng.randint(1, 4))] for _ in range(FAMILIES)]
        return [
            rng.choice(families) + [rng.randrange(30_000) for _ in range(rng.randint(1, size * 5))]
            for _ in range(PROMPTS)
        ]
