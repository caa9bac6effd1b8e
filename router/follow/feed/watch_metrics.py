# SPDX-License-Identifier: Apache-2.0
"""The metrics of the event feed and of the decision log."""

from __future__ import annotations

from kvrouter.contract.fleet_event import EventType
from kvrouter.router.base.telemetry.metric_registry import MetricRegistry


class WatchMetrics:
    """The metrics of one process's event feed and decision log."""

    def __init__(self, registry: MetricRegistry) -> None:
        self.before_page = registry.before_page
        published = [event_type for event_type in EventType if event_type is not EventType.LOST]
        self.events = registry.counters("feed_events_total", "Events published to GET /events", type=published)
        self.subscribers = registry.gauge("feed_subscribers", "Clients that watch GET /events")
        self.subscribers_cut = registry.counter(
            "feed_subscribers_cut_total", "Clients of GET /events that were cut off, as they read too slowly"
        )
        self.held_bytes = registry.gauge(
            "feed_unread_bytes", "Bytes of events that clients of GET /events have not taken, each counted once"
        )
        self.decisions_kept = registry.gauge("decisions_kept", "Decisions that GET /decisions can explain")
        self.decisions_bytes = registry.gauge("decisions_bytes", "Memory of the decisions that are kept")
