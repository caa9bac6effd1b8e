# SPDX-License-Identifier: Apache-2.0
"""Counters and histograms that cost little to count: a number is added to, and turned into samples when it is read.

prometheus_client's own take a lock and ten calls for each, so a request that counts in a dozen places pays tens of
microseconds. A series is counted by one thread alone.
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

# Suffix of the name, the upper bound of a bucket or "", value.
Sample = tuple[str, str, float]


# What label values have as an escape sequence.
ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


class TextCollector(Collector):
    """A metric that writes its part of a page itself: prometheus_client's way over samples takes eight microseconds for
    each, and a page of a thousand workers has a hundred thousand."""

    def text(self) -> str:
        """As `generate_latest` has it."""
        raise NotImplementedError


def head_lines(name: str, text: str, kind: str) -> list[str]:
    """What stands above the samples of a metric."""
    escaped = text.replace("\\", r"\\").replace("\n", r"\n")
    return [f"# HELP {name} {escaped}", f"# TYPE {name} {kind}"]


def label_pairs(names: Sequence[str], values: Sequence[str]) -> str:
    """`model="m",worker="w0"`."""
    return ",".join(f'{name}="{value.translate(ESCAPES)}"' for name, value in zip(names, values, strict=True))


class CounterSeries:
    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        self.value += amount

    def samples(self) -> Iterable[Sample]:
        yield TOTAL, "", self.value


class HistogramSeries:
    """bounds: the upper ones of its buckets, in order; the last one has none."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def samples(self) -> Iterable[Sample]:
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
    """All series of one metric. Without labels there is one, from the beginning."""

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
        """The series with these values of the labels, from now on there. Keep it where it is counted often."""
        if len(values) != len(self.label_names):
            raise ValueError(f"{self.name} has the labels {self.label_names}, got {values}")
        key = tuple(map(str, values))
        found = self._series.get(key)
        if found is None:
            found = self._series[key] = self._make()
        return found

    def remove(self, *values: str) -> None:
        """The series is shown no longer. Raises KeyError where there is none."""
        del self._series[values]

    def describe(self) -> Iterator[Metric]:
        yield Metric(self.name, self._text, self.kind)

    def collect(self) -> Iterator[Metric]:
        metric = Metric(self.name, self._text, self.kind)
        for values, series in list(self._series.items()):
            labels = dict(zip(self.label_names, values, strict=True))
            for suffix, bound, value in series.samples():
                metric.add_sample(self.name + suffix, labels | {"le": bound} if bound else labels, value)
        yield metric

    def text(self) -> str:
        lines = head_lines(self.name + (TOTAL if self.kind == "counter" else ""), self._text, self.kind)
        for values, series in list(self._series.items()):
            pairs = label_pairs(self.label_names, values)
            plain, rest = (f"{{{pairs}}}", f",{pairs}}}") if pairs else ("", "}")
            for suffix, bound, value in series.samples():
                labels = f'{{le="{bound}"{rest}' if bound else plain
                lines.append(f"{self.name}{suffix}{labels} {floatToGoString(value)}")  # type: ignore[no-untyped-call]
        return "\n".join(lines) + "\n"


class Counter(_Tallies[CounterSeries]):
    """inc: of the one series there is without labels."""

    kind = "counter"
    inc: Callable[..., None]

    def __init__(self, name: str, text: str, labels: Sequence[str], registry: CollectorRegistry) -> None:
        super().__init__(name.removesuffix(TOTAL), text, labels, registry, CounterSeries)
        if not labels:
            self.inc = self.labels().inc


class Histogram(_Tallies[HistogramSeries]):
    """observe: of the one series there is without labels."""

    kind = "histogram"
    observe: Callable[[float], None]

    def __init__(
        self, name: str, text: str, labels: Sequence[str], registry: CollectorRegistry, buckets: Sequence[float]
    ) -> None:
        super().__init__(name, text, labels, registry, lambda: HistogramSeries(buckets))
        if not labels:
            self.observe = self.labels().observe
