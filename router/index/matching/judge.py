# SPDX-License-Identifier: Apache-2.0
"""One question judged for all workers of a hash space. Compiled, see `setup.py`.

The judge looks the question's hashes up, then applies the hit rule to each worker. For workers that lend each other
chunks it also finds the lenders with which a worker would reuse more.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvrouter.router.index.matching.exchanges import MAX_SOURCES, Exchanges
from kvrouter.router.index.matching.mirror_table import MirrorTable
from kvrouter.router.model.kvcache.gpu_hit import gpu_hit, single_group_hit
from kvrouter.router.model.kvcache.hit_tables import (
    FOUND_COLUMNS,
    FOUND_CPU,
    FOUND_DISK,
    FOUND_FULL,
    FOUND_GPU,
    FOUND_LIMITER,
    GEO_EXT_START,
    GEO_LENT,
    GEO_SPEC_END,
    GEO_SPEC_START,
    PULL_COLUMNS,
    PULL_SOURCE,
    PULL_TOKENS,
    PULL_WORKER,
    RULE_FULL,
    SPEC_RULE,
)
from kvrouter.router.model.kvcache.offload_hit import tier_hit
from kvrouter.router.model.kvcache.rule_tables import RuleTables

U64 = NDArray[np.uint64]


class Judge:
    """The hit rule of all workers of one hash space, with the rows that it reads."""

    def __init__(
        self,
        tables: RuleTables,
        bases: NDArray[np.int64],
        row_of_slot: NDArray[np.int32],
        row_count: int,
        exchanges: Exchanges,
    ) -> None:
        # One geometry for each worker.
        self.tables = tables
        # The first row of each worker, int64.
        self.bases = bases
        # The row of each slot of the mirror, int32, -1 for slots of other workers.
        self.row_of_slot = row_of_slot
        # The number of rows of all workers.
        self.row_count = row_count
        self.members, self.starts = exchanges.members, exchanges.starts
        # The best sources of the set that is examined, and for each the hit of a worker that holds nothing itself.
        self.sources = np.zeros(MAX_SOURCES, np.int64)
        self.reaches = np.zeros(MAX_SOURCES, np.int64)

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

    def pulls(self, hits: NDArray[np.int64], num_tokens: int, turn: int) -> NDArray[np.int64]:
        """Return the sources from which workers may fetch blocks of the last question, int64, shape (pulls, PULL_COLUMNS).

        Pulls are in the order of the workers in `exchanges`, those of one worker with the most tokens first. The sources
        of a set are the MAX_SOURCES workers that hold the longest prefixes in the tiers that they lend. A source is compared with a
        worker only if its prefix is longer than the worker's hit, and only pulls that exceed the hit are returned.

        Args:
            hits: The hits of the last question, as `judge` returned them.
            num_tokens: The number of tokens of the last question.
            turn: A number of 0 or more that differs between prompts. Where more workers than MAX_SOURCES hold a prefix of one
                length, it decides which of them are sources.
        """
        pulls = np.empty((self.members.shape[0] * MAX_SOURCES, PULL_COLUMNS), np.int64)
        found, rows = hits, pulls
        count = 0
        for c in range(self.starts.shape[0] - 1):
            sources = self.choose_sources(found, self.starts[c], self.starts[c + 1], num_tokens, turn)
            for m in range(self.starts[c], self.starts[c + 1]):
                if sources == 0:
                    break
                w = self.members[m]
                own = found[w, FOUND_LIMITER - 1]
                if self.reaches[0] <= own:
                    continue
                is_empty = self.holds_nothing(w)
                first = count
                for i in range(sources):
                    if self.reaches[i] <= own:
                        break
                    s = self.sources[i]
                    # A worker that is a source itself gains nothing from itself.
                    tokens = self.reaches[i] if is_empty else self.hit_with(w, s, found[w, FOUND_GPU], num_tokens)
                    if tokens <= own:
                        continue
                    # Sources with as many tokens keep their order.
                    at = count
                    while at > first and rows[at - 1, PULL_TOKENS] < tokens:
                        for column in range(PULL_COLUMNS):
                            rows[at, column] = rows[at - 1, column]
                        at -= 1
                    rows[at, PULL_WORKER] = w
                    rows[at, PULL_SOURCE] = s
                    rows[at, PULL_TOKENS] = tokens
                    count += 1
        return pulls[:count]

    def choose_sources(self, found: NDArray[np.int64], first: int, last: int, num_tokens: int, turn: int) -> int:
        """Choose the sources of the set with the members `first` to `last - 1`, and return how many there are."""
        count = 0
        for i in range(last - first):
            w = self.members[first + (turn + i) % (last - first)]
            lent = self.tables.geos[w, GEO_LENT]
            reach = found[w, lent]
            if found[w, FOUND_GPU] != 0:
                # That hit counts blocks on the GPU, which are not lent.
                reach = tier_hit(self.tables, self.bases[w], w, num_tokens, 0, lent >= FOUND_DISK)
            if reach == 0 or (count == MAX_SOURCES and reach <= self.reaches[count - 1]):
                continue
            at = count if count < MAX_SOURCES else count - 1
            count = at + 1
            while at > 0 and self.reaches[at - 1] < reach:
                self.sources[at], self.reaches[at] = self.sources[at - 1], self.reaches[at - 1]
                at -= 1
            self.sources[at], self.reaches[at] = w, reach
        return count

    def holds_nothing(self, w: int) -> bool:
        """Return whether worker `w` holds no block of the last question anywhere."""
        end = self.bases[w + 1] if w + 1 < self.bases.shape[0] else self.row_count
        bits = 0
        for row in range(self.bases[w], end):
            for i in range(self.tables.rows.shape[1]):
                bits |= self.tables.rows[row, i]
        return bits == 0

    def hit_with(self, w: int, source: int, gpu: int, num_tokens: int) -> int:
        """Return the hit of worker `w` with all its tiers and those that worker `source` lends."""
        self.tables.lender_row = self.bases[source]
        self.tables.lender_shift = self.tables.geos[source, GEO_EXT_START] - self.tables.geos[w, GEO_EXT_START]
        hit = tier_hit(self.tables, self.bases[w], w, num_tokens, gpu, True)
        self.tables.lender_row = -1
        return hit

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
