# SPDX-License-Identifier: Apache-2.0
"""Metrics of the owners of stored responses."""

from __future__ import annotations

from kvrouter.router.base.telemetry.metric_registry import MetricRegistry

LOOKUP_OUTCOMES = (
    "here",  # this process knew the owner
    "shared",  # another process had written the owner to Redis
    "unknown",  # no process remembers the response
    "foreign",  # another API key made the response
    "gone",  # the owner is removed or down, or its process has ended
    "failed",  # this process does not know the response, and Redis does not answer
)
LOST_REASONS = (
    "no_id",  # the beginning of the answer has no id that can be read
    "unusable",  # the id cannot be a part of a path
    "taken",  # another API key has a response of this id
    "unwritten",  # Redis was away while too many responses were made
    "room",  # this process made too many younger ones
)


class OwnerMetrics:
    """The metrics of the owners of stored responses."""

    def __init__(self, registry: MetricRegistry) -> None:
        self.known = registry.gauge("responses_known", "Responses whose worker this process remembers")
        self.lookups = registry.counters(
            "response_lookups_total",
            "Requests about a stored response, by what is known of its worker",
            outcome=LOOKUP_OUTCOMES,
        )
        self.lost = registry.counters(
            "responses_not_remembered_total", "Responses whose worker is not remembered, by why", reason=LOST_REASONS
        )
