# SPDX-License-Identifier: Apache-2.0
"""Cache-aware routing by text, as in SGLang's router: a prefix tree of the prompts sent to each worker, without events.

Source: sgl-project/sglang, sgl-router/src/policies/cache_aware.rs and the defaults of its command (router_args.py:
cache_threshold 0.3, balance_abs_threshold 64, balance_rel_threshold 1.5, max_tree_size 2**26), main branch of 2025 to
2026; vllm-project/router has the same policy. If the most loaded worker has more than 64 requests more than the least
loaded one, and more than 1.5 times as many, the least loaded worker gets the request. Otherwise, if more than 0.3 of
the text was sent to one worker before, that worker gets it; else the worker with the fewest requests (earlier versions:
with the smallest tree).

The original tree is over characters. This one is over the trace's pieces, and its size counts `TEXT_BYTES_PER_TOKEN`
characters a token. A worker's least recently used leaves go when its tree is too large, checked as often as in the
original.
"""

from __future__ import annotations

import random

from kvrouter.replay.policies.peer import Rule, Sight
from kvrouter.replay.policies.prefix_tree import PrefixTree

CACHE_THRESHOLD = 0.3
BALANCE_ABS_REQUESTS = 64
BALANCE_REL = 1.5
MAX_TREE_CHARACTERS = 2**26
EVICT_EVERY_S = 120.0
TEXT_BYTES_PER_TOKEN = 4


class CacheAware(Rule):
    """A rule that remembers every prompt it has placed, within the size of its tree."""

    def __init__(self, workers: int, piece_tokens: int) -> None:
        pieces_max = MAX_TREE_CHARACTERS // (TEXT_BYTES_PER_TOKEN * piece_tokens)
        self._tree = PrefixTree(workers, max(1, pieces_max))
        self._evict_s = EVICT_EVERY_S

    def pick(self, sight: Sight, rng: random.Random) -> int:
        """Return the worker with the longest match, or the one with the fewest requests."""
        if sight.now_s >= self._evict_s:
            self._evict_s = sight.now_s + EVICT_EVERY_S
            self._tree.evict()
        requests = [load.requests for load in sight.in_flight]
        emptiest = requests.index(min(requests))
        if max(requests) - min(requests) > BALANCE_ABS_REQUESTS and max(requests) > BALANCE_REL * min(requests):
            return emptiest
        matched, worker = self._tree.match(sight.pieces.tolist())
        return worker if worker is not None and matched > CACHE_THRESHOLD * len(sight.pieces) else emptiest

    def placed(self, sight: Sight, worker: int) -> None:
        """Insert the prompt into the tree."""
        self._tree.insert(sight.pieces.tolist(), worker)
