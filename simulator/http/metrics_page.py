# SPDX-License-Identifier: Apache-2.0
"""A replica's /metrics page, under the names that vLLM 0.32.0 uses and routers read."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvrouter.simulator.engine.realtime import Engine


class _Page:
    """A collector that reads an engine's state when it is scraped, so that no metric has to be kept up to date."""

    def __init__(self, engine: Engine, model: str, started_s: float, dp_rank: int, prefix_caching: bool) -> None:
        self._engine = engine
        self._labels = (model, str(dp_rank))
        self._started_s = started_s
        # Fields of vLLM's CacheConfig, as Python prints them.
        self._cache_config = {
            "block_size": str(engine.replica.geometry.scheduler_block_size),
            "enable_prefix_caching": str(prefix_caching),
            "engine": str(dp_rank),
            "num_gpu_blocks": str(engine.replica.pool.num_blocks),
        }

    def collect(self) -> Iterator[Metric]:
        engine = self._engine
        scheduler = engine.replica.scheduler
        for name, help_text, value in (
            ("num_requests_running", "Number of requests in model execution batches.", engine.num_running),
            ("num_requests_waiting", "Number of requests waiting to be processed.", engine.num_waiting),
            ("kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", scheduler.cache.usage),
        ):
            gauge = GaugeMetricFamily(f"vllm:{name}", help_text, labels=("model_name", "engine"))
            gauge.add_metric(self._labels, value)
            yield gauge
        for name, help_text, value in (
            ("prefix_cache_queries", "Prefix cache queries, in tokens.", scheduler.queried_tokens),
            ("prefix_cache_hits", "Prefix cache hits, in tokens.", scheduler.hit_tokens),
            ("num_preemptions", "Cumulative number of preemptions.", scheduler.preemptions),
            ("prompt_tokens", "Number of prefill tokens processed.", engine.prompt_tokens),
            ("generation_tokens", "Number of generation tokens processed.", engine.generated_tokens),
        ):
            counter = CounterMetricFamily(f"vllm:{name}", help_text, labels=("model_name", "engine"))
            counter.add_metric(self._labels, value)
            yield counter
        cache_config = GaugeMetricFamily(
            "vllm:cache_config_info", "Information of the LLMEngine CacheConfig.", labels=tuple(self._cache_config)
        )
        cache_config.add_metric(tuple(self._cache_config.values()), 1)
        yield cache_config
        # prometheus_client's own collector would report when this process began; here many replicas live in one
        # process.
        yield GaugeMetricFamily(
            "process_start_time_seconds", "Start time of the process since unix epoch in seconds.", self._started_s
        )


def metrics_page(
    engine: Engine, model: str, started_s: float, dp_rank: int = 0, *, prefix_caching: bool = True
) -> bytes:
    """Return the page as Prometheus text; `started_s` is the wall-clock time at which this replica's life began."""
    registry = CollectorRegistry()
    registry.register(_Page(engine, model, started_s, dp_rank, prefix_caching))
    return generate_latest(registry)
