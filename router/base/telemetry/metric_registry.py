# SPDX-License-Identifier: Apache-2.0
"""The registry of a process's metrics: makes them, labels workers in them, and drops a worker's series.

Each room declares its metrics beside the code that counts (`*_metrics.py`); `router/app/server/router_metrics.py`
assembles them. Labels come from small closed sets: never a request id, a hash or a text of a client. The series of a
worker have its model and its name as labels, both as registered, printable and short. At most MAX_WORKER_LABELS such
pairs exist; all further workers share `other`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from functools import cache, partial
from itertools import product
from types import SimpleNamespace
from typing import Any, TypeVar, cast

from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.base.common.tally import Counter, CounterSeries, Histogram, TextCollector

# A fleet has tens to hundreds of workers, and each costs about 15 series here. Without a limit, a client that registers
# workers in a loop would fill Prometheus.
MAX_WORKER_LABELS = 1_024
MAX_WORKER_LABEL_CHARS = 80
OTHER_WORKER = "other"

# In the declaration of a metric, the label WORKER stands for both.
MODEL, WORKER = "model", "worker"

AnyMetric = TypeVar("AnyMetric", Counter, Gauge, Histogram)
Child = TypeVar("Child")
Key = TypeVar("Key")
Labels = tuple[str, ...]
Values = dict[str, Iterable[str]]
# The label values of a worker: its model and its name.
WorkerLabels = tuple[str, str]
OTHER: WorkerLabels = (OTHER_WORKER, OTHER_WORKER)
# The limit of models with their own series; a fleet has a few.
MAX_MODEL_LABELS = 256
Children = Callable[[str], Child]
PerWorker = Callable[[WorkerKey], Child]
PerModel = Callable[[str], Child]


class MetricRegistry(CollectorRegistry):
    """The registry of one process or test; several can exist side by side.

    `internal_errors` and `task_failures` are counted by all rooms.
    """

    def __init__(self) -> None:
        super().__init__()
        self._collectors: list[Collector] = []
        self._measures: list[Callable[[], None]] = []
        self._worker_labels: dict[WorkerKey, WorkerLabels] = {}
        # Each metric of workers, with the values of its further labels: the series that end with a worker.
        self._of_workers: list[tuple[Counter | Gauge | Histogram, list[tuple[str, ...]]]] = []
        self._children_by_worker: list[dict[WorkerKey, Any]] = []
        # Each metric that has a model's label but no worker's, with the values of its further labels.
        self._of_models: list[tuple[Counter | Gauge | Histogram, list[tuple[str, ...]]]] = []
        self._children_by_model: list[dict[str, Any]] = []
        self._models: dict[str, str] = {}
        self.internal_errors = self.counter("internal_errors_total", "Unhandled exceptions: each is a bug", "where")
        self.task_failures = self.counter(
            "task_failures_total", "Long-lived tasks that ended and were started again", "task"
        )

    def counter(self, name: str, text: str, *labels: str, **values: Iterable[str]) -> Counter:
        """Make a counter. `values` lists the values of each further label; a worker's series of them end with it."""
        return self._make(Counter, name, text, labels, values)

    def gauge(self, name: str, text: str, *labels: str, **values: Iterable[str]) -> Gauge:
        """Make a gauge. `values` lists the values of each further label; a worker's series of them end with it."""
        return self._make(Gauge, name, text, labels, values)

    def histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        """Make a histogram. `buckets` are the upper bounds, without the last one, which is infinite."""
        return self._make(Histogram, name, text, labels, {}, buckets=buckets)

    def counters(self, name: str, text: str, **label: Iterable[str]) -> dict[str, CounterSeries]:
        """Make one counter series for each value of the label; all show from the beginning."""
        counter = self.counter(name, text, **label)
        return {value: counter.labels(value) for values in label.values() for value in values}

    def worker_counter(self, name: str, text: str) -> PerWorker[CounterSeries]:
        """Make a counter of workers, and return a function from a worker to its series."""
        return self.per_worker(self.counter(name, text, WORKER).labels)

    def worker_gauge(self, name: str, text: str) -> PerWorker[Gauge]:
        """Make a gauge of workers, and return a function from a worker to its series."""
        return self.per_worker(self.gauge(name, text, WORKER).labels)

    def worker_counters(self, name: str, text: str, **label: Iterable[str]) -> PerWorker[Children[CounterSeries]]:
        """Make a counter of workers with one series for each value of a label; each shows from its first use."""
        counter = self.counter(name, text, WORKER, **label)
        return self.per_worker(lambda model, worker: cache(partial(counter.labels, model, worker)))

    def worker_gauges(self, name: str, text: str, **label: Iterable[str]) -> PerWorker[Children[Gauge]]:
        """Make a gauge of workers with one series for each value of a label; each shows from its first use."""
        gauge = self.gauge(name, text, WORKER, **label)
        return self.per_worker(lambda model, worker: cache(partial(gauge.labels, model, worker)))

    def per_worker(self, make: Callable[[str, str], Child]) -> PerWorker[Child]:
        """Return a function from a worker to its child, made with `make` from the worker's labels.

        A child is kept as long as the worker's series, because finding one costs more than counting.
        """
        # A worker that shares `other` gets its own labels when another worker leaves.
        return _kept_children(self._children_by_worker, self.worker_labels, OTHER, make)

    def per_model(self, make: Callable[[str], Child]) -> PerModel[Child]:
        """Return a function from a model to its child, made with `make` from the model's label.

        A child is kept until the model's last worker leaves.
        """
        return _kept_children(self._children_by_model, lambda model: (self._model_label(model),), (OTHER_WORKER,), make)

    def model_counters(self, name: str, text: str, **label: Iterable[str]) -> PerModel[dict[str, CounterSeries]]:
        """Make a counter of models with one series for each value of a label; all show from a model's first use."""
        counter = self.counter(name, text, MODEL, **label)
        every = [value for values in label.values() for value in values]
        return self.per_model(lambda model: {value: counter.labels(model, value) for value in every})

    def _make(
        self, kind: type[AnyMetric], name: str, text: str, labels: Labels, values: Values, **more: Any
    ) -> AnyMetric:
        of_model: Labels = (MODEL,) if WORKER in labels else ()
        metric = kind(f"kvrouter_{name}", text, (*of_model, *labels, *values), registry=self, **more)
        if WORKER in labels:
            self._of_workers.append((metric, list(product(*values.values()))))
        elif MODEL in labels:
            self._of_models.append((metric, list(product(*values.values()))))
        return metric

    def before_page(self, measure: Callable[[], None]) -> None:
        """Call `measure`, which sets gauges, whenever the numbers are read."""
        self._measures.append(measure)

    async def own_page(self) -> bytes:
        """Return the numbers of this process in Prometheus' text format.

        The event loop gets a turn after each metric, because those of a thousand workers take half a second. Counts
        made meanwhile may be on the page.
        """
        for measure in self._measures:
            measure()
        parts = []
        for collector in list(self._collectors):
            if isinstance(collector, TextCollector):
                parts.append(collector.text().encode())
            else:
                parts.append(page_of(collector.collect()))
            await asyncio.sleep(0)
        return b"".join(parts)

    def register(self, collector: Collector) -> None:
        """Add a collector to the registry and to the page."""
        super().register(collector)
        self._collectors.append(collector)

    def worker_labels(self, worker: WorkerKey) -> WorkerLabels:
        """Return the worker's labels: its model, and `w0`, or `w0@3` for a rank other than 0.

        Both are `other` once MAX_WORKER_LABELS are in use. Workers share labels if their names differ only after the
        length limit or in unprintable characters.
        """
        labels = self._worker_labels.get(worker)
        if labels is None:
            if len(self._worker_labels) >= MAX_WORKER_LABELS:
                return OTHER
            rank = f"@{worker.dp_rank}" if worker.dp_rank else ""
            name = _printable(worker.worker_id)[: MAX_WORKER_LABEL_CHARS - len(rank)] + rank
            labels = self._worker_labels[worker] = (_printable(worker.model)[:MAX_WORKER_LABEL_CHARS], name)
        return labels

    def _model_label(self, model: str) -> str:
        label = self._models.get(model)
        if label is None:
            if len(self._models) >= MAX_MODEL_LABELS:
                return OTHER_WORKER
            label = self._models[model] = _printable(model)[:MAX_WORKER_LABEL_CHARS]
        return label

    def forget_worker(self, worker: WorkerKey) -> None:
        """Drop the series of an unregistered worker, unless another worker shares its labels."""
        for children in self._children_by_worker:
            children.pop(worker, None)
        labels = self._worker_labels.pop(worker, None)
        if labels is None:
            return
        if labels not in self._worker_labels.values():
            _remove(self._of_workers, *labels)
        if not any(other.model == worker.model for other in self._worker_labels):
            self._forget_model(worker.model)

    def _forget_model(self, model: str) -> None:
        for children in self._children_by_model:
            children.pop(model, None)
        label = self._models.pop(model, None)
        if label is not None and label not in self._models.values():
            _remove(self._of_models, label)


