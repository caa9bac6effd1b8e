# SPDX-License-Identifier: Apache-2.0
"""The metrics of the certificate, of API keys and of registrations."""

from __future__ import annotations

from kvrouter.router.base.common.tally import Counter
from kvrouter.router.base.telemetry.metric_registry import MetricRegistry
from kvrouter.router.model.config.reloaded import ReloadMetrics

# The outcomes of a request with a key: it was admitted, its key's scopes did not suffice, or it registered too often. A
# request without a known key is unauthorized.
ADMITTED, FORBIDDEN, LIMITED, UNAUTHORIZED = "admitted", "forbidden", "limited", "unauthorized"
KEY_OUTCOMES = (ADMITTED, FORBIDDEN, LIMITED)
# The header that showed that a web page may have caused the request (`browser_policy.py`).
FOREIGN_HOST, FOREIGN_ORIGIN = "host", "origin"


class AccessMetrics:
    """The metrics of access.

    `key_requests` has series for each key's name, of which there are at most `MAX_KEYS`; they are removed with the key.
    """

    def __init__(self, registry: MetricRegistry) -> None:
        self.start = registry.gauge(
            "tls_certificate_start_timestamp_seconds",
            "From when the certificate of the HTTP port is valid, in seconds since 1970; 0 without TLS",
        )
        self.expiry = registry.gauge(
            "tls_certificate_expiry_timestamp_seconds",
            "When the certificate of the HTTP port ends, in seconds since 1970; 0 without TLS",
        )
        self.files = ReloadMetrics(registry)
        self.key_requests: Counter = registry.counter(
            "key_requests_total", "Requests to paths that take a key, by its name", "key", "outcome"
        )
        self.foreign = registry.counters(
            "foreign_requests_total",
            "Requests refused because a web page may have had them sent",
            reason=(FOREIGN_HOST, FOREIGN_ORIGIN),
        )
        self.limited = registry.counter("registrations_limited_total", "Registrations refused for coming too fast")
