# SPDX-License-Identifier: Apache-2.0
"""Choices without a reservation: after a `/select`, the client may reserve that worker by the id alone. Pure.

They belong to one process: another process behind the same port does not know them.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from kvrouter.router.route.load.prefix_tree import PromptPrefixes
from kvrouter.router.route.placement.choose import Choice

# How long after the choice a selection can still be reserved. Clients usually reserve at once; a minute also suffices
# for a client that first waits for something else.
SELECTION_TTL_S = 60.0
# Some 2 kB each.
MAX_SELECTIONS = 4_096


class Selected(NamedTuple):
    """A choice that can be reserved by its id."""

    model: str
    choice: Choice
    prefixes: PromptPrefixes
    num_tokens: int
    max_tokens: int | None
    expiry_s: float
    num_prompts: int = 1
    # The number of answers to each prompt.
    answers: int = 1


class Selections:
    """Selections by id, the oldest first."""

    def __init__(self, max_selections: int = MAX_SELECTIONS) -> None:
        self._max = max_selections
        self._selected: OrderedDict[str, Selected] = OrderedDict()

    def __len__(self) -> int:
        return len(self._selected)

    def keep(self, selection_id: str, selected: Selected) -> None:
        """Remember a selection; it replaces an earlier one of the same id."""
        self._selected[selection_id] = selected
        self._selected.move_to_end(selection_id)
        while len(self._selected) > self._max:
            self._selected.popitem(last=False)

    def find(self, selection_id: str, now: float) -> Selected | None:
        """Return the selection, or None if it is unknown or expired."""
        selected = self._selected.get(selection_id)
        return selected if selected is not None and selected.expiry_s > now else None

    def drop(self, selection_id: str) -> None:
        """Forget a selection, if it is known."""
        self._selected.pop(selection_id, None)

    def expire(self, now: float) -> None:
        """Drop expired selections."""
        while self._selected:
            selection_id, selected = next(iter(self._selected.items()))
            if selected.expiry_s > now:
                return
            del self._selected[selection_id]
