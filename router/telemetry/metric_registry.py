# SPDX-License-Identifier: Apache-2.0
"""The registry of a process's metrics: makes them, names workers in them, drops a worker's series.

Each room declares its own beside what it counts (`*_metrics.py`); `router/server/router_metrics.py` assembles them.
Labels come from small closed sets: never a request id, a hash or a model text of a client. Worker names are printable,
short and at most MAX_WORKER_LABELS many; all further ones share the label `other`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from functools import cache, partial
from itertools import product
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Gauge, generate_latest

from kvrouter.router.common.ids import WorkerKey
from kvrouter.router.common.tally import Counter, CounterSeries, Histogram

# A fleet has tens to hundreds of workers. Each costs about 15 series here; unbounded, a client that registers in a loop
# would fill Prometheus.
MAX_WORKER_LABELS = 1_024
MAX_WORKER_LABEL_CHARS = 80
OTHER_WORKER = "other"

WORKER = "worker"

AnyMetric = TypeVar("AnyMetric", Counter, Gauge, Histogram)
Child = TypeVar("Child")
Labels = tuple[str, ...]
Values = dict[str, Iterable[str]]
Children = Callable[[str], Child]
PerWorker = Callable[[WorkerKey], Child]


class MetricRegistry(CollectorRegistry):
    """Two of them live side by side in one process. internal_errors, task_failures: of all rooms."""

    def __init__(self) -> None:
        super().__init__()
        self._measures: list[Callable[[], None]] = []
        self._worker_labels: dict[WorkerKey, str] = {}
        # Each metric of workers, with the values of its further label: the series that end with a worker.
        self._of_workers: list[tuple[Counter | Gauge | Histogram, list[tuple[str, ...]]]] = []
        self._kept: list[dict[WorkerKey, Any]] = []
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
        return self.per_worker(lambda worker: cache(partial(made.labels, worker)))

    def worker_gauges(self, name: str, text: str, **label: Iterable[str]) -> PerWorker[Children[Gauge]]:
        """As `worker_counters`."""
        made = self.gauge(name, text, WORKER, **label)
        return self.per_worker(lambda worker: cache(partial(made.labels, worker)))

    def per_worker(self, make: Callable[[str], Child]) -> PerWorker[Child]:
        """What `make` gives for a worker's label, kept as long as its series: to find a child costs more than to
        count."""
        kept: dict[WorkerKey, Child] = {}
        self._kept.append(kept)

        def child(worker: WorkerKey) -> Child:
            found = kept.get(worker)
            if found is None:
                found = make(label := self.worker_label(worker))
                # A worker without a label of its own gets one when another goes.
                if label != OTHER_WORKER:
                    kept[worker] = found
            return found

        return child

    def _make(
        self, kind: type[AnyMetric], name: str, text: str, labels: Labels, values: Values, **more: Any
    ) -> AnyMetric:
        metric = kind(f"kvrouter_{name}", text, (*labels, *values), registry=self, **more)
        if WORKER in labels:
            self._of_workers.append((metric, list(product(*values.values()))))
        return metric

    def before_page(self, measure: Callable[[], None]) -> None:
        """Has `measure` set its gauges whenever the numbers are read."""
        self._measures.append(measure)

    def own_page(self) -> bytes:
        """The numbers of this process, in Prometheus' text format."""
        for measure in self._measures:
            measure()
        return generate_latest(self)

    def worker_label(self, worker: WorkerKey) -> str:
        """`w0`, or `w0@3` for another rank than 0; `other` once MAX_WORKER_LABELS are in use.

        Workers of two models with one id share a label."""
        label = self._worker_labels.get(worker)
        if label is None:
            if len(self._worker_labels) >= MAX_WORKER_LABELS:
                return OTHER_WORKER
            rank = f"@{worker.dp_rank}" if worker.dp_rank else ""
            name = "".join(c if c.isprintable() else "_" for c in worker.worker_id)
            label = name[: MAX_WORKER_LABEL_CHARS - len(rank)] + rank
            self._worker_labels[worker] = label
        return label

    def forget_worker(self, worker: WorkerKey) -> None:
        """Drops the series of an unregistered worker, unless another worker shares its label."""
        for kept in self._kept:
            kept.pop(worker, None)
        label = self._worker_labels.pop(worker, None)
        if label is None or label in self._worker_labels.values():
            return
        for metric, series in self._of_workers:
            for values in series:
                # Old versions of prometheus-client raise for a series that never was.
                with contextlib.suppress(KeyError):
                    metric.remove(label, *values)
