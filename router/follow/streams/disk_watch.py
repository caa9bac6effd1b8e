# SPDX-License-Identifier: Apache-2.0
"""What an engine's /metrics says of the disk below its offload tier (`engine_patch/offload/metrics.py`). Pure.

Nothing damaged is ever loaded, so credit stays as it is: the disk is what needs somebody."""

from __future__ import annotations

import msgspec

from kvrouter.router.follow.streams.offload_page import Rise, offload_lines, offload_values, whole_count

CORRUPT = b"corrupt_total"
OFF = b"off"

_LINES = offload_lines(b"disk_", CORRUPT, OFF)


class DiskSigns(msgspec.Struct, frozen=True):
    """corrupt: records that were not what had been written, since the engine started. off: the disk is left alone."""

    corrupt: int = 0
    off: bool = False


def parse_disk(page: bytes, dp_rank: int) -> DiskSigns | None:
    """Of the core with this rank; None where the page says nothing of a disk. See `parse_engine_load`."""
    core = offload_values(_LINES, page, dp_rank)
    if core is None:
        return None
    return DiskSigns(whole_count(core.get(CORRUPT, 0.0)), core.get(OFF, 0.0) > 0)


class DiskWatch:
    """One engine's disk. Times: seconds, monotonic."""

    def __init__(self) -> None:
        self.signs = DiskSigns()
        self._rise = Rise()

    def observe(self, signs: DiskSigns, now: float) -> None:
        self._rise.observe(signs.corrupt, now)
        self.signs = signs

    def problem(self, now: float) -> str:
        """What is wrong with the disk; empty when nothing was of late."""
        problems = []
        if self._rise.is_recent(now):
            problems.append(
                f"its offload disk returned bad data: {self.signs.corrupt} records since the engine started, none of which was "
                "loaded; the engine's log names the folder: check that disk"
            )
        if self.signs.off:
            problems.append("its offload disk is left alone: the engine's log says why, and in which folder")
        return "; ".join(problems)
