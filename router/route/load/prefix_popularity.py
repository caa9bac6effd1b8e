# SPDX-License-Identifier: Apache-2.0
"""How many different prompts began with each piece: a beginning that many prompts share is worth a copy. Pure.

Pieces are named as in `pending_prefixes.py`. The next turn of a chat is not counted as a new prompt: it continues with
the tokens in which its previous prompt ended. Every other prompt that leaves a known path is a new one. Two generations
bound the memory: a name that no prompt uses while `max_names` others come is forgotten with its count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from kvrouter.router.route.load.prompts_ahead import PromptAhead

# Some 100 bytes each; the names of 800 prompts of 32 k tokens.
MAX_NAMES = 200_000


class Tail(NamedTuple):
    """The end of a prompt behind its last whole piece."""

    # The number of units (token ids or block hashes), and their digest.
    units: int
    digest: int


class PrefixPopularity:
    """Counts of the prompts of one model or of several, because names differ between models."""

    def __init__(self, max_names: int = MAX_NAMES) -> None:
        self._half = max(1, max_names // 2)
        # The number of prompts with each piece.
        self._young: dict[int, int] = {}
        self._old: dict[int, int] = {}
        # The tail of the last prompt that ended behind each piece; None once another prompt has continued it.
        self._young_tails: dict[int, Tail | None] = {}
        self._old_tails: dict[int, Tail | None] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def placed(self, prompt: PromptAhead) -> None:
        """Count a prompt that was placed."""
        names = prompt.names
        if not names:
            return
        young, counts = self._young, self.counts(names)
        shared = len(counts)
        if shared:
            last_name = names[shared - 1]
            tail = self._young_tails[last_name] if last_name in self._young_tails else self._old_tails.get(last_name)
            if tail is not None and _ends(prompt, shared, tail.units) == tail:
                self._young_tails[last_name] = None
            else:
                counts = [count + 1 for count in counts]
            young.update(zip(names, counts, strict=False))
        if shared < len(names):
            young.update(dict.fromkeys(names[shared:], 1))
        self._young_tails[names[-1]] = _ends(prompt, len(names))
        if len(young) > self._half:
            self._old, self._young = young, {}
            self._old_tails, self._young_tails = self._young_tails, {}

    def counts(self, names: Sequence[int]) -> list[int]:
        """Return how many different prompts began with each piece, up to the first unknown piece."""
        young, old = self._young, self._old
        counts: list[int] = []
        for name in names:
            count = young.get(name) or old.get(name)
            if count is None:
                break
            counts.append(count)
        return counts


def _ends(prompt: PromptAhead, pieces: int, units: int | None = None) -> Tail:
    """Return the units of a prompt behind its first pieces as a tail; empty if its tokens are not compared.

    Args:
        prompt: The prompt.
        pieces: The number of pieces before the tail.
        units: The largest number of units in the tail, or None for all.
    """
    if prompt.units is None:
        return Tail(0, 0)
    first = pieces * prompt.step_tokens // prompt.unit_tokens
    rest = prompt.units[first : None if units is None else first + units]
    return Tail(len(rest), xxh3_64_intdigest(rest.tobytes()))
