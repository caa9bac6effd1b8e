# SPDX-License-Identifier: Apache-2.0
"""llm-d's endpoint picker with its default profile.

Source: llm-d/llm-d-router, pkg/epp/config/loader/defaults.go and the scorers queuedepth, kvcacheutilization and prefix
of its main branch in 2026. The highest weighted sum wins; among equals, any:

    score = 2 * queue + 2 * (1 - kv_usage) + 3 * matched share of the prompt's blocks

`queue` is 1 for the engine with the shortest waiting queue, 0 for the longest, in proportion in between, and 1 for all
if all are equal. llm-d's default producer of matches remembers which prompts were sent where; this policy has the
matches of its precise producer, from KV events.
"""

from __future__ import annotations

import random

from kvrouter.replay.policies.peer import Rule, Sight, least

QUEUE_WEIGHT = 2.0
KV_USAGE_WEIGHT = 2.0
PREFIX_WEIGHT = 3.0


class LlmD(Rule):
    """llm-d's rule, which needs no state."""

    def pick(self, sight: Sight, rng: random.Random) -> int:
        """Return the worker of the highest score."""
        engines = sight.engines()
        waiting = [engine.waiting for engine in engines]
        shortest, longest = min(waiting), max(waiting)
        blocks = max(1, len(sight.blocks))
        scores = []
        for engine, hit in zip(engines, sight.hits, strict=True):
            queue = 1.0 if longest == shortest else (longest - engine.waiting) / (longest - shortest)
            matched = min(1.0, hit // sight.block_tokens / blocks)
            scores.append(QUEUE_WEIGHT * queue + KV_USAGE_WEIGHT * (1 - engine.kv_usage) + PREFIX_WEIGHT * matched)
        return least([-score for score in scores], rng)
