# SPDX-License-Identifier: Apache-2.0
"""The metric of what workers hold: blocks by worker, group and medium, counted when it is read.

Groups and media are what engines say, so both are bounded: each worker has at most MAX_GROUPS + 2 values of the one and
len(MEDIA) + 1 of the other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from kvrouter.router.common.ids import TIERS, WorkerKey
from kvrouter.router.telemetry.metric_registry import MODEL, WORKER, MetricRegistry
from kvrouter.router.workers.registration import MAX_GROUPS

NAME = "kvrouter_resident_blocks"
TEXT = "Blocks that a worker holds, also those that earn no credit"
# Those that earn credit, and those that vLLM's secondary tiers name.
MEDIA = frozenset({*TIERS, "FS", "OBJ"})
GROUPS = frozenset(map(str, range(MAX_GROUPS))) | {"-"}
OTHER = "other"


class ResidentBlocks(Collector):
    """counts: of each worker, blocks by the text of their place; there is none before the core has set it."""

    label_names = (MODEL, WORKER, "group", "medium")

    def __init__(self, registry: MetricRegistry) -> None:
        self.counts: Callable[[], Iterable[tuple[WorkerKey, Mapping[str, int]]]] = tuple
        self._labels_of = registry.worker_labels
        registry.register(self)

    def describe(self) -> Iterator[Metric]:
        yield Metric(NAME, TEXT, "gauge")

    def collect(self) -> Iterator[Metric]:
        blocks: defaultdict[tuple[str, ...], int] = defaultdict(int)
        for worker, places in self.counts():
            labels = self._labels_of(worker)
            for place, count in places.items():
                # `g0:GPU`, with an owner behind some.
                group, medium = place[1:].split(":", 2)[:2]
                # Owners of one medium, and all that is `other`, are added up.
                blocks[*labels, group if group in GROUPS else OTHER, medium if medium in MEDIA else OTHER] += count
        metric = Metric(NAME, TEXT, "gauge")
        for values, count in blocks.items():
            metric.add_sample(NAME, dict(zip(self.label_names, values, strict=True)), count)
        yield metric
