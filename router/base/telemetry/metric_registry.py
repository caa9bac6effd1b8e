# SPDX-License-Identifier: Apache-2.0
"""The registry of a process's metrics: makes them, names workers in them, drops a worker's series.

Each room declares its own beside what it counts (`*_metrics.py`); `router/app/server/router_metrics.py` assembles them.
Labels come from small closed sets: never a request id, a hash or a model text of a client. A series of a worker has
its model and its name as labels, both as registered, printable and short; there are at most MAX_WORKER_LABELS such
pairs, and all further workers share `other`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from functools import cache, partial
from itertools import product
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.base.common.tally import Counter, CounterSeries, Histogram, TextCollector

# A fleet has tens to hundreds of workers. Each costs about 15 series here; unbounded, a client that registers in a loop
# would fill Prometheus.
MAX_WORKER_LABELS = 1_024
MAX_WORKER_LABEL_CHARS = 80
OTHER_WORKER = "other"

# As a label of a metric, WORKER stands for both.
MODEL, WORKER = "model", "worker"

AnyMetric = TypeVar("AnyMetric", Counter, Gauge, Histogram)
Child = TypeVar("Child")
Labels = tuple[str, ...]
Values = dict[str, Iterable[str]]
# Those of a worker: its model and its name.
WorkerLabels = tuple[str, str]
OTHER: WorkerLabels = (OTHER_WORKER, OTHER_WORKER)
# Models that have series of their own; a fleet has some.
MAX_MODEL_LABELS = 256
Children = Callable[[str], Child]
PerWorker = Callable[[WorkerKey], Child]
PerModel = Callable[[str], Child]


class MetricRegistry(CollectorRegistry):
    """Two of them live side by side in one process. internal_errors, task_failures: of all rooms."""

    def __init__(self) -> None:
        super().__init__()
        self._collectors: list[Collector] = []
        self._measures: list[Callable[[], None]] = []
        self._worker_labels: dict[WorkerKey, WorkerLabels] = {}
        # Each metric of workers, with the values of its further label: the series that end with a worker.
        self._of_workers: list[tuple[Counter | Gauge | Histogram, list[tuple[str, ...]]]] = []
        self._kept: list[dict[WorkerKey, Any]] = []
        # The same of metrics that have a model's label alone; the models that have series.
        self._of_models: list[tuple[Counter | Gauge | Histogram, list[tuple[str, ...]]]] = []
        self._kept_of_models: list[dict[str, Any]] = []
        self._models: dict[str, str] = {}
        self.internal_errors = self.counter("internal_errors_total", "Unhandled exceptions: each is a bug", "where")
        self.task_failures = self.counter(
            "task_failures_total", "Long-lived tasks that ended and were started again", "task"
        )

    def counter(self, name: str, text: str, *labels: str, **values: Iterable[str]) -> Counter:
        """values: of each further label; a worker's series of them end with it."""
        return self._make(Counter, name, text, labels, values)

    def gauge(self, name: str, text: str, *labels: str, **values: Iterable[str]) -> Gauge:
        """values: as of `counter`."""
        return self._make(Gauge, name, text, labels, values)

    def histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return self._make(Histogram, name, text, labels, {}, buckets=buckets)

    def counters(self, name: str, text: str, **label: Iterable[str]) -> dict[str, CounterSeries]:
        """One for each value that the label can have; all show from the beginning."""
        made = self.counter(name, text, **label)
        return {value: made.labels(value) for values in label.values() for value in values}

    def worker_counter(self, name: str, text: str) -> PerWorker[CounterSeries]:
        return self.per_worker(self.counter(name, text, WORKER).labels)

    def worker_gauge(self, name: str, text: str) -> PerWorker[Gauge]:
        return self.per_worker(self.gauge(name, text, WORKER).labels)

    def worker_counters(self, name: str, text: str, **label: Iterable[str]) -> PerWorker[Children[CounterSeries]]:
        """One for each value that the label can have; each shows from its first use."""
        made = self.counter(name, text, WORKER, **label)
        return self.per_worker(lambda model, worker: cache(partial(made.labels, model, worker)))

    def worker_gauges(self, name: str, text: str, **label: Iterable[str]) -> PerWorker[Children[Gauge]]:
        """As `worker_counters`."""
        made = self.gauge(name, text, WORKER, **label)
        return self.per_worker(lambda model, worker: cache(partial(made.labels, model, worker)))

    def per_worker(self, make: Callable[[str, str], Child]) -> PerWorker[Child]:
        """What `make` gives for a worker's labels, kept as long as its series: to find a child costs more than to
        count."""
        kept: dict[WorkerKey, Child] = {}
        self._kept.append(kept)

        def child(worker: WorkerKey) -> Child:
            found = kept.get(worker)
            if found is None:
                found = make(*(labels := self.worker_labels(worker)))
                # A worker without labels of its own gets some when another goes.
                if labels != OTHER:
                    kept[worker] = found
            return found

        return child

    def per_model(self, make: Callable[[str], Child]) -> PerModel[Child]:
        """The same for a model's label; its series end with its last worker."""
        kept: dict[str, Child] = {}
        self._kept_of_models.append(kept)

        def child(model: str) -> Child:
            found = kept.get(model)
            if found is None:
                found = make(label := self._model_label(model))
                if label != OTHER_WORKER:
                    kept[model] = found
            return found

        return child

    def model_counters(self, name: str, text: str, **label: Iterable[str]) -> PerModel[dict[str, CounterSeries]]:
        """One for each value that the label can have; all show from a model's first use."""
        made = self.counter(name, text, MODEL, **label)
        every = [value for values in label.values() for value in values]
        return self.per_model(lambda model: {value: made.labels(model, value) for value in every})

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
        """Has `measure` set its gauges whenever the numbers are read."""
        self._measures.append(measure)

    async def own_page(self) -> bytes:
        """The numbers of this process, in Prometheus' text format. Metric by metric, as those of a thousand workers
        take half a second; what is counted meanwhile may be on it."""
        for measure in self._measures:
            measure()
        parts = []
        for collector in list(self._collectors):
            if isinstance(collector, TextCollector):
                parts.append(collector.text().encode())
            else:
                parts.append(generate_latest(_Alone(collector)))
            await asyncio.sleep(0)
        return b"".join(parts)

    def register(self, collector: Collector) -> None:
        super().register(collector)
        self._collectors.append(collector)

    def worker_labels(self, worker: WorkerKey) -> WorkerLabels:
        """Its model, and `w0`, or `w0@3` for another rank than 0; twice `other` once MAX_WORKER_LABELS are in use.

        Workers whose names differ in the end of long ones, or in what is not printable, share labels."""
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
        """Drops the series of an unregistered worker, unless another worker shares its labels."""
        for kept in self._kept:
            kept.pop(worker, None)
        labels = self._worker_labels.pop(worker, None)
        if labels is None:
            return
        if labels not in self._worker_labels.values():
            _remove(self._of_workers, *labels)
        if not any(other.model == worker.model for other in self._worker_labels):
            self._forget_model(worker.model)

    def _forget_model(self, model: str) -> None:
        for kept in self._kept_of_models:
            kept.pop(model, None)
        label = self._models.pop(model, None)
        if label is not None and label not in self._models.values():
            _remove(self._of_models, label)


class _Alone(CollectorRegistry):
    """A registry of one collector, for the library's page."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    def collect(self) -> Iterable[Metric]:
        return self._collector.collect()


def _remove(metrics: list[tuple[Counter | Gauge | Histogram, list[tuple[str, ...]]]], *labels: str) -> None:
    for metric, series in metrics:
        for values in series:
            # Old versions of prometheus-client raise for a series that never was.
            with contextlib.suppress(KeyError):
                metric.remove(*labels, *values)


def _printable(name: str) -> str:
    return "".join(c if c.isprintable() else "_" for c in name)
