# SPDX-License-Identifier: Apache-2.0
"""The sets of workers whose engines lend chunks to each other. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, chain

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvrouter.events.patch.messages import PeerAddress
from kvrouter.router.model.kvcache.catalog import Catalog
from kvrouter.router.model.kvcache.offload_connectors import TierRule

# The sources of one set that are compared. A choice needs another one where the first is busy, and each costs every
# worker that lacks blocks one more application of the hit rule.
MAX_SOURCES = 3


class Exchanges(msgspec.Struct, frozen=True, eq=False):
    """The workers that exchange chunks, by their numbers in a plan; each set has two workers at least."""

    # The workers of all sets, one set after the other, int64.
    members: NDArray[np.int64]
    # For each set, the index of its first member, and then the number of all members, int64.
    starts: NDArray[np.int64]

    @classmethod
    def among(cls, workers: Iterable[tuple[Catalog, PeerAddress | None]]) -> Exchanges:
        """Return the sets among workers, each given by its catalog and its address; None for one that may not lend.

        A chunk of another worker can count only where the hit rule looks chunks up and knows their size.
        """
        alike: dict[tuple[str, int, Catalog], list[int]] = {}
        for number, (catalog, peer) in enumerate(workers):
            has_chunks = catalog.offload.rule is TierRule.CHUNKS and catalog.blocks_per_chunk is not None
            if peer is not None and has_chunks:
                alike.setdefault((peer.exchange, peer.resets, catalog), []).append(number)
        sets = [members for members in alike.values() if len(members) > 1]
        return cls(_numbers([*chain(*sets)]), _numbers([0, *accumulate(map(len, sets))]))


def _numbers(values: Sequence[int]) -> NDArray[np.int64]:
    return np.array(values, np.int64)
