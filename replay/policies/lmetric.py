# SPDX-License-Identifier: Apache-2.0
"""LMetric's cost: one product without weights.

Source: arXiv 2603.15202 (March 2026), as llm-d's scorer `lmetric` states it (llm-d/llm-d-router, main branch in 2026):

    cost = (prompt tokens - cached tokens) * (requests in flight + 1)

The lowest cost wins; among equals, any. `lmetric_exact` is the same product over this router's hits, which count every
group and tier: it separates the effect of the cost from the effect of the index.
"""

from __future__ import annotations

import random

from kvrouter.replay.policies.peer import Rule, Sight, least


class LMetric(Rule):
    """LMetric's rule, which needs no state."""

    def __init__(self, *, exact: bool = False) -> None:
        """Create the rule; `exact` takes hits by all groups and tiers."""
        self._exact = exact

    def pick(self, sight: Sight, rng: random.Random) -> int:
        """Return the worker of the lowest cost."""
        hits = sight.exact_hits if self._exact else sight.hits
        return least(
            [(sight.num_tokens - hit) * (own.requests + 1) for hit, own in zip(hits, sight.in_flight, strict=True)], rng
        )
