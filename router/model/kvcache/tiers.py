# SPDX-License-Identifier: Apache-2.0
"""Views of the table of tiers, which `contract/tiers.py` has. Pure."""

from __future__ import annotations

from kvrouter.contract.tiers import TIERS

MEDIA = tuple(tier.medium for tier in TIERS)
TOKEN_COSTS = tuple(tier.token_cost for tier in TIERS)
# The place of the one tier whose loads are measured (`worker_speed.py`).
MEASURED = 1


def all_on_gpu(tokens: int) -> tuple[int, ...]:
    """Return the tokens by tier of a hit that needs nothing but the GPU."""
    return (tokens,) * len(TIERS)
