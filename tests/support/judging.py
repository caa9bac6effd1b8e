# SPDX-License-Identifier: Apache-2.0
"""A query of the real `Matcher` about a made-up residency, shared by the tests of the hit rule.

Hash index i is the hash of boundary i + 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from kvrouter.router.base.common.ids import Place, WorkerKey
from kvrouter.router.index.matching.matcher import HashPlans, Matcher, WorkerView
from kvrouter.router.index.matching.mirror import Mirror
from kvrouter.router.index.matching.question import Hit, Question
from kvrouter.router.model.kvcache.block_hash import HashScheme
from kvrouter.router.model.kvcache.catalog import Catalog, Group, build_catalog
from kvrouter.router.model.kvcache.offload_connectors import OFFLOADING
from kvrouter.router.model.kvcache.prompt_hasher import SegmentMemory
from kvrouter.router.model.workers.registration import CatalogSpec
from kvrouter.router.model.workers.stream_state import StreamState

BUDGET_BYTES = 1 << 26


def judge(
    groups: Iterable[Group],
    resident: Mapping[Place, Iterable[int]],
    num_tokens: int,
    spec: CatalogSpec | None = None,
    blocks_per_chunk: int | None = 1,
    hashed_tokens: int | None = None,
    catalog: Catalog | None = None,
    held: bool = False,
) -> Hit:
    """Return the hit of one worker that holds the hash indices `resident[place]` at each place.

    Args:
        groups: The worker's groups.
        resident: The hash indices of the resident blocks, by place.
        num_tokens: Length of the prompt.
        spec: Declared facts about the worker's cache; None: an offloading connector alone.
        blocks_per_chunk: Blocks of an offloaded chunk.
        hashed_tokens: Tokens of which the question has the hashes, as if hashing had stopped early; None: all of them.
        catalog: Used in place of one built from `groups`, `spec` and `blocks_per_chunk`.
        held: Whether the hit also names the places of each block.
    """
    spec = spec or CatalogSpec(offload_connector=OFFLOADING)
    catalog = catalog or build_catalog(groups, "configured", spec, blocks_per_chunk)
    assert catalog.problem is None, catalog.problem
    mirror = Mirror(BUDGET_BYTES)
    worker = WorkerKey("m", "w")
    mirror.begin_epoch(worker, "e")
    for place, indices in resident.items():
        mirror.add(worker, place, np.array([1000 + i for i in indices], np.uint64))
    view = WorkerView(worker, None, StreamState.LIVE, True, "", "e", catalog, HashScheme.default(), {})
    covered = num_tokens if hashed_tokens is None else hashed_tokens
    hashes = np.array([1000 + i for i in range(covered // catalog.hash_block_size)], np.uint64)
    question = Question("m", num_tokens, block_hashes=hashes, explain=True, held=held)
    (hit,) = Matcher(mirror, SegmentMemory(0)).match(question, HashPlans.build(mirror, [view]))
    return hit
