# SPDX-License-Identifier: Apache-2.0
"""The KV cache as `vllm:cache_config_info` on vLLM's metrics page describes it. Pure.

The labels are all fields of CacheConfig as Python prints them, one line for each engine core. Source: vLLM 0.32.0
v1/metrics/loggers.py:1114 (log_metrics_info), config/cache.py:322 (metrics_info).
"""

from __future__ import annotations

import re

from kvrouter.router.model.workers.engine_cache import EngineCache, positive_count

_LINE = re.compile(rb"^vllm:cache_config_info\{(.*)\} +1(?:\.0)?(?: +-?\d+)?\r?$", re.MULTILINE)
_LABEL = re.compile(rb'([A-Za-z_]\w*)="((?:[^"\\\n]|\\.)*)"')
_SWITCH = {b"True": True, b"False": False}


def cache_in(page: bytes, dp_rank: int) -> EngineCache | None:
    """Return the cache of the core with this rank, None if the page does not describe it."""
    cores = [dict(_LABEL.findall(labels)) for labels in _LINE.findall(page)]
    own_cores = [core for core in cores if core.get(b"engine") == b"%d" % dp_rank]
    if len(cores) != 1 and len(own_cores) != 1:
        return None
    (core,) = cores if len(cores) == 1 else own_cores
    # Each core's line has the sum of the blocks of all cores (v1/engine/core_client.py:850).
    blocks = positive_count(core.get(b"num_gpu_blocks", b""))
    return EngineCache(
        prefix_caching=_SWITCH.get(core.get(b"enable_prefix_caching", b"")),
        block_size=positive_count(core.get(b"block_size", b"")),
        blocks=None if blocks is None else blocks // len(cores) or None,
        tokens=positive_count(core.get(b"kv_cache_size_tokens", b"")),
    )
