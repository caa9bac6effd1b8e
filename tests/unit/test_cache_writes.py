# SPDX-License-Identifier: Apache-2.0
"""Recent writes into each worker's cache, compared with a model that remembers every store."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from kvrouter.router.base.common.ids import GPU, Place, WorkerKey
from kvrouter.router.index.matching.cache_writes import FILL_POWER, CacheWrites, ModelWrites
from kvrouter.router.index.matching.mirror import FIRST_SLOTS, Mirror, MirrorFull

A, B, C = (WorkerKey("m", name) for name in "abc")


def store(writes: ModelWrites, worker: WorkerKey, blocks: int) -> None:
    """Store blocks in a worker's pool of stated size, which evicts the blocks that do not fit."""
    over = writes.workers[worker].held_blocks + blocks - writes.workers[worker].stated_blocks
    if over > 0:
        writes.removed(worker, over)
    writes.stored(worker, blocks)


def test_each_store_ages_all_earlier_ones_by_its_share_of_the_memory() -> None:
    """Law: recent blocks are the sum of all stores, each weighted by exp(-blocks stored since / all pools)."""
    rng = random.Random(1)
    for _ in range(50):
        writes, workers = ModelWrites(), (A, B, C)
        pools = {worker: rng.randint(100, 1_000) for worker in workers}
        for worker, blocks in pools.items():
            writes.state(worker, blocks)
        stores: list[tuple[WorkerKey, int]] = []
        for _ in range(rng.randint(1, 2_000)):
            worker, blocks = rng.choice(workers), rng.randint(1, 100)
            store(writes, worker, blocks)
            stores.append((worker, blocks))
        after_blocks, expected = 0, dict.fromkeys(workers, 0.0)
        for worker, blocks in reversed(stores):
            expected[worker] += blocks * math.exp(-after_blocks / sum(pools.values()))
            after_blocks += blocks
        for worker in workers:
            assert writes.recent_blocks(worker) == pytest.approx(expected[worker])
            assert writes.pool_blocks(worker) == pools[worker]
        pressures, mean = writes.pressures()
        for worker, worker_writes in writes.workers.items():
            full = min(1.0, worker_writes.held_blocks / pools[worker]) ** FILL_POWER
            recent = expected[worker]
            # The pressures may be some stores old.
            assert pressures[worker] == pytest.approx(full * recent / (recent + pools[worker]), abs=0.005)
        assert mean == pytest.approx(sum(pressures.values()) / 3)


def test_pools_that_are_written_alike_have_recent_blocks_of_their_size() -> None:
    writes = ModelWrites()
    for worker in (A, B):
        writes.state(worker, 1_000)
    for _ in range(10_000):
        store(writes, A, 1)
        store(writes, B, 1)
    assert writes.recent_blocks(A) == pytest.approx(1_000, rel=0.02)
    assert writes.recent_blocks(B) == pytest.approx(1_000, rel=0.02)


def test_an_unstated_pool_is_the_most_that_any_worker_held_until_it_evicts_itself() -> None:
    writes = ModelWrites()
    writes.stored(A, 800)
    writes.stored(B, 10)
    assert writes.pool_blocks(A) == writes.pool_blocks(B) == 800
    writes.removed(B, 5)
    writes.stored(B, 5)
    # B evicted while it held 10 blocks, so its pool cannot be larger.
    assert writes.pool_blocks(B) == 10
    writes.stored(B, 2)
    assert writes.pool_blocks(B) == 12
    writes.state(B, 10_000)
    writes.stored(B, 100)
    assert writes.pool_blocks(B) == 10_000 and writes.pool_blocks(C) == 0
    # An engine with several pools states the size of only one of them.
    writes.stored(B, 20_000)
    writes.state(B, 10_000)
    assert writes.pool_blocks(B) == 20_112


def test_voided_blocks_cost_nothing_until_the_cache_is_full_again() -> None:
    writes = ModelWrites()
    for worker in (A, B):
        writes.state(worker, 100)
        writes.stored(worker, 100)
    assert writes.pressures()[0][A] > 0
    writes.voided(A)
    assert writes.pressures()[0][A] == writes.recent_blocks(A) == 0 and writes.pressures()[0][B] > 0
    store(writes, A, 50)
    assert 0 < writes.pressures()[0][A] < 1 / 16
    store(writes, A, 50)
    assert writes.pressures()[0][A] > writes.pressures()[0][B] > 0


def test_a_cache_that_its_engine_cleared_is_empty() -> None:
    writes = ModelWrites()
    writes.state(A, 100)
    writes.stored(A, 100)
    writes.removed(A, 100)
    assert writes.pressures()[0][A] == 0 and writes.recent_blocks(A) > 0


def test_blocks_that_were_held_before_this_router_looked_age_nobody() -> None:
    writes = ModelWrites()
    for worker in (A, B, C):
        writes.voided(worker)
        writes.known(worker, 500)
    assert writes.recent_blocks(A) == writes.recent_blocks(B) == writes.recent_blocks(C) == 500


def test_blocks_that_found_no_room_in_the_mirror_count_when_they_come_and_when_they_go() -> None:
    mirror, place, hashes = Mirror(0), Place(0, GPU), np.arange(5_000, dtype=np.uint64)
    # The other workers take all slots, so that A gets none.
    for worker in (*(WorkerKey("other", str(number)) for number in range(FIRST_SLOTS)), A):
        mirror.begin_epoch(worker, "e")
        with pytest.raises(MirrorFull):
            mirror.add(worker, place, hashes)
    mirror.discard(A, place, hashes)
    for _ in range(3):
        with pytest.raises(MirrorFull):
            mirror.add(A, place, hashes)
        mirror.discard(A, place, hashes)
    assert mirror.writes.of("m").workers[A].held_blocks == 0 and mirror.writes.of("m").pool_blocks(A) == 5_000


def test_a_removed_worker_takes_no_memory() -> None:
    writes = CacheWrites()
    writes.of("m").stored(A, 10)
    assert writes.of("m").recent_blocks(B) == 0
    writes.forget(A)
    writes.forget(A)
    assert not writes.of("m").workers and writes.of("m").recent_blocks(A) == 0
