# SPDX-License-Identifier: Apache-2.0
"""An engine's load as its /metrics report it, in vLLM's names. Pure.

It corrects the router's count: requests that bypassed the routers, and reservations that nobody released.
"""

from __future__ import annotations

import re

import msgspec

WAITING = b"vllm:num_requests_waiting"
RUNNING = b"vllm:num_requests_running"
KV_USAGE = b"vllm:kv_cache_usage_perc"

_LINE = re.compile(
    rb"^(" + b"|".join((WAITING, RUNNING, KV_USAGE)) + rb")(?:\{([^}\n]*)\})? +([-+0-9.eE]+)(?: +-?\d+)?\r?$",
    re.MULTILINE,
)
_ENGINE = re.compile(rb'(?:^|,) *engine="(\d{1,9})"')


class EngineLoad(msgspec.Struct, frozen=True, array_like=True):
    """One engine core's: requests that wait and run, and how full its KV cache is, 0 to 1."""

    waiting: int
    running: int
    kv_usage: float = 0.0

    @property
    def requests(self) -> int:
        return self.waiting + self.running


def parse_engine_load(page: bytes, dp_rank: int) -> EngineLoad | None:
    """The load of the core with this rank; None if the page has no such numbers.

    An engine with several cores labels them with `engine`; if none has that rank, the only core counts."""
    found: dict[int | None, dict[bytes, float]] = {}
    for name, labels, value in _LINE.findall(page):
        engine = _ENGINE.search(labels)
        core = found.setdefault(int(engine[1]) if engine else None, {})
        try:
            # Several models in one process, or LoRA adapters, have a line each.
            core[name] = core.get(name, 0.0) + float(value)
        except ValueError:
            return None
    if len(found) == 1:
        (core,) = found.values()
    else:
        core = found.get(dp_rank, {})
    if WAITING not in core or RUNNING not in core:
        return None
    usage = min(max(core.get(KV_USAGE, 0.0), 0.0), 1.0)
    return EngineLoad(_count(core[WAITING]), _count(core[RUNNING]), usage)


def _count(value: float) -> int:
    # An engine that reports 1e300 is broken; its report must not decide for hours.
    return int(min(max(value, 0.0), 1e6))
