# SPDX-License-Identifier: Apache-2.0
"""One question against all workers of a hash space: look its hashes up, then apply the hit rule to each worker.
Compiled, see `setup.py`."""

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
    """tables: one geometry a worker. bases: the first row of each worker, int64. row_of_slot: the row of each slot of
    the mirror, int32, -1 for those of other workers. row_count: rows of all workers."""

    def __init__(
        self, tables: RuleTables, bases: NDArray[np.int64], row_of_slot: NDArray[np.int32], row_count: int
    ) -> None:
        self.tables = tables
        self.bases = bases
        self.row_of_slot = row_of_slot
        self.row_count = row_count

    def any_resident(self, mirror: MirrorTable, hashes: U64) -> bool:
        """Whether any of the workers holds any of these blocks anywhere."""
        return mirror.any_resident(hashes, self.row_of_slot)

    def judge(self, mirror: MirrorTable, hashes: U64, num_tokens: int) -> NDArray[np.int64]:
        """int64, shape (workers, FOUND_COLUMNS), in tokens: what the GPU gives, with the CPU tier, with the disk tier;
        the spec group that limits the first (-1: none); and what full attention alone would give."""
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
            found[w, FOUND_DISK] = disk
            found[w, FOUND_LIMITER] = limiter
            found[w, FOUND_FULL] = covered
        return hits

    def place_bits(self, worker: int, banks: int) -> NDArray[np.uint16]:
        """Of the question judged last: the place bits of each hash at one worker, shape (banks, hashes)."""
        rows = np.asarray(self.tables.rows)
        return rows[self.bases[worker] : self.bases[worker] + banks].copy()

    def spec_start(self, worker: int) -> int:
        """Index of the worker's first spec group among all."""
        return int(self.tables.geos[worker, GEO_SPEC_START])

    def cover(self, worker: int, spec: int, num_tokens: int) -> int:
        """Tokens of the question judged last that one spec group alone would allow."""
        return int(single_group_hit(self.tables, self.bases[worker], worker, num_tokens, spec))
