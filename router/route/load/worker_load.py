# SPDX-License-Identifier: Apache-2.0
"""The load as the cost uses it: the routers' count, corrected by the engines' reports, with each worker's measured
speed. Pure.

Belongs to one process; the load of others comes from `LoadTable`, the engines' reports from `engine_said`."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median

import msgspec

from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.model.engines.engine_metrics import EngineLoad
from kvrouter.router.route.load.load_table import LoadTable, WorkerLoad
from kvrouter.router.route.load.prompt_lengths import PromptLengths
from kvrouter.router.route.load.worker_speed import DISK_TOKEN_COST, TierCosts, WorkerSpeed, slowness

# An engine's report counts for a few of its polls; after that nobody polls it.
GAUGE_TTL_S = 10.0
# A request that was just reserved is on its way to the engine; one older than this and not seen by an engine that says
# that it is idle has ended, or never came.
IDLE_GRACE_S = 3.0
# A full cache and prompts that wait: what runs is about to be preempted, and a new prompt makes it worse.
KV_USAGE_FULL = 0.95
# The share of a worker's current prompt that counts as computed at most: a late prompt is not done yet.
PROGRESS_MAX = 0.9
# Requests whose weight in the running mean equals that of all earlier ones; and the mean before the first one.
TYPICAL_REQUESTS = 64
FIRST_PREFILL_TOKENS = 1_000.0
FIRST_CONTEXT_TOKENS = 2_000.0


class WorkerBacklog(msgspec.Struct, frozen=True):
    """What one worker has to do, in tokens and requests."""

    queued_tokens: int = 0
    decode_tokens: int = 0
    requests: int = 0
    saturated: bool = False


class Correction(msgspec.Struct, frozen=True):
    """What an engine last said, and what of it did not come through these routers."""

    said: EngineLoad
    heard_s: float
    foreign: int
    foreign_prefill_tokens: int
    foreign_decode_tokens: int


class LoadModel:
    """Every worker's burden and speed. saturation_tokens: queued prefill tokens over which a worker takes no more."""

    def __init__(self, table: LoadTable, saturation_tokens: int) -> None:
        self.table = table
        self.saturation_tokens = saturation_tokens
        self.corrections: dict[WorkerKey, Correction] = {}
        self.rates: dict[WorkerKey, WorkerSpeed] = {}
        # Only workers that differ from the usual; rebuilt by `tick`.
        self.slowness: dict[WorkerKey, float] = {}
        self.tiers = TierCosts()
        self.prompts = PromptLengths()
        self._prefill_tokens = FIRST_PREFILL_TOKENS
        self._context_tokens = FIRST_CONTEXT_TOKENS

    def typical(self, prefill_tokens: float, context_tokens: float) -> None:
        """One more request of these sizes went to some worker. Requests of others are assumed to be similar."""
        self._prefill_tokens += (prefill_tokens - self._prefill_tokens) / TYPICAL_REQUESTS
        self._context_tokens += (context_tokens - self._context_tokens) / TYPICAL_REQUESTS

    def engine_said(self, worker: WorkerKey, said: EngineLoad, now: float) -> int:
        """An engine's own numbers; returns how many reservations they ended here."""
        ended = 0
        if said.requests == 0:
            ended = self.table.void(worker, now - IDLE_GRACE_S, now)
        load = self.table.loads.get(worker)
        foreign = max(0, said.requests - (load.requests if load is not None else 0))
        before = self.corrections.get(worker)
        # The smaller of two in a row: a single report may fall between the start or end of requests.
        counted = min(foreign, before.foreign) if before is not None else 0
        waiting = min(counted, said.waiting)
        self.corrections[worker] = Correction(
            said,
            now,
            foreign,
            round(waiting * self._prefill_tokens),
            round((counted - waiting) * self._context_tokens),
        )
        return ended

    @property
    def usual_prefill_tokens(self) -> float:
        """What a prompt makes a worker compute, on average."""
        return self._prefill_tokens

    def progress_tokens(self, worker: WorkerKey, load: WorkerLoad, now: float) -> float:
        """Of what is queued there, what the worker has computed since its last first token, at its measured speed: of
        the prompt that it is at, never of those behind it. 0 while its speed is not known."""
        rates = self.rates.get(worker)
        if rates is None or rates.prefill_rate is None:
            return 0.0
        # Another process's prompt is assumed to be a usual one.
        head = load.head_tokens or min(load.prefill_tokens, self._prefill_tokens)
        return min(head * PROGRESS_MAX, rates.prefill_rate * max(0.0, now - load.since_s))

    def burden(self, worker: WorkerKey) -> WorkerBacklog:
        """As the reservations and the engine say it, without what is computed of a prompt under way."""
        load, correction = self.table.loads.get(worker), self.corrections.get(worker)
        queued = load.prefill_tokens if load is not None else 0
        decode = load.decode_tokens if load is not None else 0
        requests = load.requests if load is not None else 0
        if correction is not None:
            queued += correction.foreign_prefill_tokens
            decode += correction.foreign_decode_tokens
            requests += min(correction.foreign, correction.said.requests)
        return WorkerBacklog(queued, decode, requests, self.is_saturated(queued, correction))

    def is_saturated(self, queued_tokens: int, correction: Correction | None) -> bool:
        """Too much is queued there, unless the engine says that nothing waits and it is not twice as much; or its cache
        is full and prompts wait."""
        if correction is not None and correction.said.waiting and correction.said.kv_usage >= KV_USAGE_FULL:
            return True
        if queued_tokens <= self.saturation_tokens:
            return False
        return correction is None or correction.said.waiting > 0 or queued_tokens > 2 * self.saturation_tokens

    def rates_of(self, worker: WorkerKey) -> WorkerSpeed:
        found = self.rates.get(worker)
        if found is None:
            found = self.rates[worker] = WorkerSpeed()
        return found

    def drain_s(self, worker: WorkerKey, tokens: int) -> float | None:
        """How long the worker takes for this number of tokens, None while its speed is unknown."""
        rates = self.rates.get(worker)
        return tokens / rates.prefill_rate if rates is not None and rates.prefill_rate else None

    def tick(self, workers: Iterable[WorkerKey], now: float) -> None:
        """Now and then: what engines said long ago ends, speeds are compared. workers: those there are."""
        known = frozenset(workers)
        for worker in [w for w, c in self.corrections.items() if c.heard_s < now - GAUGE_TTL_S or w not in known]:
            del self.corrections[worker]
        for worker in [worker for worker in self.rates if worker not in known]:
            del self.rates[worker]
        self.prompts.keep(known)
        by_model: dict[str, list[float]] = {}
        for worker, rates in self.rates.items():
            if rates.prefill_rate:
                by_model.setdefault(worker.model, []).append(rates.prefill_rate)
        usual = {model: median(found) for model, found in by_model.items()}
        factors = {w: slowness(rates.prefill_rate, usual.get(w.model)) for w, rates in self.rates.items()}
        self.slowness = {worker: factor for worker, factor in factors.items() if factor != 1.0}
        costs = [rates.cpu_token_cost for rates in self.rates.values() if rates.cpu_token_cost is not None]
        if costs:
            cpu = median(costs)
            # What disks do was not measured; they are not faster than the tier above them.
            self.tiers = TierCosts(cpu, max(cpu, DISK_TOKEN_COST))
