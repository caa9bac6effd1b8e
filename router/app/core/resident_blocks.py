# SPDX-License-Identifier: Apache-2.0
"""The metric of what workers hold: blocks by worker, group and medium, counted when it is read.

Groups and media are what engines say, so both are bounded: each worker has at most MAX_GROUPS + 2 values of the one and
len(MEDIA) + 1 of the other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client.core import Metric

from kvrouter.router.base.common.ids import TIERS, WorkerKey
from kvrouter.router.base.common.tally import TextCollector, head_lines, label_pairs
from kvrouter.router.base.telemetry.metric_registry import MODEL, WORKER, MetricRegistry, WorkerLabels
from kvrouter.router.model.workers.registration import MAX_GROUPS

NAME = "kvrouter_resident_blocks"
TEXT = "Blocks that a worker holds, also those that earn no credit"
# Those that earn credit, and those that vLLM's secondary tiers name.
MEDIA = frozenset({*TIERS, "FS", "OBJ"})
GROUPS = frozenset(map(str, range(MAX_GROUPS))) | {"-"}
OTHER = "other"


class ResidentBlocks(TextCollector):
    """counts: of each worker, blocks by the text of their place; there is none before the core has set it."""

    label_names = (MODEL, WORKER, "group", "medium")

    def __init__(self, registry: MetricRegistry) -> None:
        self.counts: Callable[[], Iterable[tuple[WorkerKey, Mapping[str, int]]]] = tuple
        self._labels_of = registry.worker_labels
        registry.register(self)

    def describe(self) -> Iterator[Metric]:
        yield Metric(NAME, TEXT, "gauge")

    def collect(self) -> Iterator[Metric]:
        metric = Metric(NAME, TEXT, "gauge")
        for labels, held in self._blocks().items():
            for place, count in held.items():
                metric.add_sample(NAME, dict(zip(self.label_names, (*labels, *place), strict=True)), count)
        yield metric

    def text(self) -> str:
        lines = head_lines(NAME, TEXT, "gauge")
        for labels, held in self._blocks().items():
            pairs = label_pairs(self.label_names[:2], labels)
            lines += [
                f'{NAME}{{{pairs},group="{group}",medium="{medium}"}} {count}.0'
                for (group, medium), count in held.items()
            ]
        return "\n".join(lines) + "\n"

    def _blocks(self) -> dict[WorkerLabels, dict[tuple[str, str], int]]:
        """By the worker's labels; by group and medium."""
        blocks: defaultdict[WorkerLabels, defaultdict[tuple[str, str], int]] = defaultdict(lambda: defaultdict(int))
        for worker, places in self.counts():
            held = blocks[self._labels_of(worker)]
            for place, count in places.items():
                # `g0:GPU`, with an owner behind some: owners of one medium are added up, and all that is `other`.
                group, medium = place[1:].split(":", 2)[:2]
                held[group if group in GROUPS else OTHER, medium if medium in MEDIA else OTHER] += count
        return {**blocks}
