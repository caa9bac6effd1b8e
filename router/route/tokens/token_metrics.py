# SPDX-License-Identifier: Apache-2.0
"""Metrics of finding the tokens of texts."""

from __future__ import annotations

from functools import cache

from kvrouter.router.base.telemetry.metric_registry import MetricRegistry

# A tokenizer in this process takes 100 us to some tens of ms; an engine takes from some ms up to its deadline.
PROMPT_BUCKETS_S = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 1e-1, 2.5e-1, 1.0, 2.5)


class TokenMetrics:
    """The metrics of finding tokens, by source and by reason of failure."""

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
        self.renderers_unusable = gauge(
            "renderers_unusable", "Renderers that are away or make other tokens than an engine of their model"
        )
        # By source; cached because finding a metric's child takes longer than counting.
        self.prompts = cache(counter("prompts_total", "Texts whose tokens were looked for", "source").labels)
        self.seconds = cache(
            histogram("prompt_seconds", "Time to find the tokens of a text", PROMPT_BUCKETS_S, "source").labels
        )
