# SPDX-License-Identifier: Apache-2.0
"""Problems of an engine's offload tiers, read from its /metrics (`engine_patch/offload/metrics.py`). Pure.

The engine never loads damaged data, so a bad disk does not change the worker's credit: it only needs an operator. A full
CPU tier is no fault, because it evicts. A full tier that can evict nothing is one: blocks that the GPU evicts then are
lost.
"""

from __future__ import annotations

import re

import msgspec

_CORRUPT, _OFF, _USAGE, _REFUSED = b"disk_corrupt_total", b"disk_off", b"cpu_usage_perc", b"stores_refused_total"
# The groups are the name, the labels and the value.
_LINES = re.compile(
    rb"^vllm:kvrouter_offload_("
    + b"|".join((_CORRUPT, _OFF, _USAGE, _REFUSED))
    + rb")(?:\{([^}\n]*)\})? +([-+0-9.eE]+)\r?$",
    re.MULTILINE,
)
_ENGINE = re.compile(rb'(?:^|,) *engine="(\d{1,9})"')

# For how long a problem is shown after the last rise of its counter: long enough to be seen by a person who looks now
# and then.
NAMED_S = 600.0


class OffloadSigns(msgspec.Struct, frozen=True):
    """The offload tiers of one engine core as the engine's metrics describe them."""

    # The number of records on disk that differed from what had been written, since the engine started.
    corrupt: int = 0
    # Whether the engine no longer uses the disk.
    off: bool = False
    # The fraction of the CPU tier's slots that hold a chunk, 0 to 1.
    usage: float = 0.0
    # The number of stores for which no slot of the CPU tier could be freed, since the engine started.
    refused: int = 0


def parse_offload(page: bytes, dp_rank: int) -> OffloadSigns | None:
    """Return the signs of the core with this rank, or None if the page has none.

    If only one core is on the page, its signs are returned whatever its rank is, as in `parse_engine_load`.
    """
    cores: dict[int | None, dict[bytes, float]] = {}
    for name, labels, value in _LINES.findall(page):
        engine = _ENGINE.search(labels)
        try:
            cores.setdefault(int(engine[1]) if engine else None, {})[name] = float(value)
        except ValueError:
            return None
    core = next(iter(cores.values())) if len(cores) == 1 else cores.get(dp_rank)
    if core is None:
        return None
    usage = min(max(core.get(_USAGE, 0.0), 0.0), 1.0)
    return OffloadSigns(_count(core, _CORRUPT), core.get(_OFF, 0.0) > 0, usage, _count(core, _REFUSED))


def _count(core: dict[bytes, float], name: bytes) -> int:
    """Return the value of a counter as an int from 0 to 10^12."""
    return int(min(max(core.get(name, 0.0), 0.0), 1e12))


class _Rise:
    """The last rise of an engine's counter. Times are seconds of a monotonic clock."""

    def __init__(self) -> None:
        self._count = 0
        self._rose_s = float("-inf")

    def observe(self, count: int, now: float) -> None:
        """Take the latest value of the counter."""
        # A lower value comes from another life of the engine, whose counter began at 0.
        if count > (self._count if count >= self._count else 0):
            self._rose_s = now
        self._count = count

    def is_recent(self, now: float) -> bool:
        """Return whether the counter rose within the last NAMED_S."""
        return now < self._rose_s + NAMED_S


class OffloadWatch:
    """One engine's offload tiers over time. Times are seconds of a monotonic clock."""

    def __init__(self) -> None:
        self.signs = OffloadSigns()
        self._corrupt = _Rise()
        self._refused = _Rise()

    def observe(self, signs: OffloadSigns, now: float) -> None:
        """Take the latest reading."""
        self._corrupt.observe(signs.corrupt, now)
        self._refused.observe(signs.refused, now)
        self.signs = signs

    def disk_problem(self, now: float) -> str:
        """Return the problem of the disk as a sentence, or "" if there was none recently."""
        problems = []
        if self._corrupt.is_recent(now):
            problems.append(
                f"its offload disk returned bad data: {self.signs.corrupt} records since the engine started, none of which was "
                "loaded; the engine's log names the folder: check that disk"
            )
        if self.signs.off:
            problems.append("its offload disk is left alone: the engine's log says why, and in which folder")
        return "; ".join(problems)

    def cpu_tier_problem(self, now: float) -> str:
        """Return the problem of the CPU tier as a sentence, or "" if no store was refused recently."""
        if not self._refused.is_recent(now):
            return ""
        return (
            f"its CPU tier is full ({self.signs.usage:.0%} of its slots) and could free no slot for {self.signs.refused} stores "
            "since the engine started"
        )
