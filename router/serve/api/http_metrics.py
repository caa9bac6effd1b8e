# SPDX-License-Identifier: Apache-2.0
"""The metrics of HTTP answers and of clients' connections, and the page that shows all metrics."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import cache

from kvrouter.router.base.telemetry.metric_registry import MetricRegistry
from kvrouter.router.route.placement.placement_metrics import DECISION_BUCKETS_S
from kvrouter.router.serve.access.access_metrics import AccessMetrics
from kvrouter.router.serve.proxy.body_decoding import OUTCOMES

# The reasons for closing a client's connection: size or time of a head, time of a body, an answer that was not read,
# too many connections, bytes that are not HTTP, and a TLS handshake that failed or took too long.
CUT_REASONS = ("head_size", "head_time", "body_time", "send_time", "connections", "invalid", "handshake")


class HttpMetrics:
    """The metrics of the HTTP server and its API."""

    def __init__(self, registry: MetricRegistry) -> None:
        # Returns the content of `/metrics`: the numbers of this process, and those of its siblings if it has any.
        self.page: Callable[[], Awaitable[bytes]] = registry.own_page
        self.internal_errors = registry.internal_errors
        # Labelled by a route's template, never by the path that the client sent. Finding a labelled child costs more
        # than counting, so the children are cached.
        self.requests = cache(registry.counter("requests_total", "HTTP requests answered", "path", "code").labels)
        self.connections_cut = registry.counters(
            "http_connections_cut_total", "Connections closed for a client's fault", reason=CUT_REASONS
        )
        self.encoded_bodies = registry.counters(
            "encoded_bodies_total", "Request bodies with a content coding, by what came of it", outcome=OUTCOMES
        )
        self.access = AccessMetrics(registry)
        self.decide_seconds = registry.histogram(
            "decide_seconds", "Time to answer a question of the API (/query, /select), without HTTP", DECISION_BUCKETS_S
        )
