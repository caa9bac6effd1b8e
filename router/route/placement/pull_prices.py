# SPDX-License-Identifier: Apache-2.0
"""The prices of fetching blocks from another worker, in one comparison of workers. Pure.

    prefill with a pull = computed + loading + fetched * (cost of a token in the CPU tier + missing share) + transfer
    transfer = (latency + (fetched + lent) * time of a token) * rate of prefill

- computed: the tokens of the prompt behind the fetched ones.
- lent: the tokens that the source lends to other requests now. They are transferred before, so pulls spread over the
  sources, and prompts are computed where all sources are busy.
- missing share: the share of tokens that did not arrive in the last pulls between these hosts, and had to be computed.

Invariants: a pull is chosen only where it costs less than computing. A worker that holds more on its GPU or in its CPU
tier, a source that lends less and a faster transfer never make a prompt dearer. Compiled, see `setup.py`.
"""

from __future__ import annotations

from kvrouter.contract.tiers import MEASURED
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.index.matching.pull import Pull
from kvrouter.router.route.load.worker_load import LoadModel
from kvrouter.router.route.placement.lenders import PULL_LATENCY_S, Lender, Lenders


class PullPrices:
    """The prices of all pulls for one prompt, and the figures of the cheapest pull that was found last."""

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
        # The known hosts of workers.
        self._hosts = lenders.hosts
        self._cpu_cost = weights.token_costs[MEASURED]
        self._prefill_rate = lenders.prefill_rate(model)
        self._latency_s = PULL_LATENCY_S
        # The worker's work before its first token with the cheapest pull, in tokens computed in the same time; the part of it
        # in which it waits for blocks and is free to compute other prompts; and the price of a fetched token.
        self.prefill_tokens = 0.0
        self.transfer_tokens = 0.0
        self.token_cost = 0.0
        # The lenders that pulls named so far, None for those that lend nothing now.
        self._known: dict[WorkerKey, Lender | None] = {}
        # The sources of the previous worker's pulls, and these sources as lenders. Nearly all workers have the same, so
        # comparing them saves a look-up in `_known`.
        self._last_sources: list[WorkerKey] = []
        self._last_lenders: list[Lender | None] = []

    def cheapest(
        self,
        pulls: tuple[Pull, ...],
        worker: WorkerKey,
        reached: int,
        computing: float,
        loading: float,
        slowness: float,
    ) -> Pull | None:
        """Return the cheapest pull of a worker and keep its figures, or return None if computing costs no more.

        Args:
            pulls: The pulls of the worker, the one with the most tokens first.
            worker: The worker.
            reached: The tokens of its hit.
            computing: The work before the first token without a pull.
            loading: The part of it that loads blocks from the worker's own tiers.
            slowness: How many times longer than usual the worker takes for a token.
        """
        sources, lenders = self._last_sources, self._last_lenders
        best: Pull | None = None
        best_transfer = best_cost = 0.0
        # The tokens that this worker computes in a second.
        rate = self._prefill_rate / slowness
        latency = self._latency_s * rate
        host: str | None = None
        for place, pull in enumerate(pulls):
            tokens = pull.tokens
            fetched = tokens - reached
            least = self._num_tokens - tokens + loading + fetched * self._cpu_cost
            # Later pulls have no more tokens.
            if fetched <= 0 or least + latency >= computing:
                break
            source = pull.source
            is_same = place < len(sources) and sources[place] is source
            lender = lenders[place] if is_same else self._lender(source, place)
            if lender is None:
                continue
            if host is None:
                host = self._hosts.get(worker)
                if host is None:
                    host = self._lenders.host(worker)
                if not host:
                    break
            rates, waiting = lender[1], fetched
            if not self._idle:
                waiting += lender[0]
            transfer_rate = rates.get(host)
            if transfer_rate is None:
                transfer_rate = self._lenders.rate(source, host)
            token_s, missing = transfer_rate
            transfer = latency + waiting * token_s * rate
            price = least + fetched * missing + transfer
            if price < computing:
                computing = price
                best, best_transfer = pull, transfer
                best_cost = self._cpu_cost + missing + transfer / fetched
        if best is not None:
            self.prefill_tokens, self.transfer_tokens, self.token_cost = computing, best_transfer, best_cost
        return best

    def _lender(self, source: WorkerKey, place: int) -> Lender | None:
        """Return the source as a lender, None if it lends nothing now; the next worker's pull at `place` finds it again."""
        known = self._known
        if source not in known:
            known[source] = None if source in self._failed else self._lenders.lender(source)
        lender, sources = known[source], self._last_sources
        if place < len(sources):
            sources[place], self._last_lenders[place] = source, lender
        else:
            sources.append(source)
            self._last_lenders.append(lender)
        return lender
