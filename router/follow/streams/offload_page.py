# SPDX-License-Identifier: Apache-2.0
"""The offload tier's lines on an engine's /metrics page (`engine_patch/offload/metrics.py`), and rises of counters. Pure."""

from __future__ import annotations

import re

_ENGINE = re.compile(rb'(?:^|,) *engine="(\d{1,9})"')

# For how long a problem is shown after the last rise of its counter: long enough to be seen by a person who looks now
# and then.
NAMED_S = 600.0


def offload_lines(prefix: bytes, *names: bytes) -> re.Pattern[bytes]:
    """Return a pattern that finds these metrics on a page; its groups are the name, the labels and the value.

    Args:
        prefix: The beginning of the metrics' names after `vllm:kvrouter_offload_`.
        *names: The rest of each metric's name.
    """
    wanted = b"|".join(names)
    return re.compile(
        rb"^vllm:kvrouter_offload_" + prefix + rb"(" + wanted + rb")(?:\{([^}\n]*)\})? +([-+0-9.eE]+)\r?$", re.MULTILINE
    )


def offload_values(lines: re.Pattern[bytes], page: bytes, dp_rank: int) -> dict[bytes, float] | None:
    """Return the values of the core with this rank by their metrics' names, or None if the page has none.

    If only one core is on the page, its values are returned whatever its rank is, as in `parse_engine_load`.

    Args:
        lines: A pattern of `offload_lines`.
        page: The metrics page.
        dp_rank: The rank of the core.
    """
    cores: dict[int | None, dict[bytes, float]] = {}
    for name, labels, value in lines.findall(page):
        engine = _ENGINE.search(labels)
        try:
            cores.setdefault(int(engine[1]) if engine else None, {})[name] = float(value)
        except ValueError:
            return None
    return next(iter(cores.values())) if len(cores) == 1 else cores.get(dp_rank)


def whole_count(value: float) -> int:
    """Return the value of a counter as an int from 0 to 10^12."""
    return int(min(max(value, 0.0), 1e12))


class Rise:
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
