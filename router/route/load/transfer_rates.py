# SPDX-License-Identifier: Apache-2.0
"""The speed at which workers fetch blocks from each other's CPU tiers, measured for each pair of hosts. Pure.

A pair has a direction and belongs to one model, because a token has as many bytes as the model's layers make it. A pair
without measurements has the speed of all pairs of its model that were measured, and before any measurement an assumed
one. Measurements are forgotten after some minutes: where fetching was slow or without success, nothing is fetched any
longer, and only a new attempt shows that it became better.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import NamedTuple, TypeAlias

from kvrouter.router.route.load.worker_speed import LOADED_TOKENS_MIN, SAMPLES_MIN, weighted_median

# The assumed speed of a transfer: 100 Gbit/s, as networks of GPU servers usually have, and less than memory within one
# server. Three fetches correct a value that is too high; one that is too low is never corrected, because nothing is
# fetched where that seems slower than computing.
ASSUMED_BYTES_PER_S = 12.5e9
# The assumed cost of transferring a token of unknown size, in computed tokens: 128 KiB at that speed take 10 us, in which
# an H100 computes a third of a token of such a model.
UNKNOWN_TOKEN_COST = 0.3
# Measurements kept of each pair: its last minute or so. With MAX_PAIRS pairs they take some 8 MB.
SAMPLES = 16
# Pairs of 64 hosts with each other. Beyond it, the pair that was measured least recently is forgotten.
MAX_PAIRS = 4_096
# How long a measurement counts. It is longer than most pauses of traffic, and each time a few fetches try what was slow.
MEASURED_TTL_S = 300.0
# The assumption that blocks arrive weighs as much as this many fetches that arrived whole: one that falls short changes
# little, and a dozen decide.
PRIOR_FETCHES = 4


class HostPair(NamedTuple):
    """The hosts between which a model's blocks are transferred."""

    model: str
    source: str
    destination: str


# The seconds that a token takes, and the share of what is fetched that does not arrive, from 0 to 1. A tuple, as compiled
# code reads it fastest.
TransferRate: TypeAlias = tuple[float, float]


class _Measurements:
    """The last measurements of a pair of hosts."""

    __slots__ = ("_fetches", "_samples", "learned_s")

    def __init__(self) -> None:
        # Samples as (tokens, seconds a token).
        self._samples: deque[tuple[float, float]] = deque(maxlen=SAMPLES)
        # Fetches as (tokens, tokens that did not arrive).
        self._fetches: deque[tuple[int, int]] = deque(maxlen=SAMPLES)
        self.learned_s = 0.0

    def add(self, fetched_tokens: int, missing_tokens: int, token_s: float | None, now: float) -> None:
        """Add a fetch; `token_s` is None if it says nothing about the speed."""
        self._fetches.append((fetched_tokens, missing_tokens))
        if token_s is not None:
            self._samples.append((fetched_tokens, token_s))
        self.learned_s = now

    @property
    def token_s(self) -> float | None:
        """The time that a token takes, or None while there are too few samples."""
        return weighted_median(self._samples) if len(self._samples) >= SAMPLES_MIN else None

    @property
    def missing_share(self) -> float:
        """The share of the tokens that did not arrive, below 1."""
        number = len(self._fetches)
        missing = sum([missing_tokens for _, missing_tokens in self._fetches])
        return (
            missing / sum([tokens for tokens, _ in self._fetches]) * number / (number + PRIOR_FETCHES)
            if number
            else 0.0
        )


class TransferRates:
    """The measured speeds of all pairs of hosts."""

    def __init__(self, *, max_pairs: int = MAX_PAIRS) -> None:
        self._max_pairs = max_pairs
        # The pair that was measured least recently comes first.
        self._measured: OrderedDict[HostPair, _Measurements] = OrderedDict()
        # The same for all pairs of a model together, apart for pairs within a host.
        self._usual: dict[tuple[str, bool], _Measurements] = {}
        # The rates by model and source and then by destination, as they were last computed.
        self._rates: dict[tuple[str, str], dict[str, TransferRate]] = {}
        self._num_rates = 0

    def __len__(self) -> int:
        return len(self._measured)

    def known_rates(self, model: str, source: str) -> dict[str, TransferRate]:
        """Return the rates from this host that `rate` was called for since the last `tick`, by destination."""
        rates = self._rates.get((model, source))
        if rates is None:
            rates = self._rates[model, source] = {}
        return rates

    def rate(self, pair: HostPair, token_bytes: int, prefill_rate: float) -> TransferRate:
        """Return the rate between two hosts.

        Args:
            pair: The hosts.
            token_bytes: The bytes of a token, 0 if they are not known.
            prefill_rate: The tokens a second that a worker of the model computes.
        """
        rates = self.known_rates(pair.model, pair.source)
        rate = rates.get(pair.destination)
        if rate is None:
            if self._num_rates >= self._max_pairs:
                self._forget_rates()
                rates = self.known_rates(pair.model, pair.source)
            assumed_s = token_bytes / ASSUMED_BYTES_PER_S if token_bytes else UNKNOWN_TOKEN_COST / prefill_rate
            rate = rates[pair.destination] = self._measured_rate(pair, assumed_s)
            self._num_rates += 1
        return rate

    def _measured_rate(self, pair: HostPair, assumed_s: float) -> TransferRate:
        """Return a pair's rate by its measurements, else by those of all pairs, else with the assumed time of a token."""
        usual = self._usual.get(_usual_name(pair))
        measured = self._measured.get(pair) or usual
        if measured is None or usual is None:
            return assumed_s, 0.0
        token_s = measured.token_s
        if token_s is None:
            token_s = usual.token_s
        return assumed_s if token_s is None else token_s, measured.missing_share

    def learn(
        self, pair: HostPair, fetched_tokens: int, missing_tokens: int, token_s: float | None, now: float
    ) -> None:
        """Learn from a fetch.

        Args:
            pair: The hosts.
            fetched_tokens: The tokens that were to be fetched.
            missing_tokens: The tokens among them that did not arrive.
            token_s: The time that each took, or None if that is not known.
            now: The current time.
        """
        if fetched_tokens < LOADED_TOKENS_MIN:
            # The time of a shorter fetch is mostly overhead.
            token_s = None
        measured = self._measured.pop(pair, None) or _Measurements()
        while len(self._measured) >= self._max_pairs:
            self._measured.popitem(last=False)
        self._measured[pair] = measured
        usual = self._usual.setdefault(_usual_name(pair), _Measurements())
        for measurements in (measured, usual):
            measurements.add(fetched_tokens, missing_tokens, token_s, now)
        rates = self._rates.get((pair.model, pair.source))
        if rates is not None and (rate := rates.get(pair.destination)) is not None:
            rates[pair.destination] = self._measured_rate(pair, rate[0])

    def tick(self, now: float) -> None:
        """Forget old measurements; called periodically."""
        oldest_s = now - MEASURED_TTL_S
        while self._measured and next(iter(self._measured.values())).learned_s < oldest_s:
            self._measured.popitem(last=False)
        for name in [name for name, usual in self._usual.items() if usual.learned_s < oldest_s]:
            del self._usual[name]
        self._forget_rates()

    def _forget_rates(self) -> None:
        """Have each rate computed again, because another pair's measurements may have changed it."""
        self._rates.clear()
        self._num_rates = 0


def _usual_name(pair: HostPair) -> tuple[str, bool]:
    return pair.model, pair.source == pair.destination
