# SPDX-License-Identifier: Apache-2.0
"""The metrics of the data that is read from the store for all workers, and of the mirror that it fills."""

from __future__ import annotations

from kvrouter.router.base.telemetry.metric_registry import MetricRegistry

# The places in Redis where a value was found that no router writes: a worker's data, the registry, the claims of
# routers, or a key that all routers need.
UNREADABLE = ("worker", "registry", "claims", "common")

OTHER_SCHEMAS = ("newer", "former")


class FleetMetrics:
    """The metrics of one process's fleet, its mirror and its contact with the store."""

    def __init__(self, registry: MetricRegistry) -> None:
        counter = registry.counter
        self.forget_worker = registry.forget_worker
        self.internal_errors = registry.internal_errors
        self.heartbeats_ignored = counter(
            "heartbeats_ignored_total", "Values among the routers' heartbeats in the store that are none"
        )
        self.registry_repairs = counter("registry_repairs_total", "Registrations that were lost and written back")
        schemas = registry.gauge(
            "other_schema", "1 while Redis also holds keys of a newer or the former schema", which=OTHER_SCHEMAS
        )
        self.schemas_present = {which: schemas.labels(which) for which in OTHER_SCHEMAS}
        self.registrations_left = registry.gauge(
            "registrations_left", "Registrations of the former schema in Redis that are not taken over"
        )
        self.registrations_lost = registry.gauge(
            "registrations_lost", "1 while no worker is registered and a private store lost those that were"
        )
        self.store_up = registry.gauge("store_up", "1 while the store answers")
        self.unreadable_values = registry.counters(
            "unreadable_values_total", "Values in Redis that no router writes, as they were met", where=UNREADABLE
        )
        self.mirror_refused_blocks = registry.worker_counter(
            "mirror_refused_blocks_total", "Blocks that found no room in memory: they earn no credit"
        )
