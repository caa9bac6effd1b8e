# SPDX-License-Identifier: Apache-2.0
"""Metrics of reservations and of each worker's load."""

from __future__ import annotations

from kvrouter.router.base.telemetry.metric_registry import MetricRegistry

RESERVATION_ENDS = ("released", "expired", "no_room")


class LoadMetrics:
    """The counters and gauges of reservations, and the gauges of each worker."""

    def __init__(self, registry: MetricRegistry) -> None:
        counter, gauge, worker_gauge = registry.counter, registry.gauge, registry.worker_gauge
        self.reservations = counter("reservations_total", "Prompts whose load was counted")
        self.ended = registry.counters(
            "reservations_ended_total", "Reservations that ended, by how", how=RESERVATION_ENDS
        )
        self.voided = counter(
            "reservations_voided_total", "Reservations that no longer count, as the engine said that it is idle"
        )
        self.held = gauge("reservations_held", "Reservations of this process")
        self.known = gauge("load_known", "1 while this process knows the load of the other routers, else 0")
        self.routers = gauge("load_routers", "Routers whose load this one counts, itself included")
        self.queued_tokens = worker_gauge("load_queued_tokens", "Prefill tokens queued at a worker, all routers")
        self.decode_tokens = worker_gauge("load_decode_tokens", "Context tokens decoded at a worker, all routers")
        self.requests = worker_gauge("load_requests", "Requests in flight at a worker, as known here")
        self.lent_tokens = worker_gauge(
            "load_lent_tokens", "Tokens of a worker's CPU tier that other workers fetch, all routers"
        )
        self.saturated = worker_gauge("load_saturated", "1 while a worker is saturated, else 0")
