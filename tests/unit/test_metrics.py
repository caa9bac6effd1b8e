# SPDX-License-Identifier: Apache-2.0
"""Names, labels and help of every metric are a promise to dashboards; a worker's series end with the worker."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from metric_labels import label_names

from kvrouter.router.common.ids import WorkerKey
from kvrouter.router.common.tally import Histogram
from kvrouter.router.proxy.circuit_breaker import BreakerState
from kvrouter.router.proxy.proxy_metrics import ANSWER_OUTCOMES
from kvrouter.router.proxy.upstream.failure import Kind
from kvrouter.router.quality.prediction_judge import PredictionOutcome
from kvrouter.router.server.router_metrics import RouterMetrics
from kvrouter.router.streams.stream_metrics import RESYNCS
from kvrouter.router.telemetry.metric_registry import MAX_WORKER_LABEL_CHARS, OTHER_WORKER, MetricRegistry
from kvrouter.router.workers.stream_state import StreamState

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "metrics.json"

# Values of the label beside the worker's.
FURTHER_LABELS: dict[str, list[tuple[object]]] = {
    "kvrouter_stream_state": list(zip(StreamState)),
    "kvrouter_stream_resyncs": list(zip(RESYNCS)),
    "kvrouter_proxy_answers": list(zip(ANSWER_OUTCOMES)),
    "kvrouter_proxy_failures": list(zip(Kind)),
    "kvrouter_proxy_breaker_state": list(zip(BreakerState)),
    "kvrouter_predictions": list(zip(PredictionOutcome)),
}
WORKER, NAMESAKE = WorkerKey("m", "w0"), WorkerKey("other", "w0")


def described(registry: MetricRegistry) -> dict[str, dict[str, object]]:
    """Of each metric: type, help, labels, what shows before anything was counted, and a histogram's buckets."""
    found: dict[str, dict[str, object]] = {}
    for metric in registry._collector_to_names:
        (family,) = metric.collect()
        labels = label_names(metric)
        shown = list(dict.fromkeys(tuple(sample.labels[name] for name in labels) for sample in family.samples))
        one = found[family.name] = {"type": family.type, "help": family.documentation, "labels": list(labels)}
        if labels and shown:
            one["shown"] = ["/".join(values) for values in shown]
        if family.type == "histogram":
            assert isinstance(metric, Histogram)
            one["buckets"] = list(metric.labels(*labels).bounds)
    return found


def series_of(registry: MetricRegistry, label: str) -> dict[tuple[str, ...], float]:
    """Values of a worker's series by name and further labels."""
    return {
        (sample.name, *(value for name, value in sample.labels.items() if name != "worker")): sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.labels.get("worker") == label
    }


def test_names_types_help_and_labels_of_all_metrics_stay() -> None:
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
    monkeypatch.setattr("kvrouter.router.telemetry.metric_registry.MAX_WORKER_LABELS", 3)
    registry = MetricRegistry()
    counter = registry.worker_counter("tries_total", "Tries")
    late = WorkerKey("m", "w9", 0)
    assert registry.worker_label(WorkerKey("m", "w\n0", 0)) == "w_0"
    assert registry.worker_label(WorkerKey("m", "w0", 2)) == "w0@2"
    long = registry.worker_label(WorkerKey("m", "x" * 500, 7))
    assert len(long) == MAX_WORKER_LABEL_CHARS and long.endswith("@7")
    assert registry.worker_label(late) == OTHER_WORKER
    counter(late).inc()
    registry.forget_worker(WorkerKey("m", "w0", 2))
    counter(late).inc()
    assert series_of(registry, OTHER_WORKER) == series_of(registry, "w9") == {("kvrouter_tries_total",): 1}


def test_no_series_of_a_worker_is_left_unless_another_has_its_label() -> None:
    registry = MetricRegistry()
    metrics = RouterMetrics(registry)
    metrics.proxy.answers(WORKER)("ok").inc()
    metrics.placement.load.requests(NAMESAKE).set(3)
    for metric, names in registry._collector_to_names.items():
        if "worker" in label_names(metric):
            for values in FURTHER_LABELS.get(names[0], [()]):
                metric.labels("w0", *values)  # type: ignore[attr-defined]
    held = series_of(registry, "w0")
    assert len({name for name, *_ in held}) > 30
    registry.forget_worker(WORKER)
    assert series_of(registry, "w0") == held
    registry.forget_worker(NAMESAKE)
    assert series_of(registry, "w0") == {}
    # What was kept of the label counts from zero.
    metrics.proxy.answers(WORKER)("ok").inc()
    assert series_of(registry, "w0") == {("kvrouter_proxy_answers_total", "ok"): 1}