def page_of(metrics: Iterable[Metric]) -> bytes:
    """Return the metrics in Prometheus' text format."""
    # A page needs nothing else of a registry.
    return generate_latest(cast(CollectorRegistry, SimpleNamespace(collect=lambda: metrics)))


def _kept_children(
    tables: list[dict[Key, Any]], labels_of: Callable[[Key], Labels], other: Labels, make: Callable[..., Child]
) -> Callable[[Key], Child]:
    """Return a function from a worker or a model to its child, which is kept in a new table of `tables`.

    Args:
        tables: The tables from which ended workers or models are removed.
        labels_of: Returns the labels of a worker or a model.
        other: The labels that all beyond a limit share; their child is not kept.
        make: Makes a child from its labels.
    """
    children: dict[Key, Child] = {}
    tables.append(children)

    def child(key: Key) -> Child:
        series = children.get(key)
        if series is None:
            series = make(*(labels := labels_of(key)))
            if labels != other:
                children[key] = series
        return series

    return child


def _remove(metrics: list[tuple[Counter | Gauge | Histogram, list[tuple[str, ...]]]], *labels: str) -> None:
    for metric, series in metrics:
        for values in series:
            # Old versions of prometheus-client raise KeyError for a series that never existed.
            with contextlib.suppress(KeyError):
                metric.remove(*labels, *values)


def _printable(name: str) -> str:
    return "".join(c if c.isprintable() else "_" for c in name)
