# SPDX-License-Identifier: Apache-2.0
"""How many different prompts began with each piece: a beginning that many share is worth a copy. Pure.

Pieces are named as in `pending_prefixes.py`. A chat's next turn continues its former prompt and is no new one: it goes
on with the tokens in which that prompt ended. Every other prompt that leaves a known path is a new one. Memory is
bounded by two generations: names that no prompt had while `max_names` others came are forgotten, and their counts with
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from kvrouter.router.route.load.prompts_ahead import PromptAhead

# Some 100 bytes each; the names of 800 prompts of 32 k tokens.
MAX_NAMES = 200_000


class Tail(NamedTuple):
    """The end of a prompt behind its last whole piece: how many units (token ids or block hashes), and their digest."""

    units: int
    digest: int


class PrefixPopularity:
    """Counts of one model's prompts, or of several: names are distinct anyway."""

    def __init__(self, max_names: int = MAX_NAMES) -> None:
        self._half = max(1, max_names // 2)
        # How many prompts had each piece.
        self._young: dict[int, int] = {}
        self._old: dict[int, int] = {}
        # How the last prompt that ended behind a piece did so, until it is continued.
        self._young_tails: dict[int, Tail | None] = {}
        self._old_tails: dict[int, Tail | None] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def placed(self, prompt: PromptAhead) -> None:
        """Count a prompt."""
        names = prompt.names
        if not names:
            return
        young, counts = self._young, self.counts(names)
        known = len(counts)
        if known:
            last = names[known - 1]
            tail = self._young_tails[last] if last in self._young_tails else self._old_tails.get(last)
            if tail is not None and _ends(prompt, known, tail.units) == tail:
                self._young_tails[last] = None
            else:
                counts = [count + 1 for count in counts]
            young.update(zip(names, counts, strict=False))
        if known < len(names):
            young.update(dict.fromkeys(names[known:], 1))
        self._young_tails[names[-1]] = _ends(prompt, len(names))
        if len(young) > self._half:
            self._old, self._young = young, {}
            self._old_tails, self._young_tails = self._young_tails, {}

    def counts(self, names: Sequence[int]) -> list[int]:
        """Return for each piece, up to the first unknown one, how many different prompts began with it."""
        young, old = self._young, self._old
        counts: list[int] = []
        for name in names:
            count = young.get(name) or old.get(name)
            if count is None:
                break
            counts.append(count)
        return counts


def _ends(prompt: PromptAhead, pieces: int, units: int | None = None) -> Tail:
    """Return how a prompt goes on behind its first pieces, for at most this many units, None for all. It is empty where the
    prompt's tokens are not compared."""
    if prompt.units is None:
        return Tail(0, 0)
    first = pieces * prompt.step_tokens // prompt.unit_tokens
    rest = prompt.units[first : None if units is None else first + units]
    return Tail(len(rest), xxh3_64_intdigest(rest.tobytes()))
