# SPDX-License-Identifier: Apache-2.0
"""The integer tables that the hit rule reads, built from a worker's catalog and places.

Columns are constants here, so that the rule and the builder cannot disagree. A *place bit* shows that a block is
resident in one place. 16 place bits make a row (a *bank*); a worker with more places has more banks.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvrouter.contract.tiers import TIERS
from kvrouter.router.base.common.ids import CPU, GPU, STORAGE, Place
from kvrouter.router.model.kvcache.catalog import Catalog, Group, GroupRule, SpecGroup
from kvrouter.router.model.kvcache.offload_connectors import DISK_OWNER, TierRule
from kvrouter.router.model.kvcache.rule_tables import RuleTables

RULE_FULL = GroupRule.FULL.value
RULE_SLIDING_WINDOW = GroupRule.SLIDING_WINDOW.value
RULE_CHUNKED_LOCAL = GroupRule.CHUNKED_LOCAL.value
RULE_MAMBA = GroupRule.MAMBA.value

# Columns of `RuleTables.geos`: one row for each worker. A START and an END are a range of rows of another table.
(
    GEO_HASH_BLOCK,
    GEO_ALIGN,
    GEO_SCHEDULER_BLOCK,
    GEO_UNITARY,
    GEO_SIMPLE,
    GEO_SPEC_START,
    GEO_SPEC_END,
    GEO_EXT_START,
    GEO_EXT_END,
    GEO_EXT_SPARSE,
    GEO_EXT_MAMBA_ALIGN,
    GEO_EXT_TAIL_BLOCK,
    GEO_EXT_UNPROVEN,
    GEO_CPU_START,
    GEO_CPU_END,
    GEO_STORAGE_START,
    GEO_STORAGE_END,
    GEO_SUFFIX_ALIGN,
    GEO_UNCACHED,
    GEO_JOINT_START,
    GEO_JOINT_END,
    # The column of the hits with all tiers that the worker lends.
    GEO_LENT,
    GEO_COLUMNS,
) = range(23)

# Columns of `RuleTables.specs`: one row for each spec group on each medium.
SPEC_RULE, SPEC_BLOCK, SPEC_WINDOW, SPEC_CHUNK, SPEC_EAGLE, SPEC_MEMBER_START, SPEC_MEMBER_END, SPEC_COLUMNS = range(8)

# Columns of `RuleTables.members`: the place bit of one group of a spec group.
MEMBER_BANK, MEMBER_MASK, MEMBER_COLUMNS = range(3)

# Columns of the hits that `Judge.judge` returns for each worker: one for each of TIERS, and two more.
FOUND_GPU, FOUND_CPU, FOUND_DISK = range(3)
FOUND_LIMITER, FOUND_FULL, FOUND_COLUMNS = range(len(TIERS), len(TIERS) + 3)

# Columns of the pulls that `Judge.pulls` returns: the numbers of the worker and of the source, and the worker's hit.
PULL_WORKER, PULL_SOURCE, PULL_TOKENS, PULL_COLUMNS = range(4)

# Columns of `RuleTables.exts`: one row for each group of a worker with an OffloadingConnector.
(
    EXT_SPARSE,
    EXT_CHUNK,
    EXT_WINDOW_CHUNKS,
    EXT_WINDOW,
    EXT_EAGLE,
    EXT_CPU_BANK,
    EXT_CPU_MASK,
    EXT_STORAGE_BANK,
    EXT_STORAGE_MASK,
    # The mask of the disk tier if the worker lends from it, else 0; its CPU tier is always lent.
    EXT_LENT_STORAGE_MASK,
    EXT_COLUMNS,
) = range(11)

# Bits of one residency record. The place with number `index` is bit `index % BANK_BITS` of bank `index // BANK_BITS`.
BANK_BITS = 16


class BankMask(msgspec.Struct, frozen=True):
    """A bank (a row of 16 place bits) and the bit of a place in it; mask 0 means that the worker has no such place."""

    bank: int
    mask: int


def bank_mask(places: dict[Place, int], place: Place) -> BankMask:
    """Return the bit of a place, given the number of each place of the worker."""
    index = places.get(place)
    return BankMask(0, 0) if index is None else BankMask(index // BANK_BITS, 1 << (index % BANK_BITS))


def either_mask(places: dict[Place, int], first_place: Place, second_place: Place) -> BankMask:
    """Return the bits of two places, either of which makes a block resident.

    If the places are in different banks, only the first one counts, which can only lower the hit.
    """
    first, second = bank_mask(places, first_place), bank_mask(places, second_place)
    if first.mask == 0:
        return second
    return BankMask(first.bank, first.mask | second.mask) if first.bank == second.bank else first


def _cdiv(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)


def _window_chunks(group: Group, chunk: int) -> int | None:
    """Return how many chunks must be loadable before a hit's end, None if all must be (full attention).

    Source: offloading/scheduler.py:129.
    """
    if group.rule is GroupRule.SLIDING_WINDOW:
        window = group.sliding_window or 0
        return max(_cdiv(window, chunk), _cdiv(window - 1, chunk))
    if group.rule is GroupRule.CHUNKED_LOCAL:
        return _cdiv(group.attention_chunk_size or 0, chunk)
    return 1 if group.rule is GroupRule.MAMBA else None


class GeometryBuilder:
    """A builder of `RuleTables` that concatenates the tables of many workers."""

    def __init__(self) -> None:
        self._geos: list[list[int]] = []
        self._specs: list[list[int]] = []
        self._members: list[list[int]] = []
        self._exts: list[list[int]] = []

    def add(
        self, catalog: Catalog, places: dict[Place, int], *, borrows: bool = False, lends_disk: bool = False
    ) -> int:
        """Add a worker and return the index of its row in `geos`.

        Args:
            catalog: The worker's catalog. Raises ValueError if it has a problem.
            places: The worker's places and the number of the bit of each.
            borrows: Whether chunks of another worker may count for it, so that it is looked up in chunks even if it has
                stored none yet.
            lends_disk: Whether the worker lends chunks that only its disk holds, too.
        """
        if catalog.problem is not None:
            raise ValueError(f"no geometry for an incomplete catalog: {catalog.problem}")
        geo = [0] * GEO_COLUMNS
        geo[GEO_HASH_BLOCK] = catalog.hash_block_size
        geo[GEO_ALIGN] = catalog.align
        geo[GEO_SCHEDULER_BLOCK] = catalog.scheduler_block_size
        geo[GEO_UNCACHED] = 1 + catalog.lookahead_tokens
        geo[GEO_LENT] = FOUND_DISK if lends_disk else FOUND_CPU
        spec_groups = catalog.spec_groups()
        geo[GEO_UNITARY] = int(len(catalog.groups) == 1)
        geo[GEO_SIMPLE] = int(len(spec_groups) == 2 and spec_groups[0].rule is GroupRule.FULL)
        geo[GEO_SPEC_START], geo[GEO_SPEC_END] = self._add_specs(catalog, spec_groups, places, GPU)
        earning = catalog.offload.earning(places)
        if catalog.offload.rule is TierRule.CHUNKS and (earning or borrows):
            self._add_chunks(geo, catalog, places)
        elif catalog.offload.rule is TierRule.JOINT and earning:
            geo[GEO_JOINT_START], geo[GEO_JOINT_END] = self._add_specs(catalog, spec_groups, places, CPU, GPU)
        elif (CPU, None) in earning:
            geo[GEO_CPU_START], geo[GEO_CPU_END] = self._add_specs(catalog, spec_groups, places, CPU)
        elif (STORAGE, None) in earning:
            geo[GEO_STORAGE_START], geo[GEO_STORAGE_END] = self._add_specs(catalog, spec_groups, places, STORAGE)
        geo[GEO_SUFFIX_ALIGN] = catalog.suffix_align
        self._geos.append(geo)
        return len(self._geos) - 1

    def repeat(self, index: int) -> None:
        """Add a worker whose catalog and places equal those of the earlier worker with this row index."""
        self._geos.append(self._geos[index])

    def _add_specs(
        self,
        catalog: Catalog,
        spec_groups: tuple[SpecGroup, ...],
        places: dict[Place, int],
        medium: str,
        beside: str | None = None,
    ) -> tuple[int, int]:
        """Add the spec groups as one medium holds them, and return the range of their rows in `specs`.

        With `beside`, a block counts if it is on `medium` or on `beside`.
        """
        first = len(self._specs)
        for spec_group in spec_groups:
            start = len(self._members)
            for group in spec_group.members:
                place = Place(group.group_idx, medium)
                place_bit = (
                    bank_mask(places, place)
                    if beside is None
                    else either_mask(places, Place(group.group_idx, beside), place)
                )
                self._members.append([place_bit.bank, place_bit.mask])
            spec = spec_group.first
            self._specs.append(
                [
                    spec_group.rule.value,
                    spec.block_size,
                    (spec.sliding_window or 0) + int(catalog.whole_windows),
                    spec.attention_chunk_size or 0,
                    int(spec_group.eagle),
                    start,
                    len(self._members),
                ]
            )
        return first, len(self._specs)

    def _add_chunks(self, geo: list[int], catalog: Catalog, places: dict[Place, int]) -> None:
        geo[GEO_EXT_START] = len(self._exts)
        full: list[list[int]] = []
        sparse: list[list[int]] = []
        blocks_per_chunk = catalog.blocks_per_chunk or 1
        geo[GEO_EXT_UNPROVEN] = int(catalog.blocks_per_chunk is None)
        for group in catalog.cacheable:
            chunk = group.block_size * blocks_per_chunk
            window_chunks = _window_chunks(group, chunk)
            cpu = bank_mask(places, Place(group.group_idx, CPU))
            storage = bank_mask(places, Place(group.group_idx, STORAGE, DISK_OWNER))
            ext = [
                int(window_chunks is not None),
                chunk,
                window_chunks or 0,
                (group.sliding_window or 0) if group.rule is GroupRule.SLIDING_WINDOW else 0,
                int(group.eagle),
                cpu.bank,
                cpu.mask,
                storage.bank,
                storage.mask,
                storage.mask if geo[GEO_LENT] == FOUND_DISK else 0,
            ]
            (full if window_chunks is None else sparse).append(ext)
            if group.rule is GroupRule.MAMBA:
                geo[GEO_EXT_MAMBA_ALIGN] = chunk
        sparse.sort(key=lambda ext: ext[EXT_WINDOW_CHUNKS], reverse=True)
        self._exts += full + sparse
        geo[GEO_EXT_END] = len(self._exts)
        geo[GEO_EXT_SPARSE] = int(bool(sparse))
        geo[GEO_EXT_TAIL_BLOCK] = _partial_tail_block(catalog)

    def build(self) -> RuleTables:
        """Return the tables of all workers added so far."""
        return RuleTables(
            _table(self._geos, GEO_COLUMNS),
            _table(self._specs, SPEC_COLUMNS),
            _table(self._members, MEMBER_COLUMNS),
            _table(self._exts, EXT_COLUMNS),
        )


def _partial_tail_block(catalog: Catalog) -> int:
    """Return the block size of the partial tail that the offload tier can load, or 0 if it can load none.

    Source: offloading/scheduler.py:300.
    """
    groups = catalog.cacheable
    supported = (
        catalog.blocks_per_chunk in (None, 1)
        and len({group.block_size for group in groups}) == 1
        and any(g.rule is GroupRule.MAMBA and g.block_size > catalog.hash_block_size for g in groups)
        and all(g.rule in (GroupRule.FULL, GroupRule.MAMBA) for g in groups)
        and not any(group.eagle for group in groups)
    )
    return groups[0].block_size if supported else 0


def _table(rows: list[list[int]], columns: int) -> NDArray[np.int64]:
    table = np.zeros((len(rows), columns), np.int64)
    for i, row in enumerate(rows):
        table[i, : len(row)] = row
    return table
