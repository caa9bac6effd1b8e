# SPDX-License-Identifier: Apache-2.0
"""Sums of each model's traffic through this process, since they were last taken.

They are counted where the metrics are counted, and taken every few seconds (`observe/history/`), so counting needs no
clock and costs only a few additions. An instance belongs to one asyncio loop.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvrouter.router.base.common.ids import WorkerKey

# The model of requests that the router refused before it knew their model.
NO_MODEL = "other"
# Upper bounds of the classes of times to first tokens, from 5 ms to 280 s, each 1.5 times the one before. Percentiles
# that are interpolated within a class have an error of about a tenth.
TTFT_BOUNDS_S = tuple(round(0.005 * 1.5**step, 6) for step in range(28))
# The number of classes of times, including the last one, which has no upper bound.
TTFT_CLASSES = len(TTFT_BOUNDS_S) + 1
# Answered prompts that may wait to be taken; they are taken about once a second.
MAX_PROMPTS = 8_192
# For how many models tokens may wait until a speed of prefill is known.
MAX_WAITING_MODELS = 64


class AnsweredPrompt(NamedTuple):
    """A prompt that was answered."""

    model: str
    # The names of its pieces, as `names_of` returns them, or an empty sequence if its tokens are not known.
    names: Sequence[int]
    num_tokens: int
    # The tokens that were not computed.
    reused_tokens: int


class ModelSums:
    """The sums of one model. Each attribute is described in `contract/history.py`."""

    __slots__ = (
        "chosen_tokens",
        "delivered_tokens",
        "failed",
        "possible_tokens",
        "predicted_tokens",
        "prompt_tokens",
        "requests",
        "reused_tokens",
        "round_robin_tokens",
        "saved_s",
        "ttft",
        "unpriced_tokens",
    )

    def __init__(self) -> None:
        self.requests = 0
        self.failed = 0
        self.prompt_tokens = 0
        self.delivered_tokens = 0
        self.predicted_tokens = 0
        self.possible_tokens = 0
        self.chosen_tokens = 0
        self.reused_tokens = 0
        self.round_robin_tokens = 0
        self.saved_s = 0.0
        # Tokens that were reused while no worker's speed was known, so their seconds are not in `saved_s` yet.
        self.unpriced_tokens = 0
        # The number of answers by class of their time to the first token.
        self.ttft = [0] * TTFT_CLASSES

    def first_token(self, seconds: float) -> None:
        """Count the time to a first token."""
        self.ttft[bisect_left(TTFT_BOUNDS_S, seconds)] += 1


class TrafficSums:
    """The sums of all models, and the prompts that were answered."""

    def __init__(
        self,
        rate: Callable[[WorkerKey], float | None] = lambda worker: None,
        fleet_rate: Callable[[], float | None] = lambda: None,
    ) -> None:
        """Begin without traffic.

        Args:
            rate: Returns the tokens per second at which a worker's prompts count, or None while no speed is known.
            fleet_rate: Returns the fleet's usual tokens per second, or None while no speed is known.
        """
        self._rate = rate
        self._fleet_rate = fleet_rate
        self._sums: dict[str, ModelSums] = {}
        self._prompts: list[AnsweredPrompt] = []

    def of(self, model: str) -> ModelSums:
        """Return the present sums of a model. Do not keep a reference: `take` replaces them."""
        sums = self._sums.get(model)
        if sums is None:
            sums = self._sums[model] = ModelSums()
        return sums

    def answered(self, worker: WorkerKey, names: Sequence[int], num_tokens: int, reused_tokens: int) -> None:
        """Count a prompt that was answered.

        Args:
            worker: The worker that computed it.
            names: The names of its pieces, empty if its tokens are not known.
            num_tokens: Its length.
            reused_tokens: The tokens that were not computed, as reported or else as predicted; at most its length counts.
        """
        reused_tokens = min(reused_tokens, num_tokens)
        sums = self.of(worker.model)
        sums.prompt_tokens += num_tokens
        if reused_tokens:
            sums.reused_tokens += reused_tokens
            rate = self._rate(worker)
            if rate is None:
                sums.unpriced_tokens += reused_tokens
            else:
                sums.saved_s += reused_tokens / rate
        if len(self._prompts) < MAX_PROMPTS:
            self._prompts.append(AnsweredPrompt(worker.model, names, num_tokens, reused_tokens))
        else:
            # Too many prompts wait for the shadow: this one counts as equal under round robin, so no gain is claimed.
            sums.round_robin_tokens += reused_tokens

    def take(self) -> dict[str, ModelSums]:
        """Return the sums by model, and begin again from zero. Tokens without a known speed stay until one is known."""
        taken, self._sums = self._sums, {}
        waiting = {model: sums for model, sums in taken.items() if sums.unpriced_tokens}
        if waiting:
            rate = self._fleet_rate()
            for model, sums in waiting.items():
                if rate is not None:
                    sums.saved_s += sums.unpriced_tokens / rate
                elif len(self._sums) < MAX_WAITING_MODELS:
                    self.of(model).unpriced_tokens = sums.unpriced_tokens
        return taken

    def take_prompts(self) -> list[AnsweredPrompt]:
        """Return the prompts that were answered since the last call, in order."""
        taken, self._prompts = self._prompts, []
        return taken
