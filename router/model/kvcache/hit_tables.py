# SPDX-License-Identifier: Apache-2.0
"""A worker's catalog and places as the integer tables that the hit rule reads.

Columns are constants here so that the rule and the builder cannot disagree. A *place bit* says that a block is resident
in one place; 16 of them make a row (a *bank*), and a worker with more places has more banks.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvrouter.router.base.common.ids import CPU, GPU, STORAGE, Place
from kvrouter.router.model.kvcache.catalog import Catalog, Group, GroupRule, SpecGroup
from kvrouter.router.model.kvcache.offload_connectors import DISK_OWNER, TierRule
from kvrouter.router.model.kvcache.rule_tables import RuleTables

RULE_FULL = GroupRule.FULL.value
RULE_SLIDING_WINDOW = GroupRule.SLIDING_WINDOW.value
RULE_CHUNKED_LOCAL = GroupRule.CHUNKED_LOCAL.value
RULE_MAMBA = GroupRule.MAMBA.value

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
    GEO_COLUMNS,
) = range(22)

SPEC_RULE, SPEC_BLOCK, SPEC_WINDOW, SPEC_CHUNK, SPEC_EAGLE, SPEC_MEMBER_START, SPEC_MEMBER_END, SPEC_COLUMNS = range(8)

MEMBER_BANK, MEMBER_MASK, MEMBER_COLUMNS = range(3)

# What is found of a worker: `matching/judge.py` says what each is.
FOUND_GPU, FOUND_CPU, FOUND_DISK, FOUND_LIMITER, FOUND_FULL, FOUND_COLUMNS = range(6)

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
    EXT_COLUMNS,
) = range(10)

# Bits of one residency record; a place is bit `index % BANK_BITS` of bank `index // BANK_BITS`.
BANK_BITS = 16


class BankMask(msgspec.Struct, frozen=True):
    """The bit of a place within its bank. Mask 0: there is no such place."""

    bank: int
    mask: int


def bank_mask(places: dict[Place, int], place: Place) -> BankMask:
    index = places.get(place)
    return BankMask(0, 0) if index is None else BankMask(index // BANK_BITS, 1 << (index % BANK_BITS))


def either_mask(places: dict[Place, int], one: Place, other: Place) -> BankMask:
    """The bits of two places, any of which will do. Only the first, where they are in two banks: less credit."""
    first, second = bank_mask(places, one), bank_mask(places, other)
    if first.mask == 0:
        return second
    return BankMask(first.bank, first.mask | second.mask) if first.bank == second.bank else first


def _cdiv(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)


def _window_chunks(group: Group, chunk: int) -> int | None:
    """Chunks that must be loadable at a boundary; None is full attention. Source: offloading/scheduler.py:129."""
    if group.rule is GroupRule.SLIDING_WINDOW:
        window = group.sliding_window or 0
        return max(_cdiv(window, chunk), _cdiv(window - 1, chunk))
    if group.rule is GroupRule.CHUNKED_LOCAL:
        return _cdiv(group.attention_chunk_size or 0, chunk)
    return 1 if group.rule is GroupRule.MAMBA else None


class GeometryBuilder:
    """Concatenates the tables of workers, one `add` each; the row index it returns names the worker's geometry."""

    def __init__(self) -> None:
        self._geos: list[list[int]] = []
        self._specs: list[list[int]] = []
        self._members: list[list[int]] = []
        self._exts: list[list[int]] = []

    def add(self, catalog: Catalog, places: dict[Place, int]) -> int:
        """Add a worker. catalog: without a problem. places: its places and their bit indices."""
        if catalog.problem is not None:
            raise ValueError(f"no geometry for an incomplete catalog: {catalog.problem}")
        geo = [0] * GEO_COLUMNS
        geo[GEO_HASH_BLOCK] = catalog.hash_block_size
        geo[GEO_ALIGN] = catalog.align
        geo[GEO_SCHEDULER_BLOCK] = catalog.scheduler_block_size
        geo[GEO_UNCACHED] = 1 + catalog.lookahead_tokens
        spec_groups = catalog.spec_groups()
        geo[GEO_UNITARY] = int(len(catalog.groups) == 1)
        geo[GEO_SIMPLE] = int(len(spec_groups) == 2 and spec_groups[0].rule is GroupRule.FULL)
        geo[GEO_SPEC_START], geo[GEO_SPEC_END] = self._add_specs(catalog, spec_groups, places, GPU)
        earning = catalog.offload.earning(places)
        if catalog.offload.rule is TierRule.CHUNKS and earning:
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
        """Add a worker whose catalog and places are those of an earlier one."""
        self._geos.append(self._geos[index])

    def _add_specs(
        self,
        catalog: Catalog,
        spec_groups: tuple[SpecGroup, ...],
        places: dict[Place, int],
        medium: str,
        beside: str | None = None,
    ) -> tuple[int, int]:
        """The spec groups as they are held on one medium, or on one of two; their range."""
        first = len(self._specs)
        for spec_group in spec_groups:
            start = len(self._members)
            for group in spec_group.members:
                place = Place(group.group_idx, medium)
                held = (
                    bank_mask(places, place)
                    if beside is None
                    else either_mask(places, Place(group.group_idx, beside), place)
                )
                self._members.append([held.bank, held.mask])
            one = spec_group.first
            self._specs.append(
                [
                    spec_group.rule.value,
                    one.block_size,
                    (one.sliding_window or 0) + int(catalog.whole_windows),
                    one.attention_chunk_size or 0,
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
        return RuleTables(
            _table(self._geos, GEO_COLUMNS),
            _table(self._specs, SPEC_COLUMNS),
            _table(self._members, MEMBER_COLUMNS),
            _table(self._exts, EXT_COLUMNS),
        )


def _partial_tail_block(catalog: Catalog) -> int:
    """Block size of the partial tail that the offload tier can load, or 0. Source: offloading/scheduler.py:300."""
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
