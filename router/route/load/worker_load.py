# SPDX-License-Identifier: Apache-2.0
"""The load that the cost function uses: the routers' count, corrected by the engines' reports. Pure.

It also knows each worker's measured speed. An instance belongs to one process: the load of other processes comes from
`LoadTable`, and the engines' reports arrive through `take_engine_load`.
"""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median

import msgspec

from kvrouter.contract.tiers import MEASURED, TOKEN_COSTS
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.model.engines.engine_metrics import EngineLoad
from kvrouter.router.route.load.load_table import LoadTable, WorkerLoad
from kvrouter.router.route.load.prompt_lengths import PromptLengths
from kvrouter.router.route.load.transfer_rates import TransferRates
from kvrouter.router.route.load.worker_speed import WorkerSpeed, slowness

# An engine's report stays valid for a few polling intervals; once it is older, the engine is no longer polled.
GAUGE_TTL_S = 10.0
# A request that was just reserved is still on its way to the engine. If it is older than this and its engine reports
# that it is idle, the request has ended or never arrived.
IDLE_GRACE_S = 3.0
# Above this usage of the KV cache, with prompts waiting, running requests are about to be preempted, and a new prompt
# makes it worse.
KV_USAGE_FULL = 0.95
# The largest share of a worker's current prompt that counts as computed: a prompt that is late is not done yet.
PROGRESS_MAX = 0.9
# The running means are over about this many requests. Below: the means before the first request.
TYPICAL_REQUESTS = 64
FIRST_PREFILL_TOKENS = 1_000.0
FIRST_CONTEXT_TOKENS = 2_000.0


class WorkerBacklog(msgspec.Struct, frozen=True):
    """The work that one worker has to do, in tokens and requests."""

    queued_tokens: int = 0
    decode_tokens: int = 0
    requests: int = 0
    # Whether the worker should get no further prompts.
    saturated: bool = False
    # Tokens of its CPU tier that other workers fetch.
    lent_tokens: int = 0


class Correction(msgspec.Struct, frozen=True):
    """An engine's last report, and the part of its load that did not come through these routers."""

    # The engine's report, and when it arrived.
    engine_load: EngineLoad
    heard_s: float
    # Requests at the engine beyond those that the routers count.
    foreign: int
    # Estimated tokens of the foreign requests that wait, and of those that run.
    foreign_prefill_tokens: int
    foreign_decode_tokens: int
    # Whether prompts wait while its cache is full.
    is_full: bool = False


