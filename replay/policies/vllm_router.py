# SPDX-License-Identifier: Apache-2.0
"""vllm-router with `--policy kv_aware`.

Source: vllm-project/router, src/policies/kv_aware.rs of its main branch in 2026 (0.1.17 is the package). The longest
prefix by KV events wins, the last of equals; without any match, the worker with the fewest requests in flight wins, the
first of equals. Blocks that the router has just sent to a worker, from the best match on, count as cached there for
2 s. The queue has no other influence.
"""

from __future__ import annotations

import random
from collections import deque

from kvrouter.replay.policies.peer import Rule, Sight

SPECULATIVE_S = 2.0


class VllmRouter(Rule):
    """A rule that remembers the blocks sent to each worker in the last two seconds."""

    def __init__(self, workers: int) -> None:
        self._sent: list[dict[int, float]] = [{} for _ in range(workers)]
        self._order: deque[tuple[float, int, list[int]]] = deque()

    def pick(self, sight: Sight, rng: random.Random) -> int:
        """Return the worker with the longest prefix, or the one with the fewest requests in flight."""
        self._expire(sight.now_s)
        scores = self._scores(sight)
        best = max(scores)
        if best == 0:
            return min(range(len(scores)), key=lambda worker: sight.in_flight[worker].requests)
        return max(worker for worker, score in enumerate(scores) if score == best)

    def placed(self, sight: Sight, worker: int) -> None:
        """Remember the blocks beyond the best match as sent to `worker`."""
        blocks = sight.blocks[max(self._scores(sight)) :]
        until_s = sight.now_s + SPECULATIVE_S
        self._sent[worker].update(dict.fromkeys(blocks, until_s))
        self._order.append((until_s, worker, blocks))

    def _scores(self, sight: Sight) -> list[int]:
        """Return for each worker how many blocks in a row, from the first on, count as cached."""
        scores = []
        for sent, hit in zip(self._sent, sight.hits, strict=True):
            count = hit // sight.block_tokens
            while sent and count < len(sight.blocks) and sight.blocks[count] in sent:
                count += 1
            scores.append(count)
        return scores

    def _expire(self, now_s: float) -> None:
        while self._order and self._order[0][0] <= now_s:
            _, worker, blocks = self._order.popleft()
            sent = self._sent[worker]
            for block in blocks:
                if sent.get(block, now_s + 1) <= now_s:
                    del sent[block]
