# SPDX-License-Identifier: Apache-2.0
"""One question judged for all workers of a hash space. Compiled, see `setup.py`.

The judge looks the question's hashes up, then applies the hit rule to each worker.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvrouter.router.index.matching.mirror_table import MirrorTable
from kvrouter.router.model.kvcache.gpu_hit import gpu_hit, single_group_hit
from kvrouter.router.model.kvcache.hit_tables import (
    FOUND_COLUMNS,
    FOUND_CPU,
    FOUND_DISK,
    FOUND_FULL,
    FOUND_GPU,
    FOUND_LIMITER,
    GEO_SPEC_END,
    GEO_SPEC_START,
    RULE_FULL,
    SPEC_RULE,
)
from kvrouter.router.model.kvcache.offload_hit import tier_hit
from kvrouter.router.model.kvcache.rule_tables import RuleTables

U64 = NDArray[np.uint64]


class Judge:
    """The hit rule of all workers of one hash space, with the rows that it reads."""

    def __init__(
        self, tables: RuleTables, bases: NDArray[np.int64], row_of_slot: NDArray[np.int32], row_count: int
    ) -> None:
        # One geometry for each worker.
        self.tables = tables
        # The first row of each worker, int64.
        self.bases = bases
        # The row of each slot of the mirror, int32, -1 for slots of other workers.
        self.row_of_slot = row_of_slot
        # The number of rows of all workers.
        self.row_count = row_count

    def any_resident(self, mirror: MirrorTable, hashes: U64) -> bool:
        """Return whether any of the workers holds any of these blocks anywhere."""
        return mirror.any_resident(hashes, self.row_of_slot)

    def judge(self, mirror: MirrorTable, hashes: U64, num_tokens: int) -> NDArray[np.int64]:
        """Return the hits of all workers, int64, shape (workers, FOUND_COLUMNS).

        All columns except FOUND_LIMITER are in tokens:
        - FOUND_GPU: the hit on the GPU alone.
        - FOUND_CPU: the hit with the CPU tier.
        - FOUND_DISK: the hit with the disk tier too.
        - FOUND_LIMITER: the number of the spec group that limits the GPU hit, -1 if none does.
        - FOUND_FULL: the hit that full attention alone would give.
        """
        self.tables.rows = np.zeros((self.row_count, len(hashes)), np.uint16)
        mirror.gather(hashes, self.row_of_slot, self.tables.rows)
        hits = np.empty((self.bases.shape[0], FOUND_COLUMNS), np.int64)
        found = hits
        for w in range(self.bases.shape[0]):
            row = self.bases[w]
            gpu, limiter = gpu_hit(self.tables, row, w, num_tokens)
            cpu = tier_hit(self.tables, row, w, num_tokens, gpu, False)
            disk = max(cpu, tier_hit(self.tables, row, w, num_tokens, gpu, True))
            covered = gpu
            for s in range(self.tables.geos[w, GEO_SPEC_START], self.tables.geos[w, GEO_SPEC_END]):
                if self.tables.specs[s, SPEC_RULE] == RULE_FULL:
                    if s != limiter:
                        covered = single_group_hit(self.tables, row, w, num_tokens, s)
                    break
            found[w, FOUND_GPU] = gpu
            found[w, FOUND_CPU] = cpu
            # A tier without a rule adds nothing.
            for t in range(FOUND_DISK, FOUND_LIMITER):
                found[w, t] = disk
            found[w, FOUND_LIMITER] = limiter
            found[w, FOUND_FULL] = covered
        return hits

    def place_bits(self, worker: int, banks: int) -> NDArray[np.uint16]:
        """Return the place bits of the last question's hashes at one worker, shape (banks, hashes)."""
        rows = np.asarray(self.tables.rows)
        return rows[self.bases[worker] : self.bases[worker] + banks].copy()

    def spec_start(self, worker: int) -> int:
        """Return the index of the worker's first spec group among all spec groups."""
        return int(self.tables.geos[worker, GEO_SPEC_START])

    def cover(self, worker: int, spec: int, num_tokens: int) -> int:
        """Return how many tokens of the last question one spec group alone would allow."""
        return int(single_group_hit(self.tables, self.bases[worker], worker, num_tokens, spec))
