# SPDX-License-Identifier: Apache-2.0
"""The workers that lend blocks of their CPU tiers: which may lend, at which speed, and the lessons of past pulls.

Synchronous, without I/O, for one asyncio loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

from kvrouter.contract.tiers import MEASURED
from kvrouter.events.patch.messages import PeerAddress
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.index.matching.pull import Pull
from kvrouter.router.index.matching.question import Hit
from kvrouter.router.model.kvcache.registered_peer import is_vllms
from kvrouter.router.route.load.transfer_rates import HostPair, TransferRate
from kvrouter.router.route.load.worker_load import LoadModel
from kvrouter.router.route.placement.candidates import DRAINING
from kvrouter.router.route.placement.planned_pull import PlannedPull

# The time of a pull besides its transfer: a question and its answer between two engines, each of which looks for
# messages between its steps of some 10 ms.
PULL_LATENCY_S = 0.02
# The assumed rate of prefill where none was measured yet: an H100 with an 8 B model, as in contract/tiers.py.
ASSUMED_PREFILL_RATE = 30_000.0
# The tokens that a source may lend at the same time; at this number it gets no further pull. It pins all that is being
# read, and its CPU tier cannot use that memory meanwhile: 16 GiB with 128 KiB a token.
MAX_LENT_TOKENS = 131_072
# The limits of a pull's deadline, which is the time in which its tokens would be computed. A shorter one ends in the
# middle of the questions between the engines; a longer one keeps memory pinned for a request that its client has given up.
TIMEOUT_MIN_S = 0.05
TIMEOUT_MAX_S = 60.0
# The deadline of a pull to a worker of unknown speed: 30,000 tokens at the assumed rate of prefill.
TIMEOUT_UNKNOWN_S = 1.0
# The transfer goes on while the prompt waits in its worker's queue. So the time to the first token measures the transfer
# only if the queue was short: at most this share of the fetched tokens.
QUEUED_SHARE_MAX = 0.125

# A worker that lends, in one comparison of workers: the tokens that it lends to other requests now, and the known rates of
# transfers from its host by the other host. A tuple, as compiled code reads it fastest.
Lender: TypeAlias = tuple[int, dict[str, TransferRate]]


class Peers(Protocol):
    """The part of `HitSource` that knows where workers lend."""

    def peer(self, worker: WorkerKey) -> PeerAddress | None:
        """Return where a worker's engine lends blocks, or None if it lends none; the host is never a wildcard."""
        ...


