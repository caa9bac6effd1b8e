# SPDX-License-Identifier: Apache-2.0
"""The metrics of proxied requests, of the attempts they took, and of workers' circuit breakers."""

from __future__ import annotations

from functools import cache

from kvrouter.router.base.telemetry.metric_registry import MetricRegistry
from kvrouter.router.model.upstream.failure import Kind
from kvrouter.router.serve.proxy.circuit_breaker import BreakerState

# The outcomes of a request that say something about a worker.
ANSWER_OUTCOMES = ("ok", "client_error", "server_error")
# Handed over, named to the decode worker's sidecar, no answer of the prefill worker, an error of it, an answer without
# a hand-over.
HANDOVER_OUTCOMES = ("done", "named", "failed", "refused", "declined")


class ProxyMetrics:
    """requests: by path and outcome: ok, client_error or server_error (an engine's 4xx or 5xx passed on), refused (by
    the router: its body, no worker), unreachable (no engine answered), cut (the answer broke off), client_gone, bug."""

    def __init__(self, registry: MetricRegistry) -> None:
        counter, worker_counters = registry.counter, registry.worker_counters
        # To find a child costs more than to count.
        self.requests = cache(
            counter("proxy_requests_total", "Proxied requests, by how they ended", "path", "outcome").labels
        )
        self.answers = worker_counters("proxy_answers_total", "Whole answers of an engine", outcome=ANSWER_OUTCOMES)
        self.failures = worker_counters(
            "proxy_failures_total", "Attempts at a worker that failed; the request may have gone to another", kind=Kind
        )
        self.retries = counter("proxy_retries_total", "Requests sent to another worker after a failure", "kind")
        self.open = registry.gauge("proxy_open_requests", "Proxied requests under way")
        self.key_withheld = registry.gauge(
            "engine_key_withheld_workers",
            "Workers that are not sent worker_api_key, as nobody but a client named their host",
        )
        self.breaker_state = registry.worker_gauges(
            "proxy_breaker_state",
            "1 for the state that a worker's breaker is in, else 0; none: closed ever since",
            state=BreakerState,
        )
        self.handovers = registry.counters(
            "handovers_total", "Prompts sent to a prefill worker first, by what came of it", outcome=HANDOVER_OUTCOMES
        )
