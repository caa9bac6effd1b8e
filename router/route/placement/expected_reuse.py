# SPDX-License-Identifier: Apache-2.0
"""The reuse that is expected of a placed prompt, beside its hit, and how much of such expectations came true. Pure.

    expected = hit + share(resumable) * (resumable - hit) + share(computed) * (computed - resumable)

resumable: what the engine's rule lets the prompt reuse of the prompts ahead of it. computed: what they have in common
with it at all. The shares are learned from answers, model by model: engines differ in how they schedule and in what
they keep, and blocks are evicted while a prompt waits.
Invariants: never below the hit, never above what must be computed in any case, and the hit itself where nothing is
ahead."""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from kvrouter.router.route.load.prompts_ahead import NOTHING, Coming

# Answers that the rule itself counts for, each as large as the first one: a single odd answer does not outweigh it, and
# a dozen do.
PRIOR_ANSWERS = 4
# Answers after which an older one counts a half: engines, their settings and the traffic change.
HALF_LIFE_ANSWERS = 256
_FADE = 0.5 ** (1 / HALF_LIFE_ANSWERS)
# The rule is vLLM's own, so what it allows is reused; what it does not, is not.
RESUMABLE_PRIOR = 1.0
COMPUTED_PRIOR = 0.0
# Models come from registrations; a client cannot make one.
MAX_MODELS = 1_024


class ExpectedReuse(msgspec.Struct, frozen=True, gc=False):
    """The expected reuse of one prompt at the chosen worker, in tokens; hit <= resumable <= computed."""

    # The expectation.
    tokens: int
    # The exact prediction of the moment of the choice.
    hit: int
    resumable: int
    computed: int
    # Where this prompt itself will leave windows and states, for those after it.
    checkpoints: tuple[int, ...] = ()


class Share:
    """A share of tokens that came true, the latest answers first in weight."""

    __slots__ = ("_came", "_offered", "_prior")

    def __init__(self, prior: float) -> None:
        self._prior = prior
        self._offered = self._came = 0.0

    @property
    def value(self) -> float:
        """From 0 to 1, also where answers lost a part of their hit."""
        return max(0.0, self._came / self._offered) if self._offered else self._prior

    def add(self, offered_tokens: int, came_tokens: int) -> None:
        """Count an answer of which this much was reused; below 0 where a part of the hit was evicted."""
        if offered_tokens <= 0:
            return
        if not self._offered:
            self._offered = float(PRIOR_ANSWERS * offered_tokens)
            self._came = self._prior * self._offered
        self._offered = self._offered * _FADE + offered_tokens
        self._came = self._came * _FADE + min(came_tokens, offered_tokens)


class ReuseShares:
    """Both shares of each model."""

    def __init__(self, max_models: int = MAX_MODELS) -> None:
        self._max_models = max_models
        self._shares: OrderedDict[str, tuple[Share, Share]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._shares)

    def expect(self, model: str, num_tokens: int, hit: int, full_attention: int, coming: Coming) -> ExpectedReuse:
        """Return what is expected of a prompt.

        Args:
            model: The model of the prompt.
            num_tokens: Length of the prompt; its last token is computed in any case.
            hit: The chosen worker's hit.
            full_attention: How far full attention's blocks at that worker reach.
            coming: What the prompts ahead will have left.
        """
        most = num_tokens - 1
        if coming is NOTHING:
            return ExpectedReuse(hit, hit, hit, hit, (full_attention,) if full_attention > hit else ())
        resumable = max(hit, min(coming.resumable, most))
        computed = max(resumable, min(coming.computed, most))
        shares = self._shares.get(model)
        usable, beyond = (RESUMABLE_PRIOR, COMPUTED_PRIOR) if shares is None else (shares[0].value, shares[1].value)
        tokens = hit + round(usable * (resumable - hit) + beyond * (computed - resumable))
        # Where full attention reaches further than the prompt can resume, vLLM keeps a checkpoint for the next one.
        junction = max(full_attention, computed)
        checkpoints = coming.checkpoints + ((junction,) if junction > resumable else ())
        return ExpectedReuse(tokens, hit, resumable, computed, checkpoints)

    def learn(self, model: str, expected: ExpectedReuse, reused_tokens: int) -> None:
        """Count what an engine reported of a prompt."""
        if expected.computed <= expected.hit:
            return
        shares = self._shares.get(model)
        if shares is None:
            while len(self._shares) >= self._max_models:
                self._shares.popitem(last=False)
            shares = self._shares[model] = (Share(RESUMABLE_PRIOR), Share(COMPUTED_PRIOR))
        usable, beyond = shares
        usable.add(expected.resumable - expected.hit, reused_tokens - expected.hit)
        beyond.add(expected.computed - expected.resumable, reused_tokens - expected.resumable)
