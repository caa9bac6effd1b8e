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

from kvrouter.router.load.prompts_ahead import PromptAhead

# Some 100 bytes each; the names of 800 prompts of 32 k tokens.
MAX_NAMES = 200_000


class Tail(NamedTuple):
    """The end of a prompt behind its last whole piece: how many units (token ids or block hashes), and their digest."""

    units: int
    digest: int


class Entry(NamedTuple):
    """A piece. tail: that of the last prompt that ended in the next piece, None if that prompt was continued since or
    none ended there."""

    prompts: int
    tail: Tail | None = None


_PASSED_ONCE = Entry(1)


class PrefixPopularity:
    """Counts of one model's prompts, or of several: names are distinct anyway."""

    def __init__(self, max_names: int = MAX_NAMES) -> None:
        self._half = max(1, max_names // 2)
        self._young: dict[int, Entry] = {}
        self._old: dict[int, Entry] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def placed(self, prompt: PromptAhead) -> None:
        """Count a prompt."""
        names = prompt.names
        if not names:
            return
        young, entries = self._young, self._known(names)
        known = len(entries)
        tail = entries[-1].tail if known else None
        is_next_turn = tail is not None and _ends(prompt, known, tail.units) == tail
        if known and not is_next_turn:
            entries = [Entry(entry.prompts + 1, entry.tail) for entry in entries]
        elif is_next_turn:
            entries[-1] = Entry(entries[-1].prompts)
        young.update(zip(names, entries, strict=False))
        for name in names[known:]:
            young[name] = _PASSED_ONCE
        last = young[names[-1]]
        young[names[-1]] = Entry(last.prompts, _ends(prompt, len(names)))
        if len(young) > self._half:
            self._old, self._young = young, {}

    def counts(self, names: Sequence[int]) -> list[int]:
        """Return for each piece, up to the first unknown one, how many different prompts began with it."""
        return [entry.prompts for entry in self._known(names)]

    def _known(self, names: Sequence[int]) -> list[Entry]:
        """Return the entries of the names, up to the first unknown one."""
        young, old = self._young, self._old
        entries: list[Entry] = []
        for name in names:
            entry = young.get(name) or old.get(name)
            if entry is None:
                break
            entries.append(entry)
        return entries


def _ends(prompt: PromptAhead, pieces: int, units: int | None = None) -> Tail:
    """Return how a prompt goes on behind its first pieces, for at most this many units, None for all. It is empty where the
    prompt's tokens are not compared."""
    if prompt.units is None:
        return Tail(0, 0)
    first = pieces * prompt.step_tokens // prompt.unit_tokens
    rest = prompt.units[first : None if units is None else first + units]
    return Tail(len(rest), xxh3_64_intdigest(rest.tobytes()))
