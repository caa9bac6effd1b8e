# SPDX-License-Identifier: Apache-2.0
"""The blocks that a worker may fetch from another worker before it computes a prompt."""

from __future__ import annotations

import msgspec

from kvrouter.router.base.common.ids import WorkerKey


class Pull(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One source of blocks that a worker lacks, and the worker's hit with them."""

    # The worker that lends the blocks.
    source: WorkerKey
    # The tokens that the worker would reuse, its own tiers included; more than its hit without the source.
    tokens: int
