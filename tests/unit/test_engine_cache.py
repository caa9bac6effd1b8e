# SPDX-License-Identifier: Apache-2.0
"""Descriptions of KV caches on engines' metrics pages."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, Gauge, generate_latest

from kvrouter.contract.worker_status import MAX_COUNT, EngineCache
from kvrouter.router.follow.streams.peer_view import engine_cache, state_fields
from kvrouter.router.model.engines.sglang.description import SGLANG
from kvrouter.router.model.engines.vllm.description import VLLM
from kvrouter.router.model.workers.engine_cache import CACHING_OFF, cache_problem
from kvrouter.router.model.workers.stream_state import StreamState

# Fields of CacheConfig as vLLM 0.32.0 prints them, including values with quotes, braces and commas.
FIELDS = {
    "block_size": "128",
    "cache_dtype": "auto",
    "enable_prefix_caching": "True",
    "kv_cache_dtype_skip_layers": "['0', 'sliding_window']",
    "kv_cache_max_concurrency": "14.98",
    "kv_cache_size_tokens": "30720",
    "kv_offloading_backend": 'a "quoted}" name, block_size="7"',
    "mamba_block_size": "None",
    "num_gpu_blocks": "240",
    "num_gpu_blocks_override": "17",
}


def vllm_page(*cores: dict[str, str]) -> bytes:
    """Return a page as vLLM writes it: a gauge of 1 whose labels are the fields."""
    registry = CollectorRegistry()
    labels = sorted({*FIELDS, "engine"})
    gauge = Gauge("vllm:cache_config_info", "Information of the LLMEngine CacheConfig", labels, registry=registry)
    for core in cores:
        gauge.labels(**(FIELDS | core)).set(1)
    return generate_latest(registry)


def test_vllm_describes_its_cache() -> None:
    page = vllm_page({"engine": "0"})
    cache = EngineCache(prefix_caching=True, block_size=128, blocks=240, tokens=30_720)
    assert VLLM.cache_in(page, 0) == cache
    # The only core on a page belongs to the worker, whatever its number is; the load is read in the same way.
    assert VLLM.cache_in(page, 3) == cache
    assert not cache_problem(cache)


def test_each_core_has_its_share_of_the_blocks() -> None:
    page = vllm_page({"engine": "0"}, {"engine": "1", "kv_cache_size_tokens": "7"})
    assert VLLM.cache_in(page, 1) == EngineCache(prefix_caching=True, block_size=128, blocks=120, tokens=7)
    assert VLLM.cache_in(page, 2) is None


def test_an_engine_without_prefix_caching_says_so() -> None:
    cache = VLLM.cache_in(vllm_page({"engine": "0", "enable_prefix_caching": "False"}), 0)
    assert cache is not None and cache_problem(cache) == CACHING_OFF


@pytest.mark.parametrize("value", ["None", "", "many", "-1", "0", "nan", "inf", "1e400", str(2 * MAX_COUNT)])
def test_an_invalid_count_is_unknown(value: str) -> None:
    fields = {"engine": "0", "block_size": value, "num_gpu_blocks": value, "enable_prefix_caching": value}
    assert VLLM.cache_in(vllm_page(fields), 0) == EngineCache(tokens=30_720)


@pytest.mark.parametrize("page", [b"", b"vllm:cache_config_info 1.0\n", b'vllm:cache_config_info{block_size="1'])
def test_a_page_without_the_metric_says_nothing(page: bytes) -> None:
    assert VLLM.cache_in(page, 0) is None
    assert SGLANG.cache_in(page, 0) is None


def test_sglang_describes_its_pool() -> None:
    page = b"".join(
        b'sglang:%s{dp_rank="%d",model_name="m"} %s\n' % (name, rank, value)
        for rank, pages in ((0, b"100.0"), (1, b"90.0"))
        for name, value in ((b"page_size", b"64.0"), (b"num_pages", pages), (b"max_total_num_tokens", b"6.4e+03"))
    )
    assert SGLANG.cache_in(page, 1) == EngineCache(block_size=64, blocks=90, tokens=6_400)
    assert SGLANG.cache_in(page, 2) is None
    assert SGLANG.cache_in(b"sglang:page_size 1.0\n", 5) == EngineCache(block_size=1)


def test_the_description_of_a_cache_is_read_back_from_the_store() -> None:
    cache = EngineCache(prefix_caching=False, block_size=16, blocks=3, tokens=48)
    fields = state_fields(StreamState.LIVE, "", True, None, cache=cache)
    assert engine_cache(fields) == cache
    # A router of another version, or another program, wrote these values.
    for stored_fields in ({}, {"engine_cache": b"no JSON"}, {"engine_cache": b'{"block_size": 0}'}):
        assert engine_cache(stored_fields) == EngineCache()
