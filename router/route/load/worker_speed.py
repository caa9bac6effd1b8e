# SPDX-License-Identifier: Apache-2.0
"""How fast one worker computes prompts and loads them back, measured by what was sent there. Pure.

Time to the first token is what was queued and what the prompt itself needed, divided by the rate, and some overhead.
The rate is the weighted median over the last samples: half of all measured tokens went faster. A stall, a restart or a
wrong prediction are a few samples of many, so they do not move it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import msgspec

# A worker's last minutes under load; older ones are of another batch, another time of day.
SAMPLES = 64
# Fewer prove nothing yet; the median of three bears one that is wrong. An unequal fleet learns its speeds with three
# prompts a worker: with eight, half of a short run was over before (docs/reference/benchmarks.md).
SAMPLES_MIN = 3
# Shorter prompts are overhead (a step, the network), not computing.
PREFILL_TOKENS_MIN = 512
LOADED_TOKENS_MIN = 1_024
# An answer of a few tokens is the time of its last chunk on the way.
DECODE_TOKENS_MIN = 16
# Limits of the learned price of loading: between free and more expensive than computing, which no engine would do.
TOKEN_COST_MAX = 1.0

# What a token costs that is loaded back instead of computed, in computed tokens, until it was measured. An 8 B model
# has 128 KB of KV cache a token: over PCIe 4 (20 GB/s usable) 150,000 tokens/s come back from the CPU tier, from one
# NVMe disk (5 GB/s) 40,000; an H100 computes about 30,000 to 40,000 of them in a second, an A100 half of that.
CPU_TOKEN_COST = 0.2
DISK_TOKEN_COST = 0.7

# How much slower or faster than the others a worker may count: a measured rate that is further off is a fault of
# measuring. Within a quarter it is chance: equal replicas must have equal costs.
SLOWNESS_MAX = 4.0
SLOWNESS_MIN = 1.25


class TierCosts(msgspec.Struct, frozen=True):
    """What a token costs that is loaded back, in tokens computed."""

    cpu: float = CPU_TOKEN_COST
    disk: float = DISK_TOKEN_COST


class WorkerSpeed:
    """One worker's. Rates are tokens a second, None until SAMPLES_MIN samples are there."""

    __slots__ = ("_decode", "_loaded", "_prefill", "cpu_token_cost", "decode_rate", "prefill_rate")

    def __init__(self) -> None:
        # (tokens, tokens a second) of each.
        self._prefill: deque[tuple[float, float]] = deque(maxlen=SAMPLES)
        self._decode: deque[tuple[float, float]] = deque(maxlen=SAMPLES)
        # (tokens, their cost in computed tokens).
        self._loaded: deque[tuple[float, float]] = deque(maxlen=SAMPLES)
        self.prefill_rate: float | None = None
        self.decode_rate: float | None = None
        self.cpu_token_cost: float | None = None

    def first_token(self, computed_tokens: int, loaded_tokens: int, queued_tokens: int, seconds: float) -> None:
        """computed, loaded (from the CPU tier): of the prompt itself, as predicted; queued: before it there; seconds:
        from dispatch to the first token."""
        tokens = computed_tokens + queued_tokens
        if seconds <= 0:
            return
        if loaded_tokens >= LOADED_TOKENS_MIN:
            if self.prefill_rate:
                cost = (seconds * self.prefill_rate - tokens) / loaded_tokens
                self._loaded.append((loaded_tokens, min(max(cost, 0.0), TOKEN_COST_MAX)))
                self.cpu_token_cost = _middle(self._loaded)
        elif tokens >= PREFILL_TOKENS_MIN:
            self._prefill.append((tokens, tokens / seconds))
            self.prefill_rate = _middle(self._prefill)

    def decoded(self, tokens: int, seconds: float) -> None:
        """tokens: of one answer after its first one, in `seconds`."""
        if seconds > 0 and tokens >= DECODE_TOKENS_MIN:
            self._decode.append((tokens, tokens / seconds))
            self.decode_rate = _middle(self._decode)


def _middle(samples: deque[tuple[float, float]]) -> float | None:
    return weighted_median(samples) if len(samples) >= SAMPLES_MIN else None


def weighted_median(samples: Iterable[tuple[float, float]]) -> float:
    """The value of (weight, value) pairs at which half of the weight is reached; there must be one, weights over 0."""
    ordered = sorted(samples, key=lambda sample: sample[1])
    half = sum(weight for weight, _ in ordered) / 2
    reached = 0.0
    for weight, value in ordered:
        reached += weight
        if reached >= half:
            return value
    return ordered[-1][1]


def slowness(rate: float | None, usual: float | None) -> float:
    """How many times longer than usual a worker takes for a token. rate, usual: tokens/s, None: not measured."""
    if not rate or not usual:
        return 1.0
    found = usual / rate
    if 1 / SLOWNESS_MIN < found < SLOWNESS_MIN:
        return 1.0
    return min(max(found, 1 / SLOWNESS_MAX), SLOWNESS_MAX)
