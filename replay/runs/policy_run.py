# SPDX-License-Identifier: Apache-2.0
"""The results of a trace under one policy. Lengths are in tokens, times in seconds of virtual time."""

from __future__ import annotations

import math
import statistics
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import truediv

import msgspec

from kvrouter.replay.policies.routing import PlacedPull
from kvrouter.simulator.cache.peer import PeerMiss, PeerWish

# Points in time of a run for which its load is shown.
BUCKETS = 120


class LoadProfile:
    """Requests in flight at each worker, over time: means over the arrivals of each of `BUCKETS` equal spans."""

    def __init__(self, workers: int, span_s: float) -> None:
        self.bucket_s = max(span_s, 1e-9) / BUCKETS
        self._sums = [[0] * workers for _ in range(BUCKETS)]
        self._counts = [0] * BUCKETS

    def add(self, now_s: float, in_flight: Sequence[int]) -> None:
        """Note the requests in flight at each worker when a request arrives."""
        place = min(BUCKETS - 1, int(now_s / self.bucket_s))
        self._counts[place] += 1
        sums = self._sums[place]
        for worker, requests in enumerate(in_flight):
            sums[worker] += requests

    def rows(self) -> list[tuple[float, list[float]]]:
        """Return each span's middle in s and its mean requests in flight of each worker; only spans with arrivals."""
        return [
            ((place + 0.5) * self.bucket_s, [total / count for total in sums])
            for place, (sums, count) in enumerate(zip(self._sums, self._counts, strict=True))
            if count
        ]

    def balance(self) -> list[tuple[float, float]]:
        """Return the time in s and the balance of each span: the busiest worker's requests divided by the mean of all.

        A balance of 1 is even, and the number of workers is the worst. Spans with nothing in flight are left out.
        """
        return [(time_s, max(row) / statistics.fmean(row)) for time_s, row in self.rows() if statistics.fmean(row) > 0]

    @property
    def mean_balance(self) -> float:
        """Mean of the balance of all spans; 1 if nothing was in flight."""
        balance = self.balance()
        return statistics.fmean(value for _, value in balance) if balance else 1.0


class Summary(msgspec.Struct, frozen=True):
    """A run as one row.

    Tokens and shares are of the requests that had their first token.
    """

    policy: str
    # Requests that had their first token.
    requests: int
    # Whether Ctrl-C ended the run early.
    partial: bool
    # Requests that their worker could not take.
    refused: int
    prompt_tokens: int
    reused_tokens: int
    predicted_tokens: int
    # Reused tokens divided by prompt tokens.
    reused_share: float
    # Reused tokens divided by those that the best worker would have reused at each choice.
    achieved_share: float
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p95_s: float
    ttft_p99_s: float
    # Time that workers take to compute the prompt tokens that are not reused.
    computed_gpu_s: float
    # The computing time as a share of the time of all workers.
    prefill_share: float
    # See `LoadProfile.mean_balance`.
    balance: float
    # Until the last request ended.
    span_s: float
    wall_s: float
    # Answers that ended in a second of the run (at saturation, the fleet's throughput), and their tokens.
    requests_per_s: float
    output_tokens_per_s: float
    # Requests that fetched from another worker, the tokens that came, and those that did not by reason: they came too
    # late, the source ended, the worker had no room, or they were evicted before.
    pulls: int = 0
    pulled_tokens: int = 0
    late_tokens: int = 0
    gone_tokens: int = 0
    no_room_tokens: int = 0
    evicted_tokens: int = 0


@dataclass(slots=True)
class PullTotals:
    """The pulls of a run whose requests had their first token."""

    pulls: int = 0
    pulled_tokens: int = 0
    missing_tokens: Counter[PeerMiss] = field(default_factory=Counter)

    def add(self, pull: PlacedPull, wish: PeerWish, reused_tokens: int) -> None:
        """Count a pull."""
        missing = min(max(0, pull.tokens - reused_tokens), pull.fetched_tokens)
        self.pulls += 1
        self.pulled_tokens += pull.fetched_tokens - missing
        if missing:
            missed = set(wish.missed.values())
            # Every look-up comes to the end of what the source holds, so ABSENT is the reason only where there is no other.
            first = (miss for miss in (PeerMiss.GONE, PeerMiss.DEADLINE, PeerMiss.NO_ROOM) if miss in missed)
            self.missing_tokens[next(first, PeerMiss.ABSENT)] += missing


