# SPDX-License-Identifier: Apache-2.0
"""Judges by an engine's reports whether the predictions for its worker come true. Pure.

One request proves nothing: between the choice and the engine's lookup, siblings make a prompt reuse more, and evictions
make it reuse less. A request that was alone at its worker meets neither, so a few of these are conclusive; among other
requests only a majority that loses a large part is.
"""

from __future__ import annotations

from collections import deque
from enum import StrEnum
from typing import NamedTuple

from kvrouter.contract.worker_status import ReuseStatus

# Requests that were alone: of the last 16, at least 8, and more than half of them reused less than predicted. One or
# two in a row may have met the evictions of an answer that had just ended, or the request of another router; a wrong
# hash seed, tokenizer or rule is wrong each time.
ALONE_WINDOW = 16
ALONE_MIN = 8
# Requests among others: of the last 64, at least 32, more than half of them with less reuse than predicted, and over a
# quarter of the predicted tokens lost. With 240 requests of 16 clients to two engines with small caches, none reused
# less (tests/engine/test_proxy_engine.py), a third more.
BUSY_WINDOW = 64
BUSY_MIN = 32
BUSY_LOST_SHARE = 0.25
# Answers in a row that could have reported cached tokens and did not. vLLM before 0.25 omits zeros, so a few prove
# nothing.
SILENT_MIN = 8
# Prompts whose length the engine reported: of the last 16, at least 8, more than half differ from the count here.
COUNTED_WINDOW = 16
COUNTED_MIN = 8
HALF = 0.5


class PredictionOutcome(StrEnum):
    """The result of one prediction."""

    EXACT = "exact"
    # Less, or more, was reused than predicted.
    LESS = "less"
    MORE = "more"
    # The engine did not report what it reused.
    # The value is the label that dashboards have.
    UNJUDGED = "untold"


class DoubtKind(StrEnum):
    """The kind of evidence against the predictions for a worker."""

    # The engine counts other tokens than the router.
    TOKENIZER = "tokenizer"
    # The engine does not report cached tokens.
    SILENT = "silent"
    # The predictions do not come true.
    UNTRUE = "untrue"
    # Prompts are reused for which nothing was predicted, and nothing that the router knows explains it.
    UNFORESEEN = "unforeseen"


class Doubt(NamedTuple):
    """A reason not to trust predictions. `text` is a sentence with its fix."""

    kind: DoubtKind
    text: str


def outcome_of(predicted: int, delivered: int) -> PredictionOutcome:
    """Return whether exactly, less or more was reused than predicted."""
    if delivered == predicted:
        return PredictionOutcome.EXACT
    return PredictionOutcome.LESS if delivered < predicted else PredictionOutcome.MORE


class SplitReuse(NamedTuple):
    """The reuse that an engine reported for a request that named a source, in tokens."""

    # The tokens of the engine's own tiers: as predicted, unless fewer were reused, or more than source and tiers explain.
    local: int
    fetched: int


def split_reuse(reported: int, predicted: int, with_pull: int) -> SplitReuse:
    """Divide a reported reuse into what the engine held and what it fetched.

    An engine reports one number for both. A fetch that brings less than was planned says nothing about the engine's own
    tiers, so all between the two predictions counts as fetched.

    Args:
        reported: The reuse that the engine reports.
        predicted: The predicted hit in the engine's own tiers.
        with_pull: The predicted reuse if all blocks arrive.
    """
    fetched = max(0, min(reported, with_pull) - predicted)
    return SplitReuse(reported - fetched, fetched)


class PullOutcome(StrEnum):
    """The result of a pull, by what the engine reports as reused."""

    WHOLE = "whole"
    PARTIAL = "partial"
    NONE = "none"
    # The engine did not report what it reused, or its report is about something else.
    UNKNOWN = "unknown"


def pull_outcome(predicted: int, delivered: int) -> PullOutcome:
    """Return whether all, some or none of the tokens that were to be fetched were."""
    if delivered >= predicted:
        return PullOutcome.WHOLE
    return PullOutcome.PARTIAL if delivered else PullOutcome.NONE


