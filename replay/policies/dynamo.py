# SPDX-License-Identifier: Apache-2.0
"""NVIDIA Dynamo's KV router with its defaults.

Source: ai-dynamo/dynamo, lib/kv-router/src/scheduling/selector/default.rs and config.rs of its main branch in 2026, and
the page "Routing Concepts" of 1.6.0. Costs are in blocks. The lowest cost wins, at temperature 0; among equals, any:

    cost = max(0, prefill - overlap) + decode

- prefill: tokens that the router has sent to the worker and that have no first token yet, and this whole prompt.
- overlap: a credit of 1 for each block of the prompt that the worker holds by KV events (0.75 for the CPU's, whose
  events without tokens Dynamo drops).
- decode: blocks of the worker's running prompts, each distinct block once, with this one's.

decode_active_request_weight is 0, and output blocks are not tracked.
"""

from __future__ import annotations

import random
from collections import Counter

from kvrouter.replay.policies.peer import Rule, Sight, least


class Dynamo(Rule):
    """A rule that remembers the blocks of running requests."""

    def __init__(self, workers: int) -> None:
        self._active: list[Counter[int]] = [Counter() for _ in range(workers)]

    def pick(self, sight: Sight, rng: random.Random) -> int:
        """Return the worker of the lowest cost."""
        costs = []
        for active, load, hit in zip(self._active, sight.in_flight, sight.hits, strict=True):
            prefill = (load.prefill_tokens + sight.num_tokens) / sight.block_tokens
            decode = len(active) + sum(block not in active for block in sight.blocks)
            costs.append(max(0.0, prefill - hit // sight.block_tokens) + decode)
        return least(costs, rng)

    def placed(self, sight: Sight, worker: int) -> None:
        """Count the prompt's blocks as active."""
        self._active[worker].update(sight.blocks)

    def done(self, blocks: list[int], worker: int) -> None:
        """Count the prompt's blocks as no longer active."""
        active = self._active[worker]
        for block in blocks:
            if active[block] > 1:
                active[block] -= 1
            else:
                del active[block]
