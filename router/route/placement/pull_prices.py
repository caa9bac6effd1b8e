# SPDX-License-Identifier: Apache-2.0
"""The prices of fetching blocks from another worker, in one comparison of workers. Pure.

    prefill with a pull = computed + loading + fetched * (cost of a token in the CPU tier + missing share) + transfer
    transfer = (latency + (fetched + lent) * time of a token) * rate of prefill

- computed: the tokens of the prompt behind the fetched ones.
- lent: the tokens that the source lends to other requests now. They are transferred before, so pulls spread over the
  sources, and prompts are computed where all sources are busy.
- missing share: how much of what was fetched on this way did not arrive lately, and had to be computed after all.

Invariants: a pull is chosen only where it costs less than computing. A worker that holds more on its GPU or in its CPU
tier, a source that lends less and a faster transfer never make a prompt dearer. Compiled, see `setup.py`.
"""

from __future__ import annotations

from typing import NamedTuple

from kvrouter.contract.tiers import MEASURED
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.index.matching.pull import Pull
from kvrouter.router.index.matching.question import Hit
from kvrouter.router.route.load.worker_load import LoadModel
from kvrouter.router.route.placement.lenders import PULL_LATENCY_S, Lender, Lenders


class PricedPull(NamedTuple):
    """The cheapest pull of a worker."""

    pull: Pull
    # The worker's work on the prompt before its first token with this pull, in tokens computed in the same time.
    prefill_tokens: float
    # The part of it in which the worker is free to compute other prompts.
    transfer_tokens: float
    # The price of a fetched token.
    token_cost: float


class PullPrices:
    """The prices of all pulls for one prompt."""

    def __init__(
        self,
        lenders: Lenders,
        weights: LoadModel,
        failed: frozenset[WorkerKey],
        model: str,
        num_tokens: int,
        idle: bool,
    ) -> None:
        """Price the pulls of a prompt.

        Args:
            lenders: The workers that lend.
            weights: The load and the speed of the workers.
            failed: Workers at which the request failed before; nothing is fetched from them.
            model: The model of the prompt.
            num_tokens: The length of the prompt.
            idle: Whether to ignore all other pulls.
        """
        self._lenders = lenders
        self._failed = failed
        self._num_tokens = num_tokens
        self._idle = idle
        self._cpu_cost = weights.token_costs[MEASURED]
        self._prefill_rate = lenders.prefill_rate(model)
        # The lenders that pulls named so far, None for those that lend nothing now.
        self._known: dict[WorkerKey, Lender | None] = {}

    def cheapest(self, hit: Hit, computing: float, loading: float, slowness: float) -> PricedPull | None:
        """Return the cheapest pull of a worker, or None if computing costs no more.

        Args:
            hit: The worker's hit.
            computing: The work before the first token without a pull.
            loading: The part of it that loads blocks from the worker's own tiers.
            slowness: How many times longer than usual the worker takes for a token.
        """
        known, best = self._known, None
        # The tokens that this worker computes in a second.
        rate = self._prefill_rate / slowness
        latency = PULL_LATENCY_S * rate
        reached, host = hit.by_tier[len(hit.by_tier) - 1], ""
        for pull in hit.pulls:
            fetched = pull.tokens - reached
            least = self._num_tokens - pull.tokens + loading + fetched * self._cpu_cost
            # Later pulls have no more tokens.
            if fetched <= 0 or least + latency >= computing:
                break
            source = pull.source
            if source in known:
                lender = known[source]
            else:
                lender = known[source] = None if source in self._failed else self._lenders.lender(source)
            if lender is None:
                continue
            if not host:
                host = self._lenders.host(hit.worker)
                if not host:
                    break
            lent, rates = lender
            transfer_rate = rates.get(host)
            if transfer_rate is None:
                transfer_rate = self._lenders.rate(source, host)
            token_s, missing_share = transfer_rate
            if self._idle:
                lent = 0
            transfer = latency + (fetched + lent) * token_s * rate
            price = least + fetched * missing_share + transfer
            if price < computing:
                computing = price
                token_cost = self._cpu_cost + missing_share + transfer / fetched
                best = PricedPull(pull, price, transfer, token_cost)
        return best
