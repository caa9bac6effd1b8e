# SPDX-License-Identifier: Apache-2.0
"""The reuse that is expected of a placed prompt beside its hit, and how often such expectations come true. Pure.

    expected = hit + share(resumable) * (resumable - hit) + share(computed) * (computed - resumable)

- resumable: the tokens of the prompts ahead that the engine's rule lets this prompt reuse.
- computed: all tokens that this prompt has in common with the prompts ahead.

The shares are learned from answers for each model, because engines differ in how they schedule and in the blocks
that they keep, and because blocks are evicted while a prompt waits.

Invariants: the expectation is never below the hit and never above the tokens that can be reused at all, and it
equals the hit if no prompt is ahead.
"""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from kvrouter.router.route.load.prompts_ahead import NOTHING, Coming

# The number of answers that the prior counts for, each as large as the first one: a single odd answer does not outweigh
# it, and a dozen do.
PRIOR_ANSWERS = 4
# The number of answers after which an older one counts half: engines, their settings and the traffic change.
HALF_LIFE_ANSWERS = 256
_FADE = 0.5 ** (1 / HALF_LIFE_ANSWERS)
# The rule is vLLM's own, so tokens that it allows to be reused are reused, and all others are not.
RESUMABLE_PRIOR = 1.0
COMPUTED_PRIOR = 0.0
# Models come from registrations; clients cannot create one.
MAX_MODELS = 1_024


class ExpectedReuse(msgspec.Struct, frozen=True, gc=False):
    """The expected reuse of one prompt at the chosen worker, in tokens; hit <= resumable <= computed."""

    # The expectation.
    tokens: int
    # The hit at the moment of the choice.
    hit: int
    resumable: int
    computed: int
    # Where this prompt itself will leave windows and states for later prompts.
    checkpoints: tuple[int, ...] = ()


class Share:
    """The share of offered tokens that were reused; later answers weigh more."""

    __slots__ = ("_came", "_offered", "_prior")

    def __init__(self, prior: float) -> None:
        self._prior = prior
        self._offered = self._came = 0.0

    @property
    def value(self) -> float:
        """The share of reusable tokens that answers did reuse, from 0 to 1; before any answer, the prior share.

        It is 0 if evictions took more tokens from the expected hits than were reused beyond them.
        """
        return max(0.0, self._came / self._offered) if self._offered else self._prior

    def add(self, offered_tokens: int, came_tokens: int) -> None:
        """Count an answer.

        Args:
            offered_tokens: Tokens that might have been reused.
            came_tokens: Tokens of these that were; below 0 if a part of the hit was evicted.
        """
        if offered_tokens <= 0:
            return
        if not self._offered:
            self._offered = float(PRIOR_ANSWERS * offered_tokens)
            self._came = self._prior * self._offered
        self._offered = self._offered * _FADE + offered_tokens
        self._came = self._came * _FADE + min(came_tokens, offered_tokens)


class ReuseShares:
    """Both learned shares of each model."""

    def __init__(self, max_models: int = MAX_MODELS) -> None:
        self._max_models = max_models
        self._shares: OrderedDict[str, tuple[Share, Share]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._shares)

    def expect(self, model: str, num_tokens: int, hit: int, full_attention: int, coming: Coming) -> ExpectedReuse:
        """Return the expected reuse of a prompt.

        Args:
            model: The model of the prompt.
            num_tokens: Length of the prompt; its last token is computed in any case.
            hit: The chosen worker's hit.
            full_attention: How far the blocks of full attention at that worker reach, in tokens.
            coming: The parts of the prompt that the prompts ahead will have left.
        """
        max_tokens = num_tokens - 1
        if coming is NOTHING:
            return ExpectedReuse(hit, hit, hit, hit, (full_attention,) if full_attention > hit else ())
        resumable = max(hit, min(coming.resumable, max_tokens))
        computed = max(resumable, min(coming.computed, max_tokens))
        shares = self._shares.get(model)
        usable, beyond = (RESUMABLE_PRIOR, COMPUTED_PRIOR) if shares is None else (shares[0].value, shares[1].value)
        tokens = hit + round(usable * (resumable - hit) + beyond * (computed - resumable))
        # Where full attention reaches further than the prompt can resume, vLLM keeps a checkpoint for the next one.
        junction = max(full_attention, computed)
        checkpoints = coming.checkpoints + ((junction,) if junction > resumable else ())
        return ExpectedReuse(tokens, hit, resumable, computed, checkpoints)

    def learn(self, model: str, expected: ExpectedReuse, reused_tokens: int) -> None:
        """Count the reuse that an engine reported for a prompt."""
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
