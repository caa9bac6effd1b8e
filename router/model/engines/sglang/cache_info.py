# SPDX-License-Identifier: Apache-2.0
"""The KV cache as the samples of SGLang's metrics page describe it. Pure.

The page does not say whether the radix cache is on. Source: SGLang 0.5.23 srt/observability/metrics_collector.py:1289.
"""

from __future__ import annotations

import re

from kvrouter.router.model.workers.engine_cache import EngineCache, positive_count

_LINE = re.compile(
    rb"^sglang:(page_size|num_pages|max_total_num_tokens)(?:\{([^}\n]*)\})? +([-+0-9.eE]+)(?: +-?\d+)?\r?$",
    re.MULTILINE,
)
_RANK = re.compile(rb'(?:^|,) *dp_rank="(\d{1,9})"')


def cache_in(page: bytes, dp_rank: int) -> EngineCache | None:
    """Return the cache of the core with this rank, None if the page does not describe it."""
    cores: dict[int | None, dict[bytes, bytes]] = {}
    for name, labels, value in _LINE.findall(page):
        rank = _RANK.search(labels)
        cores.setdefault(int(rank[1]) if rank else None, {})[name] = value
    core = next(iter(cores.values())) if len(cores) == 1 else cores.get(dp_rank)
    if core is None:
        return None
    return EngineCache(
        block_size=positive_count(core.get(b"page_size", b"")),
        blocks=positive_count(core.get(b"num_pages", b"")),
        tokens=positive_count(core.get(b"max_total_num_tokens", b"")),
    )
