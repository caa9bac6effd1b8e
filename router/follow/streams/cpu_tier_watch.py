# SPDX-License-Identifier: Apache-2.0
"""What an engine's /metrics says of the CPU tier of its offload tier (`engine_patch/offload/metrics.py`). Pure.

A cache that is full is no fault: it evicts. One that can evict nothing is: what the GPU evicts then is lost.
"""

from __future__ import annotations

import msgspec

from kvrouter.router.follow.streams.offload_page import Rise, offload_lines, offload_values, whole_count

USAGE = b"cpu_usage_perc"
REFUSED = b"stores_refused_total"

_LINES = offload_lines(b"", USAGE, REFUSED)


class CpuTier(msgspec.Struct, frozen=True):
    """usage: fraction of its slots that hold a chunk. refused: stores for which no slot could be freed, since the
    engine started."""

    usage: float = 0.0
    refused: int = 0


def parse_cpu_tier(page: bytes, dp_rank: int) -> CpuTier | None:
    """Of the core with this rank; None where the page says nothing of a CPU tier. See `parse_engine_load`."""
    core = offload_values(_LINES, page, dp_rank)
    if core is None:
        return None
    refused = whole_count(core.get(REFUSED, 0.0))
    return CpuTier(min(max(core.get(USAGE, 0.0), 0.0), 1.0), refused)


class CpuTierWatch:
    """One engine's CPU tier. Times: seconds, monotonic."""

    def __init__(self) -> None:
        self.tier = CpuTier()
        self._rise = Rise()

    def observe(self, tier: CpuTier, now: float) -> None:
        self._rise.observe(tier.refused, now)
        self.tier = tier

    def problem(self, now: float) -> str:
        """Empty while no store was refused of late."""
        if not self._rise.is_recent(now):
            return ""
        return (
            f"its CPU tier is full ({self.tier.usage:.0%} of its slots) and could free no slot for {self.tier.refused} stores "
            "since the engine started"
        )
