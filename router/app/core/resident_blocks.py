# SPDX-License-Identifier: Apache-2.0
"""The metric of resident blocks by worker, group and medium, counted when the metric is read.

Engines name the groups and media, so both are bounded: each worker has at most MAX_GROUPS + 2 values of group and
len(LABELS) + 1 values of medium.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client.core import Metric

from kvrouter.contract.tiers import MEDIA
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.base.common.tally import TextCollector, head_lines, label_pairs
from kvrouter.router.base.telemetry.metric_registry import MODEL, WORKER, MetricRegistry, WorkerLabels
from kvrouter.router.model.workers.registration import MAX_GROUPS

NAME = "kvrouter_resident_blocks"
TEXT = "Blocks that a worker holds, also those that earn no credit"
# The media that earn credit, and those that vLLM's secondary tiers name.
LABELS = frozenset({*MEDIA, "FS", "OBJ"})
GROUPS = frozenset(map(str, range(MAX_GROUPS))) | {"-"}
OTHER = "other"


class ResidentBlocks(TextCollector):
    """A gauge of blocks. The core sets `counts`, which returns each worker's blocks by the text of their place."""

    label_names = (MODEL, WORKER, "group", "medium")

    def __init__(self, registry: MetricRegistry) -> None:
        self.counts: Callable[[], Iterable[tuple[WorkerKey, Mapping[str, int]]]] = tuple
        self._labels_of = registry.worker_labels
        registry.register(self)

    def describe(self) -> Iterator[Metric]:
        """Yield the metric without samples, for the registry."""
        yield Metric(NAME, TEXT, "gauge")

    def collect(self) -> Iterator[Metric]:
        """Yield the metric with one sample for each worker, group and medium."""
        metric = Metric(NAME, TEXT, "gauge")
        for labels, counts in self._blocks().items():
            for place, count in counts.items():
                metric.add_sample(NAME, dict(zip(self.label_names, (*labels, *place), strict=True)), count)
        yield metric

    def text(self) -> str:
        """Return the metric in Prometheus' text format."""
        lines = head_lines(NAME, TEXT, "gauge")
        for labels, counts in self._blocks().items():
            pairs = label_pairs(self.label_names[:2], labels)
            lines += [
                f'{NAME}{{{pairs},group="{group}",medium="{medium}"}} {count}.0'
                for (group, medium), count in counts.items()
            ]
        return "\n".join(lines) + "\n"

    def _blocks(self) -> dict[WorkerLabels, dict[tuple[str, str], int]]:
        """Return the blocks by the worker's labels, and for each by group and medium."""
        blocks: defaultdict[WorkerLabels, defaultdict[tuple[str, str], int]] = defaultdict(lambda: defaultdict(int))
        for worker, places in self.counts():
            counts = blocks[self._labels_of(worker)]
            for place, count in places.items():
                # A place is like `g0:GPU`, some with an owner appended. Blocks of all owners of one medium are added
                # up, and so are all that count as `other`.
                group, medium = place[1:].split(":", 2)[:2]
                counts[group if group in GROUPS else OTHER, medium if medium in LABELS else OTHER] += count
        return {**blocks}