class LoadModel:
    """The backlog and the speed of every worker."""

    def __init__(self, table: LoadTable, saturation_tokens: int) -> None:
        self.table = table
        # Queued prefill tokens above which a worker takes no further prompts.
        self.saturation_tokens = saturation_tokens
        self.corrections: dict[WorkerKey, Correction] = {}
        self.rates: dict[WorkerKey, WorkerSpeed] = {}
        # Factors of the workers that differ from the usual speed; `tick` rebuilds it.
        self.slowness: dict[WorkerKey, float] = {}
        # The usual rate of prefill of each model, and of the fleet, in tokens a second; `tick` rebuilds them.
        self.usual_rates: dict[str, float] = {}
        self.fleet_rate: float | None = None
        # The cost of a token that is loaded back, by tier, in computed tokens.
        self.token_costs = TOKEN_COSTS
        self.transfers = TransferRates()
        self.prompts = PromptLengths()
        # Running means over the requests that were placed: the tokens to prefill, and the length of the context.
        self._prefill_tokens = FIRST_PREFILL_TOKENS
        self._context_tokens = FIRST_CONTEXT_TOKENS

    def typical(self, prefill_tokens: float, context_tokens: float) -> None:
        """Add a placed request to the running means of the sizes of requests.

        Requests that bypass the routers are assumed to be of the mean sizes.
        """
        self._prefill_tokens += (prefill_tokens - self._prefill_tokens) / TYPICAL_REQUESTS
        self._context_tokens += (context_tokens - self._context_tokens) / TYPICAL_REQUESTS

    def take_engine_load(self, worker: WorkerKey, report: EngineLoad, now: float) -> int:
        """Apply an engine's report of its load, and return how many reservations it ended in this process."""
        ended = 0
        if report.requests == 0:
            ended = self.table.void(worker, now - IDLE_GRACE_S, now)
        load = self.table.loads.get(worker)
        foreign = max(0, report.requests - (load.requests if load is not None else 0))
        previous = self.corrections.get(worker)
        # Take the smaller of two consecutive reports, because a single one may fall between the start or end of
        # requests.
        counted = min(foreign, previous.foreign) if previous is not None else 0
        waiting = min(counted, report.waiting)
        self.corrections[worker] = Correction(
            report,
            now,
            foreign,
            round(waiting * self._prefill_tokens),
            round((counted - waiting) * self._context_tokens),
            report.waiting > 0 and report.kv_usage >= KV_USAGE_FULL,
        )
        return ended

    @property
    def usual_prefill_tokens(self) -> float:
        """The mean number of tokens that a prompt makes its worker compute."""
        return self._prefill_tokens

    def progress_tokens(self, worker: WorkerKey, load: WorkerLoad, now: float) -> float:
        """Return how many of the queued tokens a worker has computed since its last first token.

        It is an estimate by the worker's measured speed, 0 while that is not known. Only the prompt under way counts,
        never the prompts behind it.
        """
        speed = self.rates.get(worker)
        if speed is None or speed.prefill_rate is None:
            return 0.0
        # If the prompt under way belongs to another process, its length is unknown; it is assumed to be a usual one.
        head = load.head_tokens or min(load.prefill_tokens, self._prefill_tokens)
        return min(head * PROGRESS_MAX, speed.prefill_rate * max(0.0, now - load.since_s))

    def burden(self, worker: WorkerKey) -> WorkerBacklog:
        """Return a worker's backlog by the reservations and the engine's report.

        The computed part of the prompt under way is not subtracted.
        """
        load, correction = self.table.loads.get(worker), self.corrections.get(worker)
        queued = load.prefill_tokens if load is not None else 0
        decode = load.decode_tokens if load is not None else 0
        requests = load.requests if load is not None else 0
        lent_tokens = load.lent_tokens if load is not None else 0
        if correction is not None:
            queued += correction.foreign_prefill_tokens
            decode += correction.foreign_decode_tokens
            requests += min(correction.foreign, correction.engine_load.requests)
        return WorkerBacklog(queued, decode, requests, self.is_saturated(queued, correction), lent_tokens)

    def is_saturated(self, queued_tokens: int, correction: Correction | None) -> bool:
        """Return whether a worker is saturated.

        It is if prompts wait while its cache is full, or if too much is queued. A queue of up to twice the limit is
        tolerated while the engine reports that no prompt waits.

        Args:
            queued_tokens: Prefill tokens queued at the worker.
            correction: The engine's last report, or None if there is none.
        """
        if correction is not None and correction.is_full:
            return True
        if queued_tokens <= self.saturation_tokens:
            return False
        return correction is None or correction.engine_load.waiting > 0 or queued_tokens > 2 * self.saturation_tokens

    def rates_of(self, worker: WorkerKey) -> WorkerSpeed:
        """Return a worker's speed, creating it on first use."""
        speed = self.rates.get(worker)
        if speed is None:
            speed = self.rates[worker] = WorkerSpeed()
        return speed

    def drain_s(self, worker: WorkerKey, tokens: int) -> float | None:
        """Return how many seconds a worker needs to compute these tokens, or None while its speed is not known."""
        speed = self.rates.get(worker)
        return tokens / speed.prefill_rate if speed is not None and speed.prefill_rate else None

    def prefill_rate(self, worker: WorkerKey) -> float | None:
        """Return a worker's rate of prefill, else its model's, else the fleet's, or None if no speed is known."""
        speed = self.rates.get(worker)
        if speed is not None and speed.prefill_rate:
            return speed.prefill_rate
        return self.usual_rates.get(worker.model, self.fleet_rate)

    def forget(self, worker: WorkerKey) -> None:
        """Forget all that was measured and reported of a worker that was dropped.

        Its requests stay in `table` until they end: their engine may be registered again, under the same name.
        """
        self.corrections.pop(worker, None)
        self.rates.pop(worker, None)
        self.slowness.pop(worker, None)
        self.prompts.forget(worker)

    def tick(self, workers: Iterable[WorkerKey], now: float) -> None:
        """Drop outdated reports and absent workers, and compare the workers' speeds; called periodically.

        Args:
            workers: All workers that exist.
            now: The current time.
        """
        present = frozenset(workers)
        for worker in [w for w, c in self.corrections.items() if c.heard_s < now - GAUGE_TTL_S or w not in present]:
            del self.corrections[worker]
        for worker in [worker for worker in self.rates if worker not in present]:
            del self.rates[worker]
        self.prompts.keep(present)
        self.transfers.tick(now)
        by_model: dict[str, list[float]] = {}
        for worker, speed in self.rates.items():
            if speed.prefill_rate:
                by_model.setdefault(worker.model, []).append(speed.prefill_rate)
        self.usual_rates = usual = {model: median(rates) for model, rates in by_model.items()}
        if by_model:
            self.fleet_rate = median([rate for rates in by_model.values() for rate in rates])
        factors = {w: slowness(speed.prefill_rate, usual.get(w.model)) for w, speed in self.rates.items()}
        self.slowness = {worker: factor for worker, factor in factors.items() if factor != 1.0}
        costs = [speed.loaded_token_cost for speed in self.rates.values() if speed.loaded_token_cost is not None]
        if costs:
            cost, behind = median(costs), MEASURED + 1
            # The tiers behind the measured one are assumed not to be faster.
            self.token_costs = (*TOKEN_COSTS[:MEASURED], cost, *[max(cost, usual) for usual in TOKEN_COSTS[behind:]])
