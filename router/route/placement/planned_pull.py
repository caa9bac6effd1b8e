# SPDX-License-Identifier: Apache-2.0
"""The pull that belongs to a choice: which blocks the chosen worker fetches, from where, and how long it waits."""

from __future__ import annotations

import msgspec

from kvrouter.router.base.common.ids import WorkerKey


class PlannedPull(msgspec.Struct, frozen=True, gc=False):
    """The source that the request to the chosen worker names."""

    source: WorkerKey
    # The address at which the source lends its blocks.
    host: str
    port: int
    # The tokens that the chosen worker reuses if all blocks arrive, its own tiers included.
    tokens: int
    # The tokens among them that are fetched.
    fetched_tokens: int
    # Seconds within which the blocks must arrive; after that the engine computes the missing tokens.
    timeout_s: float
