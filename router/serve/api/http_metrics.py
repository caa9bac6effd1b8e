# SPDX-License-Identifier: Apache-2.0
"""The metrics of HTTP answers and of clients' connections, and the page that shows all metrics."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import cache

from kvrouter.router.base.telemetry.metric_registry import MetricRegistry
from kvrouter.router.route.placement.placement_metrics import DECISION_BUCKETS_S
from kvrouter.router.serve.access.access_metrics import AccessMetrics

# Why a client's connection was closed: size or time of a head, time of a body, an answer that nobody read, too many
# connections, no HTTP, and no handshake of TLS that can be used, or none in time.
CUT_REASONS = ("head_size", "head_time", "body_time", "send_time", "connections", "invalid", "handshake")


class HttpMetrics:
    def __init__(self, registry: MetricRegistry) -> None:
        # What `/metrics` answers: this process's numbers, and those of its siblings where it has any.
        self.page: Callable[[], Awaitable[bytes]] = registry.own_page
        self.internal_errors = registry.internal_errors
        # By a route's template, never the path as the client sent it: to find a child costs more than to count.
        self.requests = cache(registry.counter("requests_total", "HTTP requests answered", "path", "code").labels)
        self.connections_cut = registry.counters(
            "http_connections_cut_total", "Connections closed for a client's fault", reason=CUT_REASONS
        )
        self.access = AccessMetrics(registry)
        self.decide_seconds = registry.histogram(
            "decide_seconds", "Time to answer a question of the API (/query, /select), without HTTP", DECISION_BUCKETS_S
        )
