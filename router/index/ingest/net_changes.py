# SPDX-License-Identifier: Apache-2.0
"""The net effect of many changes: which blocks became resident since the last flush, and which stopped being resident.

A block that came and went within one flush interval changes nothing. Pure; no clock.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvrouter.router.base.common.ids import Place

Hashes = NDArray[np.uint64]

NO_HASHES = np.empty(0, np.uint64)


class ResidencyDelta(msgspec.Struct, frozen=True):
    """The net transitions at one place: disjoint arrays of block hashes, uint64, shape (n,)."""

    place: Place
    added: Hashes
    removed: Hashes


class NetChanges:
    """The residency transitions of one place, in order. Each hash alternates between arriving and leaving."""

    __slots__ = ("_arrivals", "_parts", "count")

    def __init__(self) -> None:
        self._parts: list[Hashes] = []
        self._arrivals: list[bool] = []
        # Number of transitions so far.
        self.count = 0

    def arrived(self, hashes: Hashes) -> None:
        """Append blocks that became resident."""
        self._append(hashes, True)

    def left(self, hashes: Hashes) -> None:
        """Append blocks that stopped being resident."""
        self._append(hashes, False)

    def _append(self, hashes: Hashes, arrival: bool) -> None:
        if len(hashes):
            self._parts.append(hashes)
            self._arrivals.append(arrival)
            self.count += len(hashes)

    def net(self) -> tuple[Hashes, Hashes]:
        """Return (added, removed), disjoint and without repeats."""
        if not self._parts:
            return NO_HASHES, NO_HASHES
        hashes = np.concatenate(self._parts)
        if all(self._arrivals):
            return hashes, NO_HASHES
        if not any(self._arrivals):
            return NO_HASHES, hashes
        arrivals = np.repeat(np.array(self._arrivals), [len(part) for part in self._parts])
        order = np.argsort(hashes, kind="stable")
        hashes, arrivals = hashes[order], arrivals[order]
        edge = np.flatnonzero(hashes[1:] != hashes[:-1]) + 1
        first = np.concatenate([[0], edge])
        last = np.concatenate([edge, [len(hashes)]]) - 1
        # A hash whose first transition is an arrival was absent before; one whose last is an arrival is present now.
        came = arrivals[first] & arrivals[last]
        went = ~arrivals[first] & ~arrivals[last]
        return hashes[first[came]], hashes[first[went]]
