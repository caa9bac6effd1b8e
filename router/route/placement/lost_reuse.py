# SPDX-License-Identifier: Apache-2.0
"""Reuse that a choice gives up, counted by reason."""

from __future__ import annotations

from collections.abc import Sequence

from kvrouter.router.index.matching.question import Hit
from kvrouter.router.route.load.traffic_sums import TrafficSums
from kvrouter.router.route.placement.choose import EXCLUSION, STATE, Choice
from kvrouter.router.route.placement.placement_metrics import PlacementMetrics


def count_losses(
    metrics: PlacementMetrics,
    traffic: TrafficSums,
    choice: Choice,
    everybody: Sequence[Hit],
    wanted: Sequence[Hit],
) -> None:
    """Count the tokens that the best of all workers would have reused and the chosen one does not.

    Args:
        metrics: The counters.
        traffic: The sums of the model's traffic.
        choice: The chosen worker.
        everybody: The hits of all workers.
        wanted: The hits of the workers that the client did not exclude.
    """
    best = max([hit.by_tier[-1] for hit in everybody])
    if best == 0:
        return
    best_wanted = best if wanted is everybody else max([hit.by_tier[-1] for hit in wanted])
    model = choice.hit.worker.model
    metrics.achievable_hit_tokens(model).inc(best)
    metrics.chosen_hit_tokens(model).inc(choice.hit.tokens)
    sums = traffic.of(model)
    sums.possible_tokens += best
    sums.chosen_tokens += choice.hit.tokens
    for reason, tokens in (
        (EXCLUSION, best - best_wanted),
        (STATE, best_wanted - choice.best_hit_tokens),
        (choice.lost, choice.best_hit_tokens - choice.hit.tokens),
    ):
        if tokens > 0:
            metrics.lost_hit_tokens(model)[reason].inc(tokens)
