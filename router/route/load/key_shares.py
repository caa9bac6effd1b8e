# SPDX-License-Identifier: Apache-2.0
"""The tokens that each API key's prompts wrote lately into the workers' caches, so that no key pushes out everybody
else's. Pure.

Time is counted in writings of all pools (`ModelWrites.writings`): what was written earlier fades as an LRU cache forgets
it. A key holds more than its fair part when it wrote more than its share of all keys that wrote anything. Its fair part
are then the workers to which it wrote the most, as many as everybody would have. There it pays little where its own
blocks are pushed out, and everywhere else much, so it gathers on its part until the queues there are long. Prompts that
name no key are somebody's, but nobody knows whose: they count as others' and never pay more.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping
from heapq import nlargest
from math import exp

from kvrouter.router.base.common.ids import WorkerKey

# Each holds a number for each worker that it wrote to: some 10 MB at 512 workers. The key that was seen least lately is
# forgotten first, and may then write its fair part again.
MAX_KEYS = 256
# A key that wrote a smaller part is not counted among those that share the memory: chats that go on slowly beside a flood
# write a thousandth of what it does.
ACTIVE_SHARE_MIN = 0.0001
# A key that wrote a smaller part floods nothing, however many others there are.
FLOOD_SHARE_MIN = 0.05
# How much dearer the blocks of others become with each fair part that a key holds beyond its own. With 30, a key whose
# prompts one replica can answer stays with one of four; with 1 it took two (ADR 47).
EXCESS_PRICE = 30.0
# Further parts make nothing dearer: a price without bound would leave replicas idle beside long queues.
EXCESS_MAX = 4.0
# Weights grow by e for each writing of all pools; they are scaled back long before a float's precision suffers, and what
# has become a millionth of a token is dropped.
RESCALE_EXPONENT = 30.0
FORGOTTEN_TOKENS = 1e-6


class KeyShare:
    """A key that holds more than its fair part."""

    __slots__ = ("_all", "_own", "excess")

    def __init__(self, excess: float, own: Mapping[WorkerKey, float], everybody: Mapping[WorkerKey, float]) -> None:
        """excess: how many fair parts it holds, above 1 and at most EXCESS_MAX. own: what it wrote to the workers of its
        fair part. everybody: what all wrote to each worker."""
        self.excess = excess
        self._own = own
        self._all = everybody

    def price(self, worker: WorkerKey) -> float:
        """Return the factor on the price of room at a worker: below 1 where most of what was written is the key's own."""
        own = self._own.get(worker, 0.0)
        # The sum may have lost a little to rounding.
        share = own / max(own, self._all[worker]) if own else 0.0
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

    def wrote(self, key: str, worker: WorkerKey, new_tokens: int, writings: float) -> None:
        """Count the tokens of a prompt that its worker did not hold. key: empty for a prompt that names none."""
        if writings < self._began:
            # The model's last worker went, and the writings of those that came since are counted from 0.
            self._forget_all(writings)
        elif writings - self._began > RESCALE_EXPONENT:
            self._fade(writings)
        weighted = new_tokens * exp(writings - self._began)
        tokens = self._tokens.setdefault(key, {})
        self._tokens.move_to_end(key)
        tokens[worker] = tokens.get(worker, 0.0) + weighted
        self._by_key[key] = self._by_key.get(key, 0.0) + weighted
        self._by_worker[worker] = self._by_worker.get(worker, 0.0) + weighted
        self._total += weighted
        if len(self._tokens) > self._max_keys:
            self._drop(next(iter(self._tokens)))

    def share(self, key: str) -> KeyShare | None:
        """Return what a key holds, None if that is no more than its fair part, or there is no key."""
        wrote = self._by_key.get(key, 0.0) if key else 0.0
        if wrote <= self._total * max(FLOOD_SHARE_MIN, 1 / max(1, len(self._by_key))):
            return None
        active = sum(1 for tokens in self._by_key.values() if tokens >= ACTIVE_SHARE_MIN * self._total)
        excess = min(EXCESS_MAX, wrote * active / self._total)
        if excess <= 1:
            return None
        tokens = self._tokens[key]
        part = nlargest(max(1, len(self._by_worker) // active), tokens, key=tokens.__getitem__)
        return KeyShare(excess, {worker: tokens[worker] for worker in part}, self._by_worker)

    def keep(self, workers: Collection[WorkerKey]) -> None:
        """Forget what was written to all other workers."""
        if self._by_worker.keys() <= set(workers):
            return
        for tokens in self._tokens.values():
            for worker in [worker for worker in tokens if worker not in workers]:
                del tokens[worker]
        self._sum()

    def _drop(self, key: str) -> None:
        for worker, tokens in self._tokens.pop(key).items():
            self._by_worker[worker] -= tokens
        self._total -= self._by_key.pop(key)

    def _fade(self, writings: float) -> None:
        factor, self._began = exp(self._began - writings), writings
        for key, tokens in self._tokens.items():
            faded = {worker: count * factor for worker, count in tokens.items()}
            self._tokens[key] = {worker: count for worker, count in faded.items() if count >= FORGOTTEN_TOKENS}
        self._sum()

    def _forget_all(self, writings: float) -> None:
        self._tokens.clear()
        self._began = writings
        self._sum()

    def _sum(self) -> None:
        """Add up what is there, and drop keys of which nothing is left."""
        for key in [key for key, tokens in self._tokens.items() if not tokens]:
            del self._tokens[key]
        self._by_key = {key: sum(tokens.values()) for key, tokens in self._tokens.items()}
        self._by_worker = {}
        for tokens in self._tokens.values():
            for worker, count in tokens.items():
                self._by_worker[worker] = self._by_worker.get(worker, 0.0) + count
        self._total = sum(self._by_key.values())