@dataclass(slots=True)
class PolicyRun:
    """One run. Every array has a number for each request, in the order of the trace."""

    policy: str
    seed: int
    # How fast each worker computes prompts.
    prefill_tokens_per_s: tuple[float, ...]
    load: LoadProfile
    # Index of the request's worker.
    worker: array[int] = field(default_factory=lambda: array("q"))
    prompt: array[int] = field(default_factory=lambda: array("q"))
    achievable: array[int] = field(default_factory=lambda: array("q"))
    predicted: array[int] = field(default_factory=lambda: array("q"))
    expected: array[int] = field(default_factory=lambda: array("q"))
    reused: array[int] = field(default_factory=lambda: array("q"))
    # NaN for a request without a first token, because it was refused or the run ended early.
    ttft_s: array[float] = field(default_factory=lambda: array("d"))
    # Tokens of the answer; 0 until it has ended.
    output: array[int] = field(default_factory=lambda: array("q"))
    pulls: PullTotals = field(default_factory=PullTotals)
    refused: int = 0
    # The message of the first refusal.
    refusal: str = ""
    # Until the last request ended.
    span_s: float = 0.0
    wall_s: float = 0.0
    # Whether Ctrl-C ended the run early.
    partial: bool = False

    def add(self, prompt_tokens: int, achievable: int, predicted: int, expected: int, *, worker: int) -> int:
        """Add a request that was placed at this worker, and return its number."""
        self.worker.append(worker)
        self.prompt.append(prompt_tokens)
        self.achievable.append(achievable)
        self.predicted.append(predicted)
        self.expected.append(expected)
        self.reused.append(0)
        self.ttft_s.append(math.nan)
        self.output.append(0)
        return len(self.prompt) - 1

    def summary(self) -> Summary:
        """Return the run as one row."""
        answered = [number for number, ttft_s in enumerate(self.ttft_s) if not math.isnan(ttft_s)]
        prompt, reused = sum(self.prompt[n] for n in answered), sum(self.reused[n] for n in answered)
        ttft_s = [self.ttft_s[n] for n in answered]
        cuts = quantiles(ttft_s)
        time_s = len(self.prefill_tokens_per_s) * self.span_s
        computed = [0] * len(self.prefill_tokens_per_s)
        for n in answered:
            computed[self.worker[n]] += self.prompt[n] - self.reused[n]
        gpu_s = sum(map(truediv, computed, self.prefill_tokens_per_s))
        return Summary(
            self.policy,
            len(answered),
            self.partial,
            self.refused,
            prompt,
            reused,
            sum(self.predicted[n] for n in answered),
            reused / max(1, prompt),
            reused / max(1, sum(self.achievable[n] for n in answered)),
            statistics.fmean(ttft_s) if ttft_s else 0.0,
            cuts[49],
            cuts[94],
            cuts[98],
            gpu_s,
            gpu_s / time_s if time_s else 0.0,
            self.load.mean_balance,
            self.span_s,
            self.wall_s,
            sum(tokens > 0 for tokens in self.output) / self.span_s if self.span_s else 0.0,
            sum(self.output) / self.span_s if self.span_s else 0.0,
            self.pulls.pulls,
            self.pulls.pulled_tokens,
            self.pulls.missing_tokens[PeerMiss.DEADLINE],
            self.pulls.missing_tokens[PeerMiss.GONE],
            self.pulls.missing_tokens[PeerMiss.NO_ROOM],
            self.pulls.missing_tokens[PeerMiss.ABSENT],
        )


def quantiles(values: Sequence[float]) -> list[float]:
    """Return the 99 cuts into hundredths: one value is every cut, and no values give zeros."""
    numbers = list(values)
    if len(numbers) < 2:
        return (numbers or [0.0]) * 99
    return statistics.quantiles(numbers, n=100)
