# SPDX-License-Identifier: Apache-2.0
"""What the prompts of each API key wrote lately into the workers' caches, so that no key pushes out everybody else's.
Pure.

Time is counted in writings of all pools (`ModelWrites.writings`): what was written earlier fades as an LRU cache forgets
it. A key holds more than its fair part when it wrote more than its share of all keys that wrote anything. Such a key pays
little where its own blocks are pushed out, and much where those of others are, so it stays with the workers that it has
filled already until their queues are long.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from math import exp

from kvrouter.router.common.ids import WorkerKey

# Each holds a number for each worker that it wrote to: some 10 MB at 512 workers. The key that was seen least lately is
# forgotten first, and may then write its fair part again.
MAX_KEYS = 256
# A key that wrote a smaller part is not counted among those that share the memory.
ACTIVE_SHARE_MIN = 0.001
# How much dearer the blocks of others become with each fair part that a key holds beyond its own. From 3 to 30, one key
# with 6,000 prompts of one beginning stays with one of four workers (docs/reference/benchmarks.md); with 1 it took two.
EXCESS_PRICE = 10.0
# Weights grow by e for each writing of all pools; they are scaled back long before a float's precision suffers, and what
# has become a millionth of a token is dropped.
RESCALE_EXPONENT = 30.0
FORGOTTEN_TOKENS = 1e-6


class KeyShare:
    """A key that holds more than its fair part."""

    __slots__ = ("_all", "_own", "excess")

    def __init__(self, excess: float, own: Mapping[WorkerKey, float], everybody: Mapping[WorkerKey, float]) -> None:
        # How many fair parts it holds, above 1.
        self.excess = excess
        self._own = own
        self._all = everybody

    def price(self, worker: WorkerKey) -> float:
        """Return by how much more than usual it costs this key to push out a block of a worker's cache."""
        own = self._own.get(worker, 0.0)
        share = min(1.0, own / self._all[worker]) if own else 0.0
        return share * max(0.0, 2.0 - self.excess) + (1.0 - share) * (1.0 + EXCESS_PRICE * (self.excess - 1.0))


class KeyShares:
    """The keys of one model's prompts. Tokens are weighted by when they were written."""

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self._max_keys = max_keys
        # The tokens that each key wrote to each worker, and the sums by key and by worker.
        self._tokens: OrderedDict[str, dict[WorkerKey, float]] = OrderedDict()
        self._by_key: dict[str, float] = {}
        self._by_worker: dict[WorkerKey, float] = {}
        self._total = 0.0
        # The writings at which a token has the weight 1.
        self._began = 0.0

    def __len__(self) -> int:
        return len(self._tokens)

    def wrote(self, key: str, worker: WorkerKey, new_tokens: int, writings: float) -> None:
        """Count the tokens of a prompt that its worker did not hold."""
        if writings - self._began > RESCALE_EXPONENT:
            self._fade(writings)
        weighted = new_tokens * exp(writings - self._began)
        tokens = self._tokens.setdefault(key, {})
        self._tokens.move_to_end(key)
        tokens[worker] = tokens.get(worker, 0.0) + weighted
        self._by_key[key] = self._by_key.get(key, 0.0) + weighted
        self._by_worker[worker] = self._by_worker.get(worker, 0.0) + weighted
        self._total += weighted
        if len(self._tokens) > self._max_keys:
            oldest = next(iter(self._tokens))
            del self._tokens[oldest]
            self._sum()

    def share(self, key: str) -> KeyShare | None:
        """Return what a key holds, None if that is no more than its fair part."""
        wrote = self._by_key.get(key, 0.0)
        if wrote * len(self._by_key) <= self._total:
            return None
        active = sum(1 for tokens in self._by_key.values() if tokens >= ACTIVE_SHARE_MIN * self._total)
        excess = wrote * active / self._total
        return KeyShare(excess, self._tokens[key], self._by_worker) if excess > 1 else None

    def _fade(self, writings: float) -> None:
        factor, self._began = exp(self._began - writings), writings
        for key, tokens in list(self._tokens.items()):
            kept = {worker: count * factor for worker, count in tokens.items() if count * factor >= FORGOTTEN_TOKENS}
            if kept:
                self._tokens[key] = kept
            else:
                del self._tokens[key]
        self._sum()

    def _sum(self) -> None:
        self._by_key = {key: sum(tokens.values()) for key, tokens in self._tokens.items()}
        self._by_worker = {}
        for tokens in self._tokens.values():
            for worker, count in tokens.items():
                self._by_worker[worker] = self._by_worker.get(worker, 0.0) + count
        self._total = sum(self._by_key.values())
