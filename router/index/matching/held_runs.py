# SPDX-License-Identifier: Apache-2.0
"""Where the blocks of a prompt lie, place by place, for people who want to see the parts of a hit. Pure."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from kvrouter.contract.hits import HeldRuns
from kvrouter.contract.tiers import MEDIA
from kvrouter.router.base.common.ids import Place
from kvrouter.router.model.kvcache.catalog import Catalog
from kvrouter.router.model.kvcache.hit_tables import bank_mask
from kvrouter.router.model.kvcache.offload_connectors import TierRule


def held_runs(
    catalog: Catalog, places: dict[Place, int], rows: NDArray[np.uint16], num_tokens: int
) -> Iterable[HeldRuns]:
    """Yield the blocks of a prompt that each place of one worker holds.

    Args:
        catalog: The worker's catalog.
        places: The worker's places, with the index of the bit of each.
        rows: The worker's place bits of each hash, shape (banks, hashes).
        num_tokens: The prompt's length.
    """
    groups = {group.group_idx: group for group in catalog.groups}
    for place in sorted(places, key=lambda place: place.text):
        bit = bank_mask(places, place)
        hashes = np.flatnonzero(rows[bit.bank] & bit.mask)
        group = groups.get(place.group_idx)
        block_size = catalog.hash_block_size if group is None else group.block_size
        if place.medium in MEDIA[1:] and catalog.offload.rule is TierRule.CHUNKS:
            block_size *= catalog.blocks_per_chunk or 1
        yield HeldRuns(
            place.group_idx,
            place.medium,
            place.ownership,
            block_size,
            tuple(_runs(hashes, catalog.hash_block_size, block_size, num_tokens)),
        )


def _runs(
    hashes: NDArray[np.int64], hash_block_size: int, block_size: int, num_tokens: int
) -> Iterable[tuple[int, int]]:
    """Yield the runs of tokens that are in blocks held, as (first, end).

    Args:
        hashes: The ascending numbers of the hashes at which a block ends. The last block of a prompt may be incomplete.
        hash_block_size: Tokens of one hash.
        block_size: Tokens of one block.
        num_tokens: The prompt's length.
    """
    first = end = 0
    for number in hashes.tolist():
        block_end = (number + 1) * hash_block_size
        if block_end > num_tokens:
            break
        block_first = (block_end - 1) // block_size * block_size
        if end and block_first <= end:
            end = block_end
            continue
        if end:
            yield first, end
        first, end = block_first, block_end
    if end:
        yield first, end
