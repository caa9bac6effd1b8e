# SPDX-License-Identifier: Apache-2.0
"""Problems of the CPU part of an engine's offload tier, read from its /metrics (`engine_patch/offload/metrics.py`). Pure.

A full cache is no fault, because it evicts. A full cache that can evict nothing is one: blocks that the GPU evicts then
are lost.
"""

from __future__ import annotations

import msgspec

from kvrouter.router.follow.streams.offload_page import Rise, offload_lines, offload_values, whole_count

USAGE = b"cpu_usage_perc"
REFUSED = b"stores_refused_total"

_LINES = offload_lines(b"", USAGE, REFUSED)


class CpuTier(msgspec.Struct, frozen=True):
    """The CPU tier as the engine's metrics describe it."""

    # The fraction of the slots that hold a chunk, 0 to 1.
    usage: float = 0.0
    # The number of stores for which no slot could be freed, since the engine started.
    refused: int = 0


def parse_cpu_tier(page: bytes, dp_rank: int) -> CpuTier | None:
    """Return the CPU tier of the core with this rank, or None if the page describes none.

    The rank is matched as in `offload_values`.
    """
    core = offload_values(_LINES, page, dp_rank)
    if core is None:
        return None
    refused = whole_count(core.get(REFUSED, 0.0))
    return CpuTier(min(max(core.get(USAGE, 0.0), 0.0), 1.0), refused)


class CpuTierWatch:
    """One engine's CPU tier over time. Times are seconds of a monotonic clock."""

    def __init__(self) -> None:
        self.tier = CpuTier()
        self._rise = Rise()

    def observe(self, tier: CpuTier, now: float) -> None:
        """Take the latest reading."""
        self._rise.observe(tier.refused, now)
        self.tier = tier

    def problem(self, now: float) -> str:
        """Return the problem as a sentence, or "" if no store was refused recently."""
        if not self._rise.is_recent(now):
            return ""
        return (
            f"its CPU tier is full ({self.tier.usage:.0%} of its slots) and could free no slot for {self.tier.refused} stores "
            "since the engine started"
        )
