# SPDX-License-Identifier: Apache-2.0
"""Compiles every kernel before the first query.

The first call of a kernel compiles it, for seconds; later processes read numba's cache in milliseconds. Arrays that
come from buffers are read-only, which to numba is another type, so both kinds are called.
"""

from __future__ import annotations

import numpy as np

from kvrouter.router.common.ids import GPU, Place, WorkerKey
from kvrouter.router.common.json_numbers import integers_of
from kvrouter.router.ingest.copy_counts import CopyTable
from kvrouter.router.kvcache.block_hash import HashScheme
from kvrouter.router.kvcache.catalog import Group, build_catalog
from kvrouter.router.kvcache.prompt_hasher import SegmentMemory
from kvrouter.router.matching.matcher import HashPlans, Matcher, WorkerView
from kvrouter.router.matching.mirror import Mirror
from kvrouter.router.matching.question import Question
from kvrouter.router.workers.registration import CatalogSpec
from kvrouter.router.workers.stream_state import StreamState

# Enough for the tables to grow once, so that rehashing is compiled too.
WARM_BLOCKS = 2_000
WARM_BUDGET_BYTES = 1 << 24


def warm() -> None:
    """Call every kernel once with each array type that it meets in service."""
    hashes = np.arange(1, WARM_BLOCKS + 1, dtype=np.uint64)
    read_only = hashes.copy()
    read_only.setflags(write=False)
    mirror = Mirror(WARM_BUDGET_BYTES)
    copies = CopyTable()
    worker = WorkerKey("warm", "warm")
    place = Place(0, GPU)
    mirror.begin_epoch(worker, "warm")
    for array in (hashes, read_only):
        copies.add_copies(array)
        mirror.add(worker, place, array)
        copies.remove_copies(array)
        mirror.discard(worker, place, array)
    copies.set(hashes, np.ones(len(hashes), np.uint16))
    mirror.add(worker, place, hashes)
    mirror.held(worker, place)
    groups = (Group(0, "full_attention", 16), Group(1, "sliding_window", 16, 64))
    catalog = build_catalog(groups, "configured", CatalogSpec())
    scheme = HashScheme.default()
    view = WorkerView(worker, None, StreamState.LIVE, True, "", "warm", catalog, scheme, {})
    matcher = Matcher(mirror, SegmentMemory(0))
    plans = HashPlans.build(mirror, [view])
    tokens = np.arange(64, dtype=np.int64)
    for question in (
        Question("warm", 65, block_hashes=hashes[:4], explain=True),
        Question("warm", 65, block_hashes=read_only[:4]),
        Question("warm", 64, token_ids=tokens),
    ):
        matcher.match(question, plans)
    integers_of(b"[1, -2]")
    mirror.forget(worker)
    while mirror.sweep():
        pass
