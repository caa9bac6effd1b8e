# SPDX-License-Identifier: Apache-2.0
"""What an engine's /metrics says of the disk below its offload tier (`engine_patch/offload/metrics.py`). Pure.

Nothing damaged is ever loaded, so credit stays as it is: the disk is what needs somebody."""

from __future__ import annotations

import re

import msgspec

CORRUPT = b"corrupt_total"
OFF = b"off"

_LINE = re.compile(
    rb"^vllm:kvrouter_offload_disk_(" + b"|".join((CORRUPT, OFF)) + rb")(?:\{([^}\n]*)\})? +([-+0-9.eE]+)\r?$",
    re.MULTILINE,
)
_ENGINE = re.compile(rb'(?:^|,) *engine="(\d{1,9})"')

# Long enough that a person sees it who looks now and then; a disk that goes on is named all the time.
NAMED_S = 600.0


class DiskSigns(msgspec.Struct, frozen=True):
    """corrupt: records that were not what had been written, since the engine started. off: the disk is left alone."""

    corrupt: int = 0
    off: bool = False


def parse_disk(page: bytes, dp_rank: int) -> DiskSigns | None:
    """Of the core with this rank; None where the page says nothing of a disk. See `parse_engine_load`."""
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
    return DiskSigns(int(min(max(core.get(CORRUPT, 0.0), 0.0), 1e12)), core.get(OFF, 0.0) > 0)


class DiskWatch:
    """One engine's disk. Times: seconds, monotonic."""

    def __init__(self) -> None:
        self.signs = DiskSigns()
        self._rose_s = float("-inf")

    def observe(self, signs: DiskSigns, now: float) -> None:
        # Fewer: another life of the engine.
        if signs.corrupt > (self.signs.corrupt if signs.corrupt >= self.signs.corrupt else 0):
            self._rose_s = now
        self.signs = signs

    def problem(self, now: float) -> str:
        """What is wrong with the disk; empty when nothing was of late."""
        problems = []
        if now < self._rose_s + NAMED_S:
            problems.append(
                f"its offload disk returned bad data: {self.signs.corrupt} records since the engine started, none of which was "
                "loaded; the engine's log names the folder: check that disk"
            )
        if self.signs.off:
            problems.append("its offload disk is left alone: the engine's log says why, and in which folder")
        return "; ".join(problems)
