# SPDX-License-Identifier: Apache-2.0
"""The tokens that each API key's prompts wrote lately into the workers' caches. Pure.

They keep one key from pushing out the blocks of all others. Time is counted in writings of all pools
(`ModelWrites.writings`): older tokens fade as an LRU cache forgets them.

A key holds more than its fair part if it wrote more than its share among all active keys. Its fair part is then the set
of workers to which it wrote the most, as many as each key would get. At these workers it pays little where its own
blocks are pushed out; everywhere else it pays much, so it gathers on its part until the queues there are long. Prompts
without a key belong to unknown clients: they count as others' and never pay more.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping
from heapq import nlargest
from math import exp

from kvrouter.router.base.common.ids import WorkerKey

# Each key has a number for each worker that it wrote to: some 10 MB at 512 workers. The least recently seen key is
# forgotten first, and may then write its fair part again.
MAX_KEYS = 256
# A key that wrote a smaller part is not counted among the keys that share the memory: slow chats beside a flood write a
# thousandth of its tokens.
ACTIVE_SHARE_MIN = 0.0001
# A key that wrote a smaller part floods nothing, however many others there are.
FLOOD_SHARE_MIN = 0.05
# How much more expensive the blocks of others become with each fair part that a key holds beyond its own. With 30, a
# key whose prompts one replica can answer stays with one of four; with 1 it took two (ADR 47).
EXCESS_PRICE = 30.0
# The excess above which the price stays the same: a price without bound would leave replicas idle beside long queues.
EXCESS_MAX = 4.0
# Weights grow by e with each writing of all pools. They are scaled back at this exponent, long before a float's
# precision suffers, and weights below a millionth of a token are then dropped.
RESCALE_EXPONENT = 30.0
FORGOTTEN_TOKENS = 1e-6


class KeyShare:
    """The share of a key that holds more than its fair part."""

    __slots__ = ("_all", "_own", "excess")

    def __init__(self, excess: float, own: Mapping[WorkerKey, float], everybody: Mapping[WorkerKey, float]) -> None:
        """Describe a key's share.

        Args:
            excess: How many fair parts the key holds, above 1 and at most EXCESS_MAX.
            own: Tokens that the key wrote to the workers of its fair part.
            everybody: Tokens that all keys wrote to each worker.
        """
        self.excess = excess
        self._own = own
        self._all = everybody

    def price(self, worker: WorkerKey) -> float:
        """Return the factor on the price of room at a worker.

        It is below 1 where the key itself wrote most of the worker's recent tokens.
        """
        own = self._own.get(worker, 0.0)
        # Rounding may have made the sum smaller than its part.
        share = own / max(own, self._all[worker]) if own else 0.0
        return share * max(0.0, 2.0 - self.excess) + (1.0 - share) * (1.0 + EXCESS_PRICE * (self.excess - 1.0))


class KeyShares:
    """The keys of one model's prompts. Tokens weigh less the longer ago they were written."""

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self._max_keys = max_keys
        # The weighted tokens that each key wrote to each worker, and their sums by key and by worker.
        self._tokens: OrderedDict[str, dict[WorkerKey, float]] = OrderedDict()
        self._by_key: dict[str, float] = {}
        self._by_worker: dict[WorkerKey, float] = {}
        self._total = 0.0
        # The count of writings at which a token has the weight 1.
        self._began = 0.0

    def wrote(self, key: str, worker: WorkerKey, new_tokens: int, writings: float) -> None:
        """Count the tokens of a prompt that its worker did not hold.

        Args:
            key: The API key's name; empty for a prompt without a key.
            worker: The worker that computes the prompt.
            new_tokens: Tokens of the prompt that the worker did not hold.
            writings: The current count of writings of all pools.
        """
        if writings < self._began:
            # The model's last worker was removed since, and the count of writings began again at 0 with its next worker.
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
        """Return a key's share, or None if it is no more than its fair part or there is no key."""
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
        """Forget the tokens that were written to all other workers."""
        if self._by_worker.keys() <= set(workers):
            return
        for tokens in self._tokens.values():
            for worker in [worker for worker in tokens if worker not in workers]:
                del tokens[worker]
        self._sum()

    def _drop(self, key: str) -> None:
        """Forget a key."""
        for worker, tokens in self._tokens.pop(key).items():
            self._by_worker[worker] -= tokens
        self._total -= self._by_key.pop(key)

    def _fade(self, writings: float) -> None:
        """Give a token written now the weight 1, and scale all older weights accordingly."""
        factor, self._began = exp(self._began - writings), writings
        for key, tokens in self._tokens.items():
            faded = {worker: count * factor for worker, count in tokens.items()}
            self._tokens[key] = {worker: count for worker, count in faded.items() if count >= FORGOTTEN_TOKENS}
        self._sum()

    def _forget_all(self, writings: float) -> None:
        """Forget all keys, and count from these writings on."""
        self._tokens.clear()
        self._began = writings
        self._sum()

    def _sum(self) -> None:
        """Compute all sums again, and drop keys without tokens."""
        for key in [key for key, tokens in self._tokens.items() if not tokens]:
            del self._tokens[key]
        self._by_key = {key: sum(tokens.values()) for key, tokens in self._tokens.items()}
        self._by_worker = {}
        for tokens in self._tokens.values():
            for worker, count in tokens.items():
                self._by_worker[worker] = self._by_worker.get(worker, 0.0) + count
        self._total = sum(self._by_key.values())