class PredictionJudge:
    """The last predictions above zero for one engine process, and their results."""

    def __init__(self) -> None:
        # Pairs of predicted and delivered tokens.
        self._alone: deque[tuple[int, int]] = deque(maxlen=ALONE_WINDOW)
        self._all: deque[tuple[int, int]] = deque(maxlen=BUSY_WINDOW)
        # Pairs of a prompt's length as counted here and by the engine.
        self._lengths: deque[tuple[int, int]] = deque(maxlen=COUNTED_WINDOW)
        # Prompts that were reused, each with its prediction and whether it had a cache salt.
        self._reused: deque[tuple[int, bool]] = deque(maxlen=ALONE_WINDOW)
        self._tells = False
        self._silent = 0
        # The number of the engine's process. An answer is judged only in the life in which its worker was chosen.
        self.life = 0
        # The number of answers with both numbers, and the sums of their tokens.
        self._answers = self._prompt_tokens = self._predicted_tokens = self._delivered_tokens = 0

    def begin_life(self) -> None:
        """Forget the evidence, which is about another process. The sums stay, because they are this router's own."""
        self.life += 1
        self._alone.clear()
        self._all.clear()
        self._lengths.clear()
        self._reused.clear()
        self._tells, self._silent = False, 0

    def delivered_of(self, cached_tokens: int | None, predicted: int | None) -> int | None:
        """Return the reuse that an answer with usage reports; None if it is unknown.

        `predicted` is the predicted reuse, None without a prediction. If an engine reported its reuse before and now
        omits it, that means zero (vLLM before 0.25), unless it continues to omit it.
        """
        if cached_tokens is not None:
            self._tells, self._silent = True, 0
            return cached_tokens
        if predicted:
            self._silent += 1
        return 0 if self._tells and self._silent < SILENT_MIN else None

    def sum_up(self, prompt_tokens: int, predicted: int, delivered: int) -> None:
        """Add an answer with both numbers to the sums, whatever the prediction was."""
        self._answers += 1
        self._prompt_tokens += prompt_tokens
        self._predicted_tokens += predicted
        self._delivered_tokens += delivered

    def reuse(self) -> ReuseStatus | None:
        """Return the sums; None without an answer."""
        if not self._answers:
            return None
        return ReuseStatus(self._predicted_tokens, self._delivered_tokens, self._answers, self._prompt_tokens)

    def judge(self, predicted: int, delivered: int, *, alone: bool) -> None:
        """Record the result of one prediction as evidence.

        `alone` means that no other request was on its way to this worker, or being answered there, from the choice to
        the first token.
        """
        if not predicted:
            return
        self._all.append((predicted, delivered))
        if alone:
            self._alone.append((predicted, delivered))

    def reused(self, predicted: int, *, has_salt: bool) -> None:
        """Record a prompt that was reused while it was alone at a worker whose credit nothing withholds."""
        self._reused.append((predicted, has_salt))

    def counted(self, here: int, there: int) -> None:
        """Record the length of a prompt whose tokens are all known, as counted by the router and by the engine."""
        self._lengths.append((here, there))

    def problem(self) -> str | None:
        """Return a sentence about what is wrong, with its fix; None if nothing is."""
        doubt = self.doubt()
        return None if doubt is None else doubt.text

    def doubt(self) -> Doubt | None:
        """Return the problem with its kind; None if there is none."""
        wrong = [(here, there) for here, there in self._lengths if here != there]
        if len(self._lengths) >= COUNTED_MIN and len(wrong) > HALF * len(self._lengths):
            here, there = wrong[-1]
            return Doubt(
                DoubtKind.TOKENIZER,
                f"it counts other tokens than the router: {len(wrong)} of {len(self._lengths)} prompts differ, the last has "
                f"{there} there and {here} here, so their reuse cannot be predicted; check that both have the same tokenizer "
                "and chat template",
            )
        if self._silent >= SILENT_MIN:
            return Doubt(
                DoubtKind.SILENT,
                f"it does not say what it reuses: {self._silent} answers with a predicted hit in a row do not tell cached_tokens; "
                "start the engine with --enable-prompt-tokens-details (where it has that: nothing of what is predicted is reused)",
            )
        untrue = self._untrue()
        return self._unforeseen() if untrue is None else Doubt(DoubtKind.UNTRUE, untrue)

    def _unforeseen(self) -> Doubt | None:
        unforeseen = [has_salt for predicted, has_salt in self._reused if not predicted]
        if len(self._reused) < ALONE_MIN or len(unforeseen) <= HALF * len(self._reused):
            return None
        return Doubt(
            DoubtKind.UNFORESEEN,
            f"it reused {len(unforeseen)} prompts for which nothing was predicted, of the last {len(self._reused)} that it "
            f"reused while they were alone there; {sum(unforeseen)} of the {len(unforeseen)} had a cache_salt",
        )

    def _untrue(self) -> str | None:
        less = _less(self._alone)
        if len(self._alone) >= ALONE_MIN and len(less) > HALF * len(self._alone):
            return (
                f"predictions do not come true: {_shortfall(self._alone, less)} of requests that were alone there; check its "
                "hash seed (PYTHONHASHSEED), --prefix-caching-hash-algo, and that its events come from this engine"
            )
        less = _less(self._all)
        if len(self._all) >= BUSY_MIN and len(less) > HALF * len(self._all):
            predicted, delivered = _sums(self._all)
            if predicted - delivered > BUSY_LOST_SHARE * predicted:
                return (
                    f"predictions do not come true: {_shortfall(self._all, less)}; what was predicted is evicted before it is "
                    "used (too small a cache for its load, or events that come late), or was never there"
                )
        return None


def _less(judged: deque[tuple[int, int]]) -> list[tuple[int, int]]:
    return [(predicted, delivered) for predicted, delivered in judged if delivered < predicted]


def _sums(judged: deque[tuple[int, int]]) -> tuple[int, int]:
    return sum(predicted for predicted, _ in judged), sum(min(pair) for pair in judged)


def _shortfall(judged: deque[tuple[int, int]], less: list[tuple[int, int]]) -> str:
    predicted, delivered = _sums(judged)
    return (
        f"less was reused than predicted in {len(less)} of the last {len(judged)} ({delivered} of {predicted} tokens)"
    )
