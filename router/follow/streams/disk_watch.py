# SPDX-License-Identifier: Apache-2.0
"""Problems of the disk below an engine's offload tier, read from its /metrics (`engine_patch/offload/metrics.py`). Pure.

The engine never loads damaged data, so a bad disk does not change the worker's credit: it only needs an operator.
"""

from __future__ import annotations

import msgspec

from kvrouter.router.follow.streams.offload_page import Rise, offload_lines, offload_values, whole_count

CORRUPT = b"corrupt_total"
OFF = b"off"

_LINES = offload_lines(b"disk_", CORRUPT, OFF)


class DiskSigns(msgspec.Struct, frozen=True):
    """The disk as the engine's metrics describe it."""

    # The number of records that differed from what had been written, since the engine started.
    corrupt: int = 0
    # Whether the engine no longer uses the disk.
    off: bool = False


def parse_disk(page: bytes, dp_rank: int) -> DiskSigns | None:
    """Return the disk signs of the core with this rank, or None if the page describes no disk.

    The rank is matched as in `offload_values`.
    """
    core = offload_values(_LINES, page, dp_rank)
    if core is None:
        return None
    return DiskSigns(whole_count(core.get(CORRUPT, 0.0)), core.get(OFF, 0.0) > 0)


class DiskWatch:
    """One engine's disk over time. Times are seconds of a monotonic clock."""

    def __init__(self) -> None:
        self.signs = DiskSigns()
        self._rise = Rise()

    def observe(self, signs: DiskSigns, now: float) -> None:
        """Take the latest reading."""
        self._rise.observe(signs.corrupt, now)
        self.signs = signs

    def problem(self, now: float) -> str:
        """Return the problem of the disk as a sentence, or "" if there was none recently."""
        problems = []
        if self._rise.is_recent(now):
            problems.append(
                f"its offload disk returned bad data: {self.signs.corrupt} records since the engine started, none of which was "
                "loaded; the engine's log names the folder: check that disk"
            )
        if self.signs.off:
            problems.append("its offload disk is left alone: the engine's log says why, and in which folder")
        return "; ".join(problems)
