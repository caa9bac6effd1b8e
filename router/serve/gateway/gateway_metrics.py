# SPDX-License-Identifier: Apache-2.0
"""The metrics of requests of gateways."""

from __future__ import annotations

from functools import cache

from kvrouter.router.base.telemetry.metric_registry import MetricRegistry

# From an index that has the prompt's tokens to a prompt that waits in line or is computed elsewhere first.
PICK_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0, 30.0)


class GatewayMetrics:
    """requests: by path and outcome: ok, client_error or server_error (an engine's 4xx or 5xx, or the gateway's own),
    refused (by the router: its body, no worker, saturated), client_gone (the stream ended before the answer did), passed
    (a request that no prompt is in, sent to any worker), bug."""

    def __init__(self, registry: MetricRegistry) -> None:
        self.requests = cache(
            registry.counter(
                "gateway_requests_total", "Requests of gateways, by how they ended", "path", "outcome"
            ).labels
        )
        self.open = registry.gauge("gateway_open_streams", "Requests of gateways under way")
        self.pick_seconds = registry.histogram(
            "gateway_pick_seconds", "From a whole request to its endpoint", PICK_BUCKETS_S
        )
        self.served_elsewhere = registry.worker_counter(
            "gateway_served_elsewhere_total", "Requests that another endpoint than the picked one answered"
        )
        self.protocol_errors = registry.counter(
            "gateway_protocol_errors_total", "Streams ended for what the gateway sent or how it is set"
        )
