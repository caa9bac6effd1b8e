# SPDX-License-Identifier: Apache-2.0
"""Cache-aware by text, as SGLang's router has it: a prefix tree of what was sent where, no events.

Source: sgl-project/sglang, sgl-router/src/policies/cache_aware.rs and the defaults of its command (router_args.py:
cache_threshold 0.3, balance_abs_threshold 64, balance_rel_threshold 1.5, max_tree_size 2**26), main branch of 2025 to
2026; vllm-project/router has the same policy. Where the most loaded worker has more than 64 requests and more than 1.5
times as many as the least loaded one, the least loaded takes it. Otherwise, if more than 0.3 of the text was sent to
one worker before, that one; else the one with the fewest requests (earlier versions: with the smallest tree).

The tree is over characters there and over the trace's pieces here, at `TEXT_BYTES_PER_TOKEN` a token for its size. A
worker's least recently used leaves go when its tree is too large, checked as often as there."""

from __future__ import annotations

import random

from kvrouter.replay.policies.peer import Sight
from kvrouter.replay.policies.prefix_tree import PrefixTree

CACHE_THRESHOLD = 0.3
BALANCE_ABS_REQUESTS = 64
BALANCE_REL = 1.5
MAX_TREE_CHARACTERS = 2**26
EVICT_EVERY_S = 120.0
TEXT_BYTES_PER_TOKEN = 4


class CacheAware:
    """Remembers every prompt it has placed, within the size of its tree."""

    def __init__(self, workers: int, piece_tokens: int) -> None:
        pieces_max = MAX_TREE_CHARACTERS // (TEXT_BYTES_PER_TOKEN * piece_tokens)
        self._tree = PrefixTree(workers, max(1, pieces_max))
        self._evict_s = EVICT_EVERY_S

    def pick(self, sight: Sight, rng: random.Random) -> int:
        if sight.now_s >= self._evict_s:
            self._evict_s = sight.now_s + EVICT_EVERY_S
            self._tree.evict()
        requests = [own.requests for own in sight.in_flight]
        emptiest = requests.index(min(requests))
        if max(requests) - min(requests) > BALANCE_ABS_REQUESTS and max(requests) > BALANCE_REL * min(requests):
            return emptiest
        matched, worker = self._tree.match(sight.pieces.tolist())
        return worker if worker is not None and matched > CACHE_THRESHOLD * len(sight.pieces) else emptiest

    def placed(self, sight: Sight, worker: int) -> None:
        self._tree.insert(sight.pieces.tolist(), worker)

    def done(self, blocks: list[int], worker: int) -> None:
        pass
