# SPDX-License-Identifier: Apache-2.0
"""The settings of simulated routers: those of the whole store, those of one router, and changes while it runs."""

from __future__ import annotations

import random

import msgspec

from kvrouter.router.model.config.settings import Config
from tests.simulation.engine import MODEL

MIRROR_BYTES = 16 << 20
# The share of stores whose routers differ in settings in which they should agree (`model/config/agreement.py`).
DISAGREEING_SHARE = 0.15
# The values of settings that change hits, choices and leases.
LEASE_TTLS_S = (1.5, 2.0, 2.0, 4.0)
SUSPECT_CREDITS_S = (0.0, 3.0, 10.0, 30.0)
APPROXIMATE_TTLS_S = (0.0, 5.0, 120.0)
SATURATIONS_TOKENS = (64, 1_024, 131_072)
# The values of settings in which routers may differ.
FLUSH_INTERVALS_S = (0.0, 0.002, 0.010)
HEALTH_INTERVALS_S = (0.0, 0.5, 1.0, 3.0)
REPLAY_TIMEOUTS_S = (1.0, 2.0, 5.0)
SEGMENT_MEMORIES_BYTES = (0, 4_096, 1 << 20)
QUEUE_SIZES = (0, 3, 1_024)
QUEUE_DEADLINES_S = (0.0, 1.0, 30.0)
DECISIONS_KEPT = (0, 10)
# How many entries a worker's log keeps, and after how many blocks a checkpoint is due (`TAIL_BLOCKS`). With the numbers of
# the product, no world is long enough for a checkpoint.
LOGS = ((8, 200), (64, 1_000), (1_024, 16_384))


class FleetSettings:
    """The settings of all routers of one store."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.disagrees = rng.random() < DISAGREEING_SHARE
        self._shared = self._agreed()
        self.log_entries, self.tail_blocks = rng.choice(LOGS)

    def _agreed(self) -> Config:
        rng = self._rng
        return Config(
            mirror_budget_bytes=MIRROR_BYTES,
            lease_ttl_s=rng.choice(LEASE_TTLS_S),
            suspect_credit_s=rng.choice(SUSPECT_CREDITS_S),
            approximate_ttl_s=rng.choice(APPROXIMATE_TTLS_S),
            saturation_tokens=rng.choice(SATURATIONS_TOKENS),
        )

    def of_router(self) -> Config:
        """Return the settings with which a router starts."""
        rng = self._rng
        return msgspec.structs.replace(
            self._agreed() if self.disagrees else self._shared,
            flush_interval_s=rng.choice(FLUSH_INTERVALS_S),
            health_interval_s=rng.choice(HEALTH_INTERVALS_S),
            replay_timeout_s=rng.choice(REPLAY_TIMEOUTS_S),
            segment_memory_bytes=rng.choice(SEGMENT_MEMORIES_BYTES),
            queue_size=rng.choice(QUEUE_SIZES),
            queue_deadline_s=rng.choice(QUEUE_DEADLINES_S),
            decisions_kept=rng.choice(DECISIONS_KEPT),
        )


def changed(config: Config, rng: random.Random) -> Config:
    """Return the settings after a change of those that are applied without a restart."""
    return msgspec.structs.replace(
        config,
        saturation_tokens=rng.choice(SATURATIONS_TOKENS),
        queue_size=rng.choice(QUEUE_SIZES),
        queue_deadline_s=rng.choice(QUEUE_DEADLINES_S),
        model_aliases=rng.choice(((), (f"alias={MODEL}",))),
    )