class Lenders:
    """All workers of a fleet as lenders of blocks."""

    def __init__(
        self,
        fleet: Peers,
        weights: LoadModel,
        unavailable: Callable[[WorkerKey], str | None],
        *,
        declared_only: bool = False,
    ) -> None:
        """Lend between the workers of this fleet.

        Args:
            fleet: Knows the workers' addresses.
            weights: The load and the speed of the workers and of transfers.
            unavailable: Returns why a worker takes no requests now, or None if it does.
            declared_only: Whether only workers fetch whose engines declare where they lend, so none with vLLM's own tier.
        """
        self._fleet = fleet
        self._weights = weights
        self._unavailable = unavailable
        self._declared_only = declared_only
        # The hosts of workers that fetch, empty for those that cannot. They are looked up again after `tick`.
        self.hosts: dict[WorkerKey, str] = {}

    def lender(self, source: WorkerKey) -> Lender | None:
        """Return a worker as a lender, or None if it lends nothing now."""
        address = self._fleet.peer(source)
        if address is None:
            return None
        # A draining worker takes no requests, but holds its blocks until it ends.
        if (problem := self._unavailable(source)) is not None and problem != DRAINING:
            return None
        lent_tokens = self._lent_tokens(source)
        if lent_tokens >= MAX_LENT_TOKENS:
            return None
        return lent_tokens, self._weights.transfers.known_rates(source.model, address.host)

    def host(self, destination: WorkerKey) -> str:
        """Return the host of a worker that fetches, or an empty text if it cannot; only an engine that lends fetches."""
        host = self.hosts.get(destination)
        if host is None:
            address = self._fleet.peer(destination)
            if address is not None and self._declared_only and is_vllms(address):
                address = None
            host = self.hosts[destination] = "" if address is None else address.host
        return host

    def rate(self, source: WorkerKey, host: str) -> TransferRate:
        """Return the rate of transfers from a lender to a host."""
        address = self._fleet.peer(source)
        assert address is not None
        pair = HostPair(source.model, address.host, host)
        return self._weights.transfers.rate(pair, address.token_bytes, self.prefill_rate(source.model))

    def prefill_rate(self, model: str) -> float:
        """Return the usual rate of prefill of a model's workers, in tokens a second."""
        return self._weights.usual_rates.get(model, self._weights.fleet_rate) or ASSUMED_PREFILL_RATE

    def plan(self, hit: Hit, pull: Pull) -> PlannedPull | None:
        """Return the pull as the request names it, or None if its source lends no longer."""
        address = self._fleet.peer(pull.source)
        if address is None:
            return None
        fetched_tokens = pull.tokens - hit.tokens
        rate = self._weights.prefill_rate(hit.worker)
        timeout_s = TIMEOUT_UNKNOWN_S if not rate else min(max(fetched_tokens / rate, TIMEOUT_MIN_S), TIMEOUT_MAX_S)
        ahead_tokens = self._lent_tokens(pull.source)
        return PlannedPull(
            pull.source, address.host, address.port, pull.tokens, fetched_tokens, timeout_s, ahead_tokens
        )

    def _lent_tokens(self, source: WorkerKey) -> int:
        """Return the tokens that a worker lends to requests now."""
        load = self._weights.table.loads.get(source)
        return 0 if load is None else load.lent_tokens

    def learn(
        self,
        hit: Hit,
        pull: PlannedPull,
        num_tokens: int,
        queued_tokens: int,
        reused_tokens: int,
        seconds: float | None,
        now: float,
    ) -> float | None:
        """Learn from the reuse that an engine reported for a prompt with a pull.

        Return the seconds in which its blocks were transferred, or None if the report does not say.

        Args:
            hit: The worker's hit without the pull.
            pull: The pull.
            num_tokens: The length of the prompt.
            queued_tokens: Tokens that were queued at the worker before this prompt.
            reused_tokens: The tokens that the engine did not compute.
            seconds: The time to the first token, None if it is not known.
            now: The current time.
        """
        host = self.host(hit.worker)
        if not host:
            return None
        pair = HostPair(hit.worker.model, pull.host, host)
        missing_tokens = min(max(0, pull.tokens - reused_tokens), pull.fetched_tokens)
        transfer_s = token_s = None
        # A fetch that fell short says nothing about the speed: its blocks may have been evicted before it began.
        if not missing_tokens and seconds is not None:
            transfer_s = self._transfer_s(hit, pull, num_tokens, queued_tokens, seconds)
        if transfer_s is not None:
            token_s = transfer_s / (pull.fetched_tokens + pull.ahead_tokens)
        self._weights.transfers.learn(pair, pull.fetched_tokens, missing_tokens, token_s, now)
        return transfer_s

    def _transfer_s(
        self, hit: Hit, pull: PlannedPull, num_tokens: int, queued_tokens: int, seconds: float
    ) -> float | None:
        """Return the time of the transfer, or None if the time to the first token does not say."""
        speed = self._weights.rates.get(hit.worker)
        measured_tokens = hit.by_tier[MEASURED]
        if speed is None or not speed.prefill_rate or hit.tokens > measured_tokens:
            return None
        if queued_tokens > QUEUED_SHARE_MAX * pull.fetched_tokens:
            return None
        # The fetched tokens are then loaded from the worker's own CPU tier.
        loaded_tokens = measured_tokens - hit.on_gpu + pull.fetched_tokens
        others = num_tokens - pull.tokens + queued_tokens + loaded_tokens * self._weights.token_costs[MEASURED]
        return max(0.0, seconds - others / speed.prefill_rate - PULL_LATENCY_S)

    def tick(self) -> None:
        """Have the workers' hosts looked up again, because engines may have moved; called periodically."""
        self.hosts.clear()
