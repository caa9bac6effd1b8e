# SPDX-License-Identifier: Apache-2.0
"""The router reads an engine's description of its KV cache as vLLM's own code writes it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("vllm")

from prometheus_client import CollectorRegistry, Gauge, generate_latest
from vllm.config.cache import CacheConfig
from vllm.v1.metrics.loggers import PrometheusStatLogger

from kvrouter.contract.worker_status import EngineCache
from kvrouter.router.model.engines.vllm.description import VLLM

pytestmark = pytest.mark.engine


def page_of(config: CacheConfig, engines: list[int]) -> bytes:
    """Return the lines that vLLM's logger writes for these cores."""
    registry = CollectorRegistry()

    def gauge(**options: Any) -> Gauge:
        return Gauge(**options, registry=registry)

    logger = SimpleNamespace(_gauge_cls=gauge, engine_indexes=engines)
    PrometheusStatLogger.log_metrics_info(cast(PrometheusStatLogger, logger), "cache_config", config)
    return generate_latest(registry)


@pytest.mark.parametrize("is_on", [True, False])
def test_the_cache_of_each_core_is_read(is_on: bool) -> None:
    config = CacheConfig(block_size=128, enable_prefix_caching=is_on)
    # vLLM's engine client sets the blocks of all cores together, but the tokens of one core.
    config.num_gpu_blocks, config.kv_cache_size_tokens = 480, 30_720
    expected = EngineCache(prefix_caching=is_on, block_size=128, blocks=240, tokens=30_720)
    assert VLLM.cache_in(page_of(config, [0, 1]), 1) == expected


def test_what_is_not_known_yet_is_left_out() -> None:
    page = page_of(CacheConfig(block_size=16), [0])
    assert VLLM.cache_in(page, 0) == EngineCache(prefix_caching=True, block_size=16)
