# SPDX-License-Identifier: Apache-2.0
"""Metrics of choices, and of prompts that wait for one."""

from __future__ import annotations

from kvrouter.router.base.telemetry.metric_registry import MODEL, MetricRegistry
from kvrouter.router.route.load.load_metrics import LoadMetrics
from kvrouter.router.route.placement.choose import LOST_REASONS
from kvrouter.router.route.placement.prefill_split import PrefillOutcome

# A decision takes 10 us (hashes, warm) to some ms (32 k fresh tokens to hash); Prometheus' own buckets begin at 5 ms.
DECISION_BUCKETS_S = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 1e-1, 1.0)
# From some MB within a machine to the longest deadline of a pull.
PULL_BUCKETS_S = (1e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0)
# Nearly all prompts wait not at all; the others wait as long as prompts take.
QUEUE_BUCKETS_S = (1e-3, 1e-2, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
# The reasons why a prompt is not placed.
QUEUE_REFUSALS = ("full", "deadline")


class PlacementMetrics:
    """The metrics of placing prompts, with those of their load in `load`."""

    def __init__(self, registry: MetricRegistry) -> None:
        counter = registry.counter
        self.before_page = registry.before_page
        self.load = LoadMetrics(registry)
        self.choice_seconds = registry.histogram(
            "choice_seconds",
            "Time to choose a worker, for the proxy and /select: hashing, matching, comparing",
            DECISION_BUCKETS_S,
        )
        self.achievable_hit_tokens = registry.per_model(
            counter(
                "achievable_hit_tokens_total",
                "Hit tokens of each placed prompt at the worker with the longest hit of all",
                MODEL,
            ).labels
        )
        self.chosen_hit_tokens = registry.per_model(
            counter("chosen_hit_tokens_total", "Hit tokens of each placed prompt where it went", MODEL).labels
        )
        self.lost_hit_tokens = registry.model_counters(
            "lost_hit_tokens_total",
            "What the best worker would have reused more than the chosen one, by why",
            reason=LOST_REASONS,
        )
        self.over_share = registry.per_model(
            counter(
                "prompts_over_share_total",
                "Prompts of an API key that holds more than its fair part of the memory",
                MODEL,
            ).labels
        )
        self.prefill_decisions = registry.counters(
            "prefill_decisions_total",
            "Prompts of models with prefill workers, by where and why they are computed",
            outcome=PrefillOutcome,
        )
        # Models whose workers fetch nothing have no series.
        self.pull_seconds = registry.per_model(
            registry.histogram(
                "peer_pull_seconds",
                "Time in which the blocks of a pull were transferred, by the time to the first token",
                PULL_BUCKETS_S,
                MODEL,
            ).labels
        )
        self.queue_requests = registry.per_model(
            registry.gauge("queue_requests", "Prompts that wait, as all workers are saturated", MODEL).labels
        )
        self.queue_refused = registry.model_counters(
            "queue_refused_total", "Prompts that were not placed, by why", reason=QUEUE_REFUSALS
        )
        self.queue_seconds = registry.per_model(
            registry.histogram(
                "queue_seconds", "Time that a placed prompt waited for a worker", QUEUE_BUCKETS_S, MODEL
            ).labels
        )
