# SPDX-License-Identifier: Apache-2.0
"""How much was written lately into each worker's GPU cache, by the blocks that its events report as stored. Pure.

Each block that is stored anywhere ages all blocks written before: the count of recent blocks shrinks by the share of
the fleet's memory that the new blocks take. So the recent blocks of a worker show how often its pool was written while
the pools of the whole fleet were written once. They are fewer than the size of its pool while the pool fills or stores
less than others, as many if all pools are written alike, and more if the worker thrashes. The less an LRU cache is
written, the older are the blocks that it evicts. So where the recent blocks are few compared with the pool, a new block
pushes out a block that was not used for a long time.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import exp

from kvrouter.router.base.common.ids import WorkerKey

# How full a pool must be to push anything out: the blocks stored there count by this power of the share in use, which
# is a third at three quarters and a sixteenth at a half. A pool with room to spare evicts nothing, and one that is
# nearly full will. With 0, hits were given up for memory that was never needed (ADR 47).
FILL_POWER = 4
# Weights grow by the factor e each time as many blocks are written as all pools hold; they are scaled back long before
# a float's precision suffers.
RESCALE_EXPONENT = 30.0
# The share of all pools that may be written before pressures are computed again.
PRESSURE_STEP = 0.001


class WorkerWrites:
    """The blocks that one worker stored and holds."""

    __slots__ = ("held_blocks", "most_blocks", "pool_blocks", "stated_blocks", "written")

    def __init__(self) -> None:
        # Blocks stored since the epoch began, each with the weight of its time (see `ModelWrites`).
        self.written = 0.0
        # Blocks that the worker holds on its GPU, and the most that it ever held.
        self.held_blocks = 0
        self.most_blocks = 0
        # The size of its pool, 0 until its engine states it or it has evicted something, and the size that its engine
        # states.
        self.pool_blocks = 0
        self.stated_blocks = 0


class ModelWrites:
    """The writes of all workers of one model.

    Invariant: every store lets the recent blocks of all workers shrink, and only a store makes a worker's own grow.
    """

    __slots__ = (
        "_exponent",
        "_learning",
        "_mean",
        "_pressed",
        "_pressures",
        "_rescaled",
        "_sized_blocks",
        "learned_blocks",
        "workers",
    )

    def __init__(self) -> None:
        self.workers: dict[WorkerKey, WorkerWrites] = {}
        # The most blocks that any worker with a pool of unknown size ever held, which stands for the sizes of all these
        # pools. A worker that may be full already must not get every prompt until it has evicted the first block.
        self.learned_blocks = 0
        # The blocks of all pools whose size is known, and the number of the other workers.
        self._sized_blocks = 0
        self._learning = 0
        # How often all pools were written so far, up to the last rescaling and since. A block that is stored now has
        # the weight exp(exponent).
        self._rescaled = 0.0
        self._exponent = 0.0
        # The pressure of each worker and their mean, and the exponent for which they were computed, None if never or
        # for other pools.
        self._pressures: dict[WorkerKey, float] = {}
        self._mean = 0.0
        self._pressed: float | None = None

    def recent_blocks(self, worker: WorkerKey) -> float:
        """Return the blocks that were stored lately at a worker."""
        writes = self.workers.get(worker)
        return 0.0 if writes is None else writes.written * exp(-self._exponent)

    @property
    def writings(self) -> float:
        """Return how often the pools of all workers were written once so far."""
        return self._rescaled + self._exponent

    def pool_blocks(self, worker: WorkerKey) -> int:
        """Return the size of a worker's pool: as stated, else as learned; 0 if nothing is known of any."""
        writes = self.workers.get(worker)
        return 0 if writes is None else writes.pool_blocks or self.learned_blocks

    def pressures(self) -> tuple[Mapping[WorkerKey, float], float]:
        """Return the pressure at each worker, and the mean of all workers.

        The pressure is the worth of the block that a new block pushes out: 0 for a pool with room to spare, a half if
        all pools are full and written alike, and up to 1 if one pool is written far more often. The values are as old
        as PRESSURE_STEP allows, because a choice reads hundreds of them.
        """
        if self._pressed is None or self._exponent - self._pressed > PRESSURE_STEP:
            self._pressures = {worker: self._pressure(worker) for worker in self.workers}
            self._mean = sum(self._pressures.values()) / max(1, len(self._pressures))
            self._pressed = self._exponent
        return self._pressures, self._mean

    def _pressure(self, worker: WorkerKey) -> float:
        held, pool, recent = self.workers[worker].held_blocks, self.pool_blocks(worker), self.recent_blocks(worker)
        return min(1.0, held / pool) ** FILL_POWER * recent / (recent + pool) if pool else 0.0

    def stored(self, worker: WorkerKey, blocks: int) -> None:
        """Count blocks that a worker stored."""
        writes = self._worker(worker)
        self._hold(writes, writes.held_blocks + blocks)
        self._exponent += blocks / max(1, self._sized_blocks + self._learning * self.learned_blocks)
        if self._exponent > RESCALE_EXPONENT:
            self._rescale()
        writes.written += blocks * exp(self._exponent)

    def known(self, worker: WorkerKey, blocks: int) -> None:
        """Count blocks that a worker held before this router looked.

        Unlike a new store, they do not age other blocks.
        """
        writes = self._worker(worker)
        self._hold(writes, writes.held_blocks + blocks)
        writes.written += blocks * exp(self._exponent)
        self._pressed = None

    def _hold(self, writes: WorkerWrites, blocks: int) -> None:
        writes.held_blocks = blocks
        writes.most_blocks = max(writes.most_blocks, blocks)
        if not writes.pool_blocks:
            self.learned_blocks = max(self.learned_blocks, writes.most_blocks)
        elif blocks > writes.pool_blocks:
            # An engine with a pool for each kind of block states the size of only one of them.
            self._size(writes, blocks)

    def removed(self, worker: WorkerKey, blocks: int) -> None:
        """Count blocks that a worker evicted. The most that it held is then the size of its pool."""
        writes = self._worker(worker)
        writes.held_blocks = max(0, writes.held_blocks - blocks)
        if not writes.pool_blocks:
            self._size(writes, writes.most_blocks)

    def voided(self, worker: WorkerKey) -> None:
        """Note that the known blocks of a worker are void.

        Its engine may hold them still, but no prompt finds them, so to push them out costs nothing.
        """
        writes = self._worker(worker)
        writes.written, writes.held_blocks = 0.0, 0
        self._pressed = None

    def state(self, worker: WorkerKey, blocks: int) -> None:
        """Take the size of a pool from its engine."""
        writes = self._worker(worker)
        if writes.stated_blocks != blocks:
            writes.stated_blocks = blocks
            self._size(writes, blocks)

    def _size(self, writes: WorkerWrites, blocks: int) -> None:
        if blocks and not writes.pool_blocks:
            self._learning -= 1
        self._sized_blocks += blocks - writes.pool_blocks
        writes.pool_blocks = blocks
        self._pressed = None

    def _worker(self, worker: WorkerKey) -> WorkerWrites:
        writes = self.workers.get(worker)
        if writes is None:
            writes = self.workers[worker] = WorkerWrites()
            self._learning += 1
        return writes

    def forget(self, worker: WorkerKey) -> None:
        """Drop a worker that is gone."""
        writes = self.workers.pop(worker, None)
        if writes is not None:
            self._sized_blocks -= writes.pool_blocks
            self._learning -= not writes.pool_blocks
            self._pressed = None

    def _rescale(self) -> None:
        factor = exp(-self._exponent)
        for writes in self.workers.values():
            writes.written *= factor
        self._rescaled += self._exponent
        self._exponent = 0.0
        self._pressed = None


class CacheWrites:
    """The counts of blocks that were written lately into the workers' GPU caches, by model."""

    def __init__(self) -> None:
        self._models: dict[str, ModelWrites] = {}

    def of(self, model: str) -> ModelWrites:
        """Return the writes of one model's workers."""
        writes = self._models.get(model)
        if writes is None:
            writes = self._models[model] = ModelWrites()
        return writes

    def forget(self, worker: WorkerKey) -> None:
        """Drop a worker that is gone, and its model with the last one."""
        model = self._models.get(worker.model)
        if model is not None:
            model.forget(worker)
            if not model.workers:
                del self._models[worker.model]
