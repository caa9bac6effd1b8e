# SPDX-License-Identifier: Apache-2.0
"""What an engine's /metrics says of its offload tier (`engine_patch/offload/metrics.py`), and which of it is news.
Pure."""

from __future__ import annotations

import re

_ENGINE = re.compile(rb'(?:^|,) *engine="(\d{1,9})"')

# Long enough that a person sees it who looks now and then.
NAMED_S = 600.0


def offload_lines(prefix: bytes, *names: bytes) -> re.Pattern[bytes]:
    """Finds these metrics on a page: name, labels, value."""
    wanted = b"|".join(names)
    return re.compile(
        rb"^vllm:kvrouter_offload_" + prefix + rb"(" + wanted + rb")(?:\{([^}\n]*)\})? +([-+0-9.eE]+)\r?$", re.MULTILINE
    )


def offload_values(lines: re.Pattern[bytes], page: bytes, dp_rank: int) -> dict[bytes, float] | None:
    """By name, of the core with this rank; None where the page says nothing of it. See `parse_engine_load`."""
    found: dict[int | None, dict[bytes, float]] = {}
    for name, labels, value in lines.findall(page):
        engine = _ENGINE.search(labels)
        try:
            found.setdefault(int(engine[1]) if engine else None, {})[name] = float(value)
        except ValueError:
            return None
    return next(iter(found.values())) if len(found) == 1 else found.get(dp_rank)


def whole_count(value: float) -> int:
    return int(min(max(value, 0.0), 1e12))


class Rise:
    """Whether an engine's counter rose of late. Times: seconds, monotonic."""

    def __init__(self) -> None:
        self._count = 0
        self._rose_s = float("-inf")

    def observe(self, count: int, now: float) -> None:
        # Fewer: another life of the engine.
        if count > (self._count if count >= self._count else 0):
            self._rose_s = now
        self._count = count

    def is_recent(self, now: float) -> bool:
        return now < self._rose_s + NAMED_S
