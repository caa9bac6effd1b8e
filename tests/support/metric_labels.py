# SPDX-License-Identifier: Apache-2.0
"""The label names of a metric, whether it is one of our own classes or one of prometheus_client's."""

from __future__ import annotations

from prometheus_client.registry import Collector

from kvrouter.router.app.core.resident_blocks import ResidentBlocks
from kvrouter.router.base.common.tally import Counter, Histogram


def label_names(metric: Collector) -> tuple[str, ...]:
    if isinstance(metric, Counter | Histogram | ResidentBlocks):
        return metric.label_names
    return tuple(metric._labelnames)  # type: ignore[attr-defined]
