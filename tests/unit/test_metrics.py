# SPDX-License-Identifier: Apache-2.0
"""Names, labels and help of every metric are a promise to dashboards; a worker's series end with the worker."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvrouter.router.app.core.resident_blocks import ResidentBlocks
from kvrouter.router.app.server.router_metrics import RouterMetrics
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.base.common.tally import Histogram
from kvrouter.router.base.telemetry.metric_registry import MAX_WORKER_LABEL_CHARS, OTHER, MetricRegistry
from kvrouter.router.follow.streams.stream_metrics import RESYNCS
from kvrouter.router.model.upstream.failure import Kind
from kvrouter.router.model.workers.stream_state import StreamState
from kvrouter.router.observe.quality.prediction_judge import PredictionOutcome, PullOutcome
from kvrouter.router.serve.proxy.circuit_breaker import BreakerState
from kvrouter.router.serve.proxy.proxy_metrics import ANSWER_OUTCOMES
from tests.support.metric_labels import label_names

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "metrics.json"

# Values of the label that a metric has beside the worker's labels.
FURTHER_LABELS: dict[str, list[tuple[object]]] = {
    "kvrouter_stream_state": list(zip(StreamState)),
    "kvrouter_stream_resyncs": list(zip(RESYNCS)),
    "kvrouter_proxy_answers": list(zip(ANSWER_OUTCOMES)),
    "kvrouter_proxy_failures": list(zip(Kind)),
    "kvrouter_proxy_breaker_state": list(zip(BreakerState)),
    "kvrouter_predictions": list(zip(PredictionOutcome)),
    "kvrouter_peer_pulls": list(zip(PullOutcome)),
}
WORKER, NAMESAKE = WorkerKey("m", "w0"), WorkerKey("n", "w0")
# Both workers have the same labels.
LOOKALIKE = WorkerKey("m", "w0@1", 0), WorkerKey("m", "w0", 1)


def described(registry: MetricRegistry) -> dict[str, dict[str, object]]:
    """Return each metric's type, help, labels, series shown before any count, and a histogram's buckets."""
    metrics: dict[str, dict[str, object]] = {}
    for metric in registry._collector_to_names:
        (family,) = metric.collect()
        labels = label_names(metric)
        shown = list(dict.fromkeys(tuple(sample.labels[name] for name in labels) for sample in family.samples))
        description = metrics[family.name] = {"type": family.type, "help": family.documentation, "labels": list(labels)}
        # The labels of `kvrouter_build_info` describe the running program, so they are no promise.
        if labels and shown and family.name != "kvrouter_build_info":
            description["shown"] = ["/".join(values) for values in shown]
        if family.type == "histogram":
            assert isinstance(metric, Histogram)
            description["buckets"] = list(metric.labels(*labels).bounds)
    return metrics


def series_of(registry: MetricRegistry, worker: str | None, model: str = "m") -> dict[tuple[str, ...], float]:
    """Return a worker's series by name and further labels; None as the worker means those of the model alone."""
    return {
        (
            sample.name,
            *(value for name, value in sample.labels.items() if name not in ("model", "worker")),
        ): sample.value
        for family in registry.collect()
        for sample in family.samples
        if (sample.labels.get("model"), sample.labels.get("worker")) == (model, worker)
    }


def test_the_metrics_equal_the_recorded_list() -> None:
    registry = MetricRegistry()
    RouterMetrics(registry)
    assert described(registry) == json.loads(GOLDEN.read_text())


def test_two_registries_share_nothing() -> None:
    first, second = MetricRegistry(), MetricRegistry()
    counted, _ = RouterMetrics(first), RouterMetrics(second)
    counted.core.streams.rewrites(WORKER).inc()
    assert series_of(first, "w0") == {("kvrouter_index_rewrites_total",): 1}
    assert series_of(second, "w0") == {}


def test_worker_labels_are_short_printable_and_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrouter.router.base.telemetry.metric_registry.MAX_WORKER_LABELS", 3)
    registry = MetricRegistry()
    counter = registry.worker_counter("tries_total", "Tries")
    late = WorkerKey("m", "w9", 0)
    assert registry.worker_labels(WorkerKey("m\t1", "w\n0", 0)) == ("m_1", "w_0")
    assert registry.worker_labels(WorkerKey("m", "w0", 2)) == ("m", "w0@2")
    model, long = registry.worker_labels(WorkerKey("y" * 500, "x" * 500, 7))
    assert len(model) == len(long) == MAX_WORKER_LABEL_CHARS and long.endswith("@7")
    assert registry.worker_labels(late) == OTHER
    counter(late).inc()
    registry.forget_worker(WorkerKey("m", "w0", 2))
    counter(late).inc()
    assert series_of(registry, *OTHER) == series_of(registry, "w9") == {("kvrouter_tries_total",): 1}


