# SPDX-License-Identifier: Apache-2.0
"""The load, the ranks and the process of an engine as its /metrics page reports them. Pure.

The reported load corrects the router's own count, which misses requests that bypassed the routers and includes
reservations that no router released.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache

import msgspec

from kvrouter.router.model.engines.engine import EngineGauges


class EngineLoad(msgspec.Struct, frozen=True, array_like=True):
    """The load of one engine core."""

    # The numbers of waiting and of running requests.
    waiting: int
    running: int
    # The used share of the KV cache, 0 to 1.
    kv_usage: float = 0.0

    @property
    def requests(self) -> int:
        """The number of waiting and running requests."""
        return self.waiting + self.running


@lru_cache
def _patterns(gauges: EngineGauges) -> tuple[re.Pattern[bytes], re.Pattern[bytes]]:
    """Return the pattern of a line with one of the gauges, and the pattern of the rank among the line's labels."""
    names = b"|".join(map(re.escape, (gauges.waiting, gauges.running, gauges.kv_usage)))
    line = rb"^(" + names + rb")(?:\{([^}\n]*)\})? +([-+0-9.eE]+)(?: +-?\d+)?\r?$"
    return re.compile(line, re.MULTILINE), re.compile(rb"(?:^|,) *" + gauges.rank_label + rb'="(\d{1,9})"')


def _numbers(page: bytes, gauges: EngineGauges) -> Iterator[tuple[bytes, int | None, bytes]]:
    """Yield name, rank and value of each line with one of the gauges; the rank is None if the line has no rank."""
    lines, rank = _patterns(gauges)
    for name, labels, value in lines.findall(page):
        rank_match = rank.search(labels)
        yield name, int(rank_match[1]) if rank_match else None, value


def engine_ranks(page: bytes, gauges: EngineGauges) -> tuple[int, ...]:
    """Return the ranks that an engine's /metrics page names, in ascending order."""
    ranks = {rank for name, rank, _ in _numbers(page, gauges) if name == gauges.running and rank is not None}
    return tuple(sorted(ranks))


def engine_life(page: bytes, gauges: EngineGauges) -> float | None:
    """Return the number on the /metrics page that differs between any two engine processes, or None if it has none."""
    match = gauges.life.search(page)
    try:
        return None if match is None else float(match[1])
    except ValueError:
        return None


def parse_engine_load(page: bytes, dp_rank: int, gauges: EngineGauges) -> EngineLoad | None:
    """Return the load of the core with this rank, or None if the page does not have the numbers.

    An engine with several cores labels them with their ranks. The only core of an engine counts with any label.
    """
    cores: dict[int | None, dict[bytes, float]] = {}
    for name, rank, value in _numbers(page, gauges):
        core = cores.setdefault(rank, {})
        try:
            # Several models in one process have a line each, and so do LoRA adapters.
            core[name] = core.get(name, 0.0) + float(value)
        except ValueError:
            return None
    if len(cores) == 1:
        (core,) = cores.values()
    else:
        core = cores.get(dp_rank, {})
    if gauges.waiting not in core or gauges.running not in core:
        return None
    usage = min(max(core.get(gauges.kv_usage, 0.0), 0.0), 1.0)
    return EngineLoad(_count(core[gauges.waiting]), _count(core[gauges.running]), usage)


def _count(value: float) -> int:
    # An engine that reports 1e300 is broken; such a number must not affect choices for hours.
    return int(min(max(value, 0.0), 1e6))
