# SPDX-License-Identifier: Apache-2.0
"""The speed at which one worker computes prompts and loads them back, measured by the prompts sent to it. Pure.

The time to a first token is the queued work plus the prompt's own work, divided by the rate, plus some overhead. The
rate is the weighted median of the last samples: half of all measured tokens were faster. A stall, a restart or a wrong
prediction spoils only a few of many samples, so the median stays where it is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

# Samples kept of each kind: a worker's last minutes under load. Older samples come from another batch or another time
# of day.
SAMPLES = 64
# Fewer samples prove nothing; the median of three tolerates one wrong sample. An unequal fleet learns its speeds from
# three prompts a worker: with eight, half of a short run was over before (benchmarks/results/2026-choice.md).
SAMPLES_MIN = 3
# The time of a shorter prompt is mostly overhead (a step, the network), not computing.
PREFILL_TOKENS_MIN = 512
LOADED_TOKENS_MIN = 1_024
# The time of a shorter answer is mostly that of its last chunk on the network.
DECODE_TOKENS_MIN = 16
# The upper limit of the learned cost of loading a token, in computed tokens; the lower limit is 0. An engine would not
# load tokens that are cheaper to compute.
TOKEN_COST_MAX = 1.0

# The largest factor by which a worker may count as slower or faster than the others; a rate that is further off is a
# measuring error. A difference of less than a quarter is random: equal replicas must have equal costs.
SLOWNESS_MAX = 4.0
SLOWNESS_MIN = 1.25


class WorkerSpeed:
    """The measured speed of one worker.

    Rates are in tokens a second. Rates and costs are None until SAMPLES_MIN samples exist.
    """

    __slots__ = ("_decode", "_loaded", "_prefill", "decode_rate", "loaded_token_cost", "prefill_rate")

    def __init__(self) -> None:
        # Samples as (tokens, tokens a second).
        self._prefill: deque[tuple[float, float]] = deque(maxlen=SAMPLES)
        self._decode: deque[tuple[float, float]] = deque(maxlen=SAMPLES)
        # Samples as (tokens, cost of a token in computed tokens).
        self._loaded: deque[tuple[float, float]] = deque(maxlen=SAMPLES)
        self.prefill_rate: float | None = None
        self.decode_rate: float | None = None
        self.loaded_token_cost: float | None = None

    def first_token(self, computed_tokens: int, loaded_tokens: int, queued_tokens: int, seconds: float) -> None:
        """Learn from the time that a prompt took until its first token.

        Args:
            computed_tokens: Tokens of the prompt that the worker computed, as predicted.
            loaded_tokens: Tokens of the prompt that the worker loaded back from the measured tier, as predicted.
            queued_tokens: Tokens that were queued at the worker before this prompt.
            seconds: Time from dispatch to the first token.
        """
        tokens = computed_tokens + queued_tokens
        if seconds <= 0:
            return
        if loaded_tokens >= LOADED_TOKENS_MIN:
            if self.prefill_rate:
                cost = (seconds * self.prefill_rate - tokens) / loaded_tokens
                self._loaded.append((loaded_tokens, min(max(cost, 0.0), TOKEN_COST_MAX)))
                self.loaded_token_cost = _middle(self._loaded)
        elif tokens >= PREFILL_TOKENS_MIN:
            self._prefill.append((tokens, tokens / seconds))
            self.prefill_rate = _middle(self._prefill)

    def decoded(self, tokens: int, seconds: float) -> None:
        """Learn from the time that an answer took after its first token.

        Args:
            tokens: Tokens of the answer after the first one.
            seconds: Time in which the worker decoded these tokens.
        """
        if seconds > 0 and tokens >= DECODE_TOKENS_MIN:
            self._decode.append((tokens, tokens / seconds))
            self.decode_rate = _middle(self._decode)


def _middle(samples: deque[tuple[float, float]]) -> float | None:
    """Return the weighted median, or None while there are fewer than SAMPLES_MIN samples."""
    return weighted_median(samples) if len(samples) >= SAMPLES_MIN else None


def weighted_median(samples: Iterable[tuple[float, float]]) -> float:
    """Return the value at which half of the total weight is reached.

    Args:
        samples: (weight, value) pairs; at least one, and with weights above 0.
    """
    ordered = sorted(samples, key=lambda sample: sample[1])
    half = sum(weight for weight, _ in ordered) / 2
    reached = 0.0
    for weight, value in ordered:
        reached += weight
        if reached >= half:
            return value
    return ordered[-1][1]


def slowness(rate: float | None, usual: float | None) -> float:
    """Return how many times longer than usual a worker takes for a token; 1 unless both rates are known.

    Args:
        rate: The worker's rate in tokens a second, or None if it is not measured.
        usual: The usual rate in tokens a second, or None if it is not measured.
    """
    if not rate or not usual:
        return 1.0
    factor = usual / rate
    if 1 / SLOWNESS_MIN < factor < SLOWNESS_MIN:
        return 1.0
    return min(max(factor, 1 / SLOWNESS_MAX), SLOWNESS_MAX)
