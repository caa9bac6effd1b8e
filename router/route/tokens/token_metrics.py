# SPDX-License-Identifier: Apache-2.0
"""The metrics of finding a text's tokens."""

from __future__ import annotations

from functools import cache

from kvrouter.router.base.telemetry.metric_registry import MetricRegistry

# A tokenizer here takes 100 us to some tens of ms, an engine some ms to its deadline.
PROMPT_BUCKETS_S = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 1e-1, 2.5e-1, 1.0, 2.5)


class TokenMetrics:
    def __init__(self, registry: MetricRegistry) -> None:
        counter, gauge, histogram = registry.counter, registry.gauge, registry.histogram
        self.internal_errors = registry.internal_errors
        self.unknown = counter(
            "prompts_unknown_total", "Texts whose tokens were not found, so that they were placed by load", "reason"
        )
        self.memory_hits = counter("prompt_memory_hits_total", "Texts whose tokens were remembered")
        self.memory_bytes = gauge("prompt_memory_bytes", "Bytes of remembered tokens of texts")
        self.mismatches = gauge(
            "token_mismatches", "Engines of which a tokenizer here, their /tokenize or their peers make other tokens"
        )
        # By source: to find a child costs more than to count.
        self.prompts = cache(counter("prompts_total", "Texts whose tokens were looked for", "source").labels)
        self.seconds = cache(
            histogram("prompt_seconds", "Time to find the tokens of a text", PROMPT_BUCKETS_S, "source").labels
        )