def test_models_have_series_of_their_own_up_to_a_bound_and_these_end_with_their_last_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvrouter.router.base.telemetry.metric_registry.MAX_MODEL_LABELS", 2)
    registry = MetricRegistry()
    tries = registry.model_counters("tries_total", "Tries", how=("well", "badly"))
    for model in ("m", "n", "late"):
        tries(model)["well"].inc()
    fresh = {("kvrouter_tries_total", "well"): 1, ("kvrouter_tries_total", "badly"): 0}
    assert series_of(registry, None) == series_of(registry, None, "n") == series_of(registry, None, "other") == fresh
    workers = [WorkerKey("m", "w0"), WorkerKey("m", "w1"), WorkerKey("n", "w0")]
    for worker in workers:
        registry.worker_labels(worker)
    registry.forget_worker(workers[0])
    assert series_of(registry, None) == fresh
    registry.forget_worker(workers[1])
    assert series_of(registry, None) == {} and series_of(registry, None, "n") == fresh
    # Another model fits again, and the counters of this one start from zero.
    tries("m")["badly"].inc()
    assert series_of(registry, None) == {("kvrouter_tries_total", "well"): 0, ("kvrouter_tries_total", "badly"): 1}


def test_no_counter_has_a_created_series() -> None:
    registry = MetricRegistry()
    RouterMetrics(registry).quality.of_worker(WORKER).ttft.observe(1)
    page = asyncio.run(registry.own_page()).decode()
    assert "kvrouter_ttft_seconds_count" in page and "_created" not in page


def test_resident_blocks_are_those_of_the_workers_now_with_bounded_labels() -> None:
    registry = MetricRegistry()
    metrics = RouterMetrics(registry)
    held = {"g0:GPU": 3, "g63:STORAGE:a": 4, "g63:STORAGE:b": 5, "g-:FS": 6, "g64:GPU": 7, "g9999:GPU": 8, "g1:new": 9}
    metrics.core.resident_blocks.counts = lambda: [(WORKER, held), (NAMESAKE, {"g0:GPU": 1})]
    name = "kvrouter_resident_blocks"
    assert series_of(registry, "w0") == {
        (name, "0", "GPU"): 3,
        (name, "63", "STORAGE"): 9,
        (name, "-", "FS"): 6,
        (name, "other", "GPU"): 15,
        (name, "1", "other"): 9,
    }
    assert series_of(registry, "w0", "n") == {(name, "0", "GPU"): 1}
    (family,) = text_string_to_metric_families(metrics.core.resident_blocks.text())
    (collected,) = metrics.core.resident_blocks.collect()
    assert [(sample.labels, sample.value) for sample in family.samples] == [
        (sample.labels, sample.value) for sample in collected.samples
    ]
    metrics.core.resident_blocks.counts = tuple
    assert series_of(registry, "w0") == {}


def test_no_series_of_a_worker_is_left_unless_another_has_its_labels() -> None:
    registry = MetricRegistry()
    metrics = RouterMetrics(registry)
    first, second = LOOKALIKE
    metrics.proxy.answers(first)("ok").inc()
    metrics.placement.load.requests(second).set(3)
    metrics.placement.load.requests(NAMESAKE).set(4)
    for metric, names in registry._collector_to_names.items():
        if "worker" in label_names(metric) and not isinstance(metric, ResidentBlocks):
            for values in FURTHER_LABELS.get(names[0], [()]):
                metric.labels("m", "w0@1", *values)  # type: ignore[attr-defined]
    series = series_of(registry, "w0@1")
    assert len({name for name, *_ in series}) > 30
    registry.forget_worker(first)
    assert series_of(registry, "w0@1") == series
    registry.forget_worker(second)
    assert series_of(registry, "w0@1") == {}
    # A worker of another model with the same name is a different worker.
    assert series_of(registry, "w0", "n") == {("kvrouter_load_requests",): 4}
    # The counters of these labels start from zero.
    metrics.proxy.answers(first)("ok").inc()
    assert series_of(registry, "w0@1") == {("kvrouter_proxy_answers_total", "ok"): 1}
