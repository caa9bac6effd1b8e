# SPDX-License-Identifier: Apache-2.0
"""What an engine's /metrics says of the CPU tier of its offload tier (`engine_patch/offload/metrics.py`). Pure.

A cache that is full is no fault: it evicts. One that can evict nothing is: what the GPU evicts then is lost.
"""

from __future__ import annotations

import re

import msgspec

USAGE = b"cpu_usage_perc"
REFUSED = b"stores_refused_total"

_LINE = re.compile(
    rb"^vllm:kvrouter_offload_(" + b"|".join((USAGE, REFUSED)) + rb")(?:\{([^}\n]*)\})? +([-+0-9.eE]+)\r?$",
    re.MULTILINE,
)
_ENGINE = re.compile(rb'(?:^|,) *engine="(\d{1,9})"')

# Long enough that a person sees it who looks now and then.
NAMED_S = 600.0


class CpuTier(msgspec.Struct, frozen=True):
    """usage: fraction of its slots that hold a chunk. refused: stores for which no slot could be freed, since the
    engine started."""

    usage: float = 0.0
    refused: int = 0


def parse_cpu_tier(page: bytes, dp_rank: int) -> CpuTier | None:
    """Of the core with this rank; None where the page says nothing of a CPU tier. See `parse_engine_load`."""
    found: dict[int | None, dict[bytes, float]] = {}
    for name, labels, value in _LINE.findall(page):
        engine = _ENGINE.search(labels)
        try:
            found.setdefault(int(engine[1]) if engine else None, {})[name] = float(value)
        except ValueError:
            return None
    core = next(iter(found.values())) if len(found) == 1 else found.get(dp_rank)
    if core is None:
        return None
    refused = int(min(max(core.get(REFUSED, 0.0), 0.0), 1e12))
    return CpuTier(min(max(core.get(USAGE, 0.0), 0.0), 1.0), refused)


class CpuTierWatch:
    """One engine's CPU tier. Times: seconds, monotonic."""

    def __init__(self) -> None:
        self.tier = CpuTier()
        self._rose_s = float("-inf")

    def observe(self, tier: CpuTier, now: float) -> None:
        # Fewer: another life of the engine.
        if tier.refused > (self.tier.refused if tier.refused >= self.tier.refused else 0):
            self._rose_s = now
        self.tier = tier

    def problem(self, now: float) -> str:
        """Empty while no store was refused of late."""
        if now >= self._rose_s + NAMED_S:
            return ""
        return (
            f"its CPU tier is full ({self.tier.usage:.0%} of its slots) and could free no slot for {self.tier.refused} stores "
            "since the engine started"
        )
