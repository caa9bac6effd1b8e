# SPDX-License-Identifier: Apache-2.0
"""An engine's load, ranks and life as its /metrics report them. Pure; the names are the engine's.

It corrects the router's count: requests that bypassed the routers, and reservations that nobody released.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache

import msgspec

from kvrouter.router.model.engines.engine import EngineGauges


class EngineLoad(msgspec.Struct, frozen=True, array_like=True):
    """One engine core's: requests that wait and run, and how full its KV cache is, 0 to 1."""

    waiting: int
    running: int
    kv_usage: float = 0.0

    @property
    def requests(self) -> int:
        return self.waiting + self.running


@lru_cache
def _patterns(gauges: EngineGauges) -> tuple[re.Pattern[bytes], re.Pattern[bytes]]:
    """Of a line with one of the numbers, and of the rank among its labels."""
    names = b"|".join(map(re.escape, (gauges.waiting, gauges.running, gauges.kv_usage)))
    line = rb"^(" + names + rb")(?:\{([^}\n]*)\})? +([-+0-9.eE]+)(?: +-?\d+)?\r?$"
    return re.compile(line, re.MULTILINE), re.compile(rb"(?:^|,) *" + gauges.rank_label + rb'="(\d{1,9})"')


def _numbers(page: bytes, gauges: EngineGauges) -> Iterator[tuple[bytes, int | None, bytes]]:
    """Name, rank and value of each line."""
    lines, rank = _patterns(gauges)
    for name, labels, value in lines.findall(page):
        named = rank.search(labels)
        yield name, int(named[1]) if named else None, value


def engine_ranks(page: bytes, gauges: EngineGauges) -> tuple[int, ...]:
    """The ranks that an engine's /metrics names, in order; empty where it names none."""
    named = {rank for name, rank, _ in _numbers(page, gauges) if name == gauges.running and rank is not None}
    return tuple(sorted(named))


def engine_life(page: bytes, gauges: EngineGauges) -> float | None:
    """A number that another process would have otherwise; None where the page has none."""
    found = gauges.life.search(page)
    try:
        return None if found is None else float(found[1])
    except ValueError:
        return None


def parse_engine_load(page: bytes, dp_rank: int, gauges: EngineGauges) -> EngineLoad | None:
    """The load of the core with this rank; None if the page has no such numbers.

    An engine with several cores labels them; if none has that rank, the only core counts."""
    found: dict[int | None, dict[bytes, float]] = {}
    for name, rank, value in _numbers(page, gauges):
        core = found.setdefault(rank, {})
        try:
            # Several models in one process, or LoRA adapters, have a line each.
            core[name] = core.get(name, 0.0) + float(value)
        except ValueError:
            return None
    if len(found) == 1:
        (core,) = found.values()
    else:
        core = found.get(dp_rank, {})
    if gauges.waiting not in core or gauges.running not in core:
        return None
    usage = min(max(core.get(gauges.kv_usage, 0.0), 0.0), 1.0)
    return EngineLoad(_count(core[gauges.waiting]), _count(core[gauges.running]), usage)


def _count(value: float) -> int:
    # An engine that reports 1e300 is broken; its report must not decide for hours.
    return int(min(max(value, 0.0), 1e6))
