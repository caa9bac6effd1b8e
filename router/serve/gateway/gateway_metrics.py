# SPDX-License-Identifier: Apache-2.0
"""The metrics of requests of gateways."""

from __future__ import annotations

from functools import cache

from kvrouter.router.base.telemetry.metric_registry import MetricRegistry

# The shortest picks are for a prompt whose tokens are cached; the longest are for a prompt that waits in line or is
# computed elsewhere first.
PICK_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0, 30.0)


class GatewayMetrics:
    """The metrics of gateways' requests.

    `requests` counts by path and outcome. The outcomes are:

    - ok, client_error and server_error: an answer was passed on; the errors are the 4xx and 5xx of the engine or the
      gateway.
    - refused: the router refused the request, because of its body, for lack of a worker, or because all were saturated.
    - client_gone: the stream ended before the answer did.
    - passed: a request without a prompt was sent to any worker.
    - bug: the router failed.
    """

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
        # The kinds are:
        #
        # - repeated: after the end of a body, its last piece came again, or an empty piece came; it was ignored.
        # - early: the end was marked before the end of the body's JSON; the pieces after it completed the body.
        self.wrong_ends = cache(
            registry.counter(
                "gateway_wrong_ends_total", "Ends of request bodies that the gateway marked twice or too early", "kind"
            ).labels
        )
        self.protocol_errors = registry.counter(
            "gateway_protocol_errors_total", "Streams ended for what the gateway sent or how it is set"
        )
