# SPDX-License-Identifier: Apache-2.0
"""Counters and histograms that are cheap to count: a plain number grows, and becomes samples only when it is read.

prometheus_client's own counters take a lock and ten calls each, so a request that counts in a dozen places pays tens of
microseconds. A series is counted by one thread only.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import accumulate
from typing import Generic, TypeVar

from prometheus_client.core import Metric
from prometheus_client.registry import Collector, CollectorRegistry
from prometheus_client.utils import floatToGoString

TOTAL = "_total"

# Suffix of the name, upper bound of a bucket or "", and value.
Sample = tuple[str, str, float]


# The characters that label values escape.
ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


class TextCollector(Collector):
    """A metric that writes its part of the metrics page itself.

    prometheus_client's way through samples takes eight microseconds for each, and the page of a thousand workers has a
    hundred thousand samples.
    """

    def text(self) -> str:
        """Return the metric as text, in the format that prometheus_client's `generate_latest` writes."""
        raise NotImplementedError


def head_lines(name: str, text: str, kind: str) -> list[str]:
    """Return the HELP and TYPE lines that stand above the samples of a metric."""
    escaped = text.replace("\\", r"\\").replace("\n", r"\n")
    return [f"# HELP {name} {escaped}", f"# TYPE {name} {kind}"]


def label_pairs(names: Sequence[str], values: Sequence[str]) -> str:
    """Return the labels of a sample in text form, such as `model="m",worker="w0"`."""
    return ",".join(f'{name}="{value.translate(ESCAPES)}"' for name, value in zip(names, values, strict=True))


class CounterSeries:
    """One series of a counter."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        """Add `amount` to the count."""
        self.value += amount

    def samples(self) -> Iterable[Sample]:
        """Yield the one sample of the series."""
        yield TOTAL, "", self.value


class HistogramSeries:
    """One series of a histogram. `bounds` are the upper bounds of its buckets, in order; a last bucket has none."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count `value` in its bucket and add it to the sum."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def samples(self) -> Iterable[Sample]:
        """Yield the cumulative count of each bucket, then the total count and the sum."""
        reached = list(accumulate(self.counts))
        for bound, count in zip(_bound_texts(tuple(self.bounds)), reached, strict=True):
            yield "_bucket", bound, count
        yield "_count", "", reached[-1]
        yield "_sum", "", self.sum


@cache
def _bound_texts(bounds: tuple[float, ...]) -> tuple[str, ...]:
    return tuple(floatToGoString(bound) for bound in (*bounds, float("inf")))  # type: ignore[no-untyped-call]


Series = TypeVar("Series", CounterSeries, HistogramSeries)


class _Tallies(TextCollector, Generic[Series]):
    """All series of one metric. A metric without labels has one series from the beginning."""

    kind = ""

    def __init__(
        self, name: str, text: str, labels: Sequence[str], registry: CollectorRegistry, make: Callable[[], Series]
    ) -> None:
        self.name = name
        self.label_names = tuple(labels)
        self._text = text
        self._make: Callable[[], Series] = make
        self._series: dict[tuple[str, ...], Series] = {}
        if not labels:
            self.labels()
        registry.register(self)

    def labels(self, *values: object) -> Series:
        """Return the series with these label values, created on first use. Keep it if you count often."""
        if len(values) != len(self.label_names):
            raise ValueError(f"{self.name} has the labels {self.label_names}, got {values}")
        key = tuple(map(str, values))
        series = self._series.get(key)
        if series is None:
            series = self._series[key] = self._make()
        return series

    def remove(self, *values: str) -> None:
        """Remove the series with these label values from the page. Raises KeyError if there is none."""
        del self._series[values]

    def describe(self) -> Iterator[Metric]:
        """Yield the metric without samples, for the registry."""
        yield Metric(self.name, self._text, self.kind)

    def collect(self) -> Iterator[Metric]:
        """Yield the metric with the samples of all series."""
        metric = Metric(self.name, self._text, self.kind)
        for values, series in list(self._series.items()):
            labels = dict(zip(self.label_names, values, strict=True))
            for suffix, bound, value in series.samples():
                metric.add_sample(self.name + suffix, labels | {"le": bound} if bound else labels, value)
        yield metric

    def text(self) -> str:
        """Return the metric in Prometheus' text format."""
        lines = head_lines(self.name + (TOTAL if self.kind == "counter" else ""), self._text, self.kind)
        for values, series in list(self._series.items()):
            pairs = label_pairs(self.label_names, values)
            plain, rest = (f"{{{pairs}}}", f",{pairs}}}") if pairs else ("", "}")
            for suffix, bound, value in series.samples():
                labels = f'{{le="{bound}"{rest}' if bound else plain
                lines.append(f"{self.name}{suffix}{labels} {floatToGoString(value)}")  # type: ignore[no-untyped-call]
        return "\n".join(lines) + "\n"


class Counter(_Tallies[CounterSeries]):
    """A counter metric. Without labels, `inc` counts in its one series."""

    kind = "counter"
    inc: Callable[..., None]

    def __init__(self, name: str, text: str, labels: Sequence[str], registry: CollectorRegistry) -> None:
        super().__init__(name.removesuffix(TOTAL), text, labels, registry, CounterSeries)
        if not labels:
            self.inc = self.labels().inc


class Histogram(_Tallies[HistogramSeries]):
    """A histogram metric. Without labels, `observe` counts in its one series."""

    kind = "histogram"
    observe: Callable[[float], None]

    def __init__(
        self, name: str, text: str, labels: Sequence[str], registry: CollectorRegistry, buckets: Sequence[float]
    ) -> None:
        super().__init__(name, text, labels, registry, lambda: HistogramSeries(buckets))
        if not labels:
            self.observe = self.labels().observe
