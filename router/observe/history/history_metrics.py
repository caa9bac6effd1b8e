# SPDX-License-Identifier: Apache-2.0
"""Metrics of the shared history."""

from __future__ import annotations

from kvrouter.router.base.telemetry.metric_registry import MetricRegistry

# Why counts are missing in the history.
LOST_REASONS = (
    "damaged",  # it is not in the form that routers write
    "time",  # its time is in the future: a clock jumped
    "unwritten",  # Redis was away for longer than the counts are kept, or refused them
)


class HistoryMetrics:
    """The metrics of the shared history."""

    def __init__(self, registry: MetricRegistry) -> None:
        self.lost = registry.counters(
            "history_entries_lost_total", "Parts of the history that are not shown, by why", reason=LOST_REASONS
        )
        self.bytes = registry.gauge("history_bytes", "Memory of the history")
