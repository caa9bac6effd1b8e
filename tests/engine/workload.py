# SPDX-License-Identifier: Apache-2.0
"""Prompts that share prefixes like a tree, and questions about them."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

# Longest prompt, in tokens: a few windows and several dozen blocks, and small enough for every pool to hold one.
MAX_PROMPT_TOKENS = 420
MAX_REMEMBERED = 48
SALTS = ("tenant-a", "tenant-b")


@dataclass(frozen=True)
class Prompt:
    token_ids: tuple[int, ...]
    cache_salt: str | None = None


class PromptTree:
    """A tree of prompts, in which every prompt may become the parent of later ones, and older ones are forgotten."""

    def __init__(self, rng: Random, vocab_size: int) -> None:
        self._rng = rng
        self._vocab_size = vocab_size
        self._prompts = [Prompt(self._tokens(60, 320)) for _ in range(3)]

    def _tokens(self, low: int, high: int) -> tuple[int, ...]:
        return tuple(self._rng.randrange(self._vocab_size) for _ in range(self._rng.randint(low, high)))

    def _remember(self, prompt: Prompt) -> Prompt:
        self._prompts.append(prompt)
        if len(self._prompts) > MAX_REMEMBERED:
            # Forget a prompt of the older half, so that long-lived prefixes and short-lived ones both occur.
            del self._prompts[self._rng.randrange(MAX_REMEMBERED // 2)]
        return prompt

    def _pick(self) -> Prompt:
        return self._rng.choice(self._prompts)

    def request(self) -> Prompt:
        """Return the prompt of a new request: a repeat, a longer one, a sibling, or a new root."""
        rng = self._rng
        kind = rng.random()
        if kind < 0.08:
            salt = rng.choice(SALTS) if rng.random() < 0.4 else None
            return self._remember(Prompt(self._tokens(60, 320), salt))
        parent = self._pick()
        if kind < 0.25:
            return parent
        kept = parent.token_ids
        if kind > 0.6:
            kept = kept[: rng.randint(1, len(kept))]
        token_ids = (kept + self._tokens(1, 160))[:MAX_PROMPT_TOKENS]
        return self._remember(Prompt(token_ids, parent.cache_salt))

    def adopt(self, token_ids: tuple[int, ...], cache_salt: str | None) -> None:
        """Remember a finished request's prompt with its answer: the next turn of a conversation starts there."""
        if len(token_ids) < MAX_PROMPT_TOKENS:
            self._remember(Prompt(token_ids, cache_salt))

    def question(self) -> Prompt:
        """Return a prompt that is only queried and never sent: unchanged, cut, longer, diverging, salted, or new."""
        rng = self._rng
        prompt = self._pick()
        kind = rng.random()
        token_ids, salt = prompt.token_ids, prompt.cache_salt
        if kind < 0.3:
            token_ids = token_ids + self._tokens(1, 90)
        elif kind < 0.5:
            token_ids = token_ids[: rng.randint(0, len(token_ids))]
        elif kind < 0.65:
            token_ids = token_ids[: rng.randint(0, len(token_ids))] + self._tokens(1, 60)
        elif kind < 0.68:
            salt = None if salt is not None else rng.choice(SALTS)
        elif kind < 0.71:
            token_ids = self._tokens(1, 200)
        return Prompt(token_ids or self._tokens(1, 40), salt)
