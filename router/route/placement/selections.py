# SPDX-License-Identifier: Apache-2.0
"""What was chosen and not reserved: a client that got a `/select` may book just that later, by its id alone. Pure.

Of one process: another one behind the same port does not know of it."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from kvrouter.router.route.placement.choose import Choice

# Between the choice and its booking a client asks nobody else; a minute covers one that waits for something of its own.
SELECTION_TTL_S = 60.0
# Some 2 kB each.
MAX_SELECTIONS = 4_096


class Selected(NamedTuple):
    """names: of the prompt's beginnings, as `load/pending.py` has them."""

    model: str
    choice: Choice
    names: list[int]
    num_tokens: int
    max_tokens: int | None
    expiry_s: float


class Selections:
    """By id, the oldest first."""

    def __init__(self, max_selections: int = MAX_SELECTIONS) -> None:
        self._max = max_selections
        self._kept: OrderedDict[str, Selected] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, selection_id: str, selected: Selected) -> None:
        """A later one of the same id takes its place."""
        self._kept[selection_id] = selected
        self._kept.move_to_end(selection_id)
        while len(self._kept) > self._max:
            self._kept.popitem(last=False)

    def find(self, selection_id: str, now: float) -> Selected | None:
        selected = self._kept.get(selection_id)
        return selected if selected is not None and selected.expiry_s > now else None

    def drop(self, selection_id: str) -> None:
        self._kept.pop(selection_id, None)

    def expire(self, now: float) -> None:
        while self._kept:
            selection_id, selected = next(iter(self._kept.items()))
            if selected.expiry_s > now:
                return
            del self._kept[selection_id]
