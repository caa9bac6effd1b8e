# SPDX-License-Identifier: Apache-2.0
"""The tiers of an engine's cache that earn credit, as one table.

A hit has its tokens by tier. The answers, the costs, the sentences that explain a choice and the printed tables have an
entry for each tier of `TIERS`. To add a tier, add an entry there; its blocks earn credit once
`router/index/matching/judge.py` has a rule for them.
"""

from __future__ import annotations

import msgspec


class Tier(msgspec.Struct, frozen=True):
    """A tier of an engine's cache."""

    # Its field in answers: the tokens reused with this tier and those before it.
    name: str
    # The name of its medium in events and in Redis keys, and as the label of a metric.
    medium: str
    # The meaning of the field in answers, for the OpenAPI document.
    meaning: str
    # The origin of its tokens, in the sentence that explains a choice.
    origin: str
    # The heading of its column in tables.
    heading: str
    # The assumed cost of loading a token from this tier, if computing a token costs 1; a measured cost replaces it.
    token_cost: float


# In the order in which the engine looks blocks up. Blocks on other media (FS, OBJ, ...) are counted and shown only.
#
# An 8 B model has 128 KB of KV cache a token: over PCIe 4 (20 GB/s usable) 150,000 tokens/s come back from the CPU tier,
# and 40,000 tokens/s from one NVMe disk (5 GB/s). An H100 computes about 30,000 to 40,000 tokens a second, an A100 half
# of that.
TIERS = (
    Tier("gpu", "GPU", "tokens reused from the GPU cache alone", "on the GPU", "GPU", 0.0),
    Tier("cpu", "CPU", "tokens reused with the CPU tier", "from the CPU tier", "+CPU", 0.2),
    Tier("disk", "STORAGE", "tokens reused with the disk tier too", "from storage", "+DISK", 0.7),
)
MEDIA = tuple(tier.medium for tier in TIERS)
TOKEN_COSTS = tuple(tier.token_cost for tier in TIERS)
# The index in TIERS of the only tier whose loads are measured (`worker_speed.py`).
MEASURED = 1


def all_on_gpu(tokens: int) -> tuple[int, ...]:
    """Return the tokens by tier of a hit that needs nothing but the GPU."""
    return (tokens,) * len(TIERS)
