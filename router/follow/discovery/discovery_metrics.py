# SPDX-License-Identifier: Apache-2.0
"""The metrics of each source of workers."""

from __future__ import annotations

from kvrouter.router.base.telemetry.metric_registry import MetricRegistry


class DiscoveryMetrics:
    """The metrics of all sources of one process."""

    def __init__(self, registry: MetricRegistry) -> None:
        counter, gauge = registry.counter, registry.gauge
        self.up = gauge("discovery_up", "1 while a source of workers can be read, else 0", "source")
        self.workers = gauge("discovery_workers", "Workers that a source shows, as last known", "source")
        self.waiting = gauge(
            "discovery_waiting", "Workers that a source shows and that are not registered: /health says why", "source"
        )
        self.contested = gauge(
            "discovery_contested", "Workers of a source of which another source or router says something else", "source"
        )
        self.conflicts = counter(
            "discovery_conflicts_total", "Times that a worker of a source came to be contested", "source"
        )
        self.changes = counter(
            "discovery_changes_total", "Workers that a source registered (also anew) or withdrew", "source", "change"
        )
