# SPDX-License-Identifier: Apache-2.0
"""The metrics of proxied requests, of the attempts they took, and of workers' circuit breakers."""

from __future__ import annotations

from functools import cache

from kvrouter.router.base.telemetry.metric_registry import MetricRegistry
from kvrouter.router.model.upstream.failure import Kind
from kvrouter.router.serve.proxy.circuit_breaker import BreakerState
from kvrouter.router.serve.proxy.kv_source import REMOVED_FIELDS

# The outcomes of a request that say something about a worker.
ANSWER_OUTCOMES = ("ok", "client_error", "server_error")
# The outcomes of a hand-over, in this order: the prompt was handed over; the prefill worker was named to the decode
# worker's sidecar; the prefill worker gave no answer; it answered with an error; its answer had no hand-over; its
# engine gave the prompt up. After the last four the decode worker computes the prompt itself.
HANDOVER_OUTCOMES = ("done", "named", "failed", "refused", "declined", "aborted")


class ProxyMetrics:
    """The metrics of the proxy.

    `requests` counts by path and outcome. The outcomes are:

    - ok, client_error and server_error: an engine's answer was passed on; the errors are its 4xx and 5xx.
    - refused: the router refused the request, because of its body or for lack of a worker.
    - unreachable: no engine answered.
    - cut: the answer broke off.
    - client_gone: the client hung up.
    - bug: the router failed.
    """

    def __init__(self, registry: MetricRegistry) -> None:
        counter, worker_counters = registry.counter, registry.worker_counters
        # Finding a labelled child costs more than counting, so the children are cached.
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
        self.removed_sources = registry.counters(
            "client_kv_sources_removed_total",
            "Fields by which clients named an engine to fetch blocks from, and which were removed",
            field=REMOVED_FIELDS,
        )
