# SPDX-License-Identifier: Apache-2.0
"""How many different prompts began with each piece: a beginning that many share is worth a copy. Pure.

Pieces are named as in `pending_prefixes.py`. A chat's next turn continues its former prompt and is no new one; a prompt
that leaves a known path where another one continued is. Memory is bounded by two generations: names that no prompt had
while `max_names` others came are forgotten, and their counts with them.
"""

from __future__ import annotations

from collections.abc import Sequence

# Some 100 bytes each; the names of 1,500 prompts of 32 k tokens.
MAX_NAMES = 200_000
# A count is shifted by one bit; the lowest says that some prompt continued behind the piece.
_ONE = 2
_CONTINUED = 1


class PrefixPopularity:
    """Counts of one model's prompts, or of several: names are distinct anyway."""

    def __init__(self, max_names: int = MAX_NAMES) -> None:
        self._half = max(1, max_names // 2)
        self._young: dict[int, int] = {}
        self._old: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def placed(self, names: Sequence[int]) -> None:
        """Count a prompt by the names of its pieces."""
        if not names:
            return
        young, counts = self._young, self._known(names)
        known = len(counts)
        is_other = known < len(names) and known > 0 and bool(counts[-1] & _CONTINUED)
        for place, count in enumerate(counts):
            young[names[place]] = count + _ONE if is_other else count
        if known < len(names):
            if known:
                young[names[known - 1]] |= _CONTINUED
            for name in names[known:]:
                young[name] = _ONE | _CONTINUED
            young[names[-1]] = _ONE
        if len(young) > self._half:
            self._old, self._young = young, {}

    def counts(self, names: Sequence[int]) -> list[int]:
        """Return for each piece, up to the first unknown one, how many different prompts began with it."""
        return [count >> 1 for count in self._known(names)]

    def _known(self, names: Sequence[int]) -> list[int]:
        """Return the entries of the names, up to the first unknown one."""
        young, old = self._young, self._old
        counts: list[int] = []
        for name in names:
            count = young.get(name) or old.get(name)
            if count is None:
                break
            counts.append(count)
        return counts
