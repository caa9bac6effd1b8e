# SPDX-License-Identifier: Apache-2.0
"""A removed worker earns nothing from that moment on, and its blocks are freed in turns after that."""

from __future__ import annotations

import numpy as np
import pytest

from kvrouter.router.base.common.ids import GPU, Place, WorkerKey
from kvrouter.router.index.matching.matcher import HashPlans, Matcher, WorkerView
from kvrouter.router.index.matching.mirror import SWEEP_BUDGET, Mirror
from kvrouter.router.index.matching.question import Question
from kvrouter.router.model.kvcache.block_hash import HashScheme
from kvrouter.router.model.kvcache.catalog import Group, build_catalog
from kvrouter.router.model.kvcache.prompt_hasher import SegmentMemory
from kvrouter.router.model.workers.registration import CatalogSpec
from kvrouter.router.model.workers.stream_state import StreamState

BLOCK_TOKENS = 16
PLACE = Place(0, GPU)
PROMPT = np.arange(1, 33, dtype=np.uint64)
OWN_BLOCKS = 100_000
CATALOG = build_catalog((Group(0, "full_attention", BLOCK_TOKENS),), "learned", CatalogSpec())


def view(worker: WorkerKey) -> WorkerView:
    return WorkerView(worker, None, StreamState.LIVE, True, "", "e", CATALOG, HashScheme.default(), {})


def hits(mirror: Mirror, workers: list[WorkerKey]) -> dict[str, int]:
    """Return the tokens of the hit by worker."""
    plans = HashPlans.build(mirror, list(map(view, workers)))
    question = Question("m", len(PROMPT) * BLOCK_TOKENS + 1, block_hashes=PROMPT)
    return {hit.worker.worker_id: hit.on_gpu for hit in Matcher(mirror, SegmentMemory(0)).match(question, plans)}


@pytest.mark.parametrize("others", [2, 80], ids=["few hold the prompt", "many hold it"])
def test_a_removed_worker_is_in_no_answer_while_its_blocks_are_freed(others: int) -> None:
    mirror = Mirror(1 << 26)
    workers = [WorkerKey("m", f"w{i}") for i in range(others)]
    gone, new = WorkerKey("m", "gone"), WorkerKey("m", "new")
    for worker in (*workers, gone):
        mirror.begin_epoch(worker, "e")
        mirror.add(worker, PLACE, PROMPT)
    entries = mirror.entries - len(PROMPT)
    mirror.add(gone, PLACE, np.arange(OWN_BLOCKS, dtype=np.uint64) + np.uint64(1000))
    assert hits(mirror, [*workers, gone])["gone"] == len(PROMPT) * BLOCK_TOKENS
    mirror.forget(gone)
    # A worker that comes meanwhile inherits nothing, not even under the same name.
    mirror.begin_epoch(new, "e")
    mirror.begin_epoch(gone, "e")
    mirror.add(new, PLACE, PROMPT[:1])
    expected = dict.fromkeys((worker.worker_id for worker in workers), len(PROMPT) * BLOCK_TOKENS)
    turns, entries_left = 0, mirror.entries
    while True:
        assert hits(mirror, [*workers, new, gone]) == expected | {"new": BLOCK_TOKENS, "gone": 0}
        assert not len(mirror.held(gone, PLACE))
        is_unfinished = mirror.sweep()
        assert entries_left - mirror.entries <= SWEEP_BUDGET
        turns, entries_left = turns + 1, mirror.entries
        if not is_unfinished:
            break
    assert mirror.entries == entries + 1
    assert turns > OWN_BLOCKS // SWEEP_BUDGET
    # The freed room serves the next worker.
    room_bytes = mirror.bytes
    mirror.add(gone, PLACE, np.arange(OWN_BLOCKS, dtype=np.uint64) + np.uint64(1000))
    assert mirror.bytes == room_bytes
