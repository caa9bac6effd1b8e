# SPDX-License-Identifier: Apache-2.0
"""A ring with the sums of one model in steps of one length, as many as the longest range needs. Pure."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvrouter.router.observe.history.history_entry import SUM_NAMES, ModelStep
from kvrouter.router.route.load.traffic_sums import TTFT_BOUNDS_S, TTFT_CLASSES

Sums = NDArray[np.int64]
Counts = NDArray[np.int64]

_BOUNDS_S = np.array((0.0, *TTFT_BOUNDS_S))


class StepSums(NamedTuple):
    """The sums of consecutive steps, one row per step."""

    # The columns are in the order of SUM_NAMES.
    sums: Sums
    # The number of answers in each class of times to the first token.
    ttft: Counts

    @classmethod
    def zeros(cls, steps: int) -> StepSums:
        """Return the sums of steps without traffic."""
        return cls(np.zeros((steps, len(SUM_NAMES)), np.int64), np.zeros((steps, TTFT_CLASSES), np.int64))


class StepRing:
    """The last steps of one model. A step's slot is its number modulo the size, so a new step replaces an old one."""

    def __init__(self, steps: int) -> None:
        """Begin without traffic. `steps` is how many steps are kept."""
        self._size = steps
        # The number of the step in each slot, or -1 for an empty slot.
        self._held = np.full(steps, -1, np.int64)
        self._sums = np.zeros((steps, len(SUM_NAMES)), np.int64)
        self._ttft = np.zeros((steps, TTFT_CLASSES), np.uint32)
        # The newest step with traffic.
        self.newest = -1

    @property
    def bytes(self) -> int:
        """The memory of the arrays."""
        return self._held.nbytes + self._sums.nbytes + self._ttft.nbytes

    def add(self, step: int, sums: ModelStep) -> None:
        """Add sums to a step. Ignore a step that is so old that a newer one has its slot."""
        slot = step % self._size
        if self._held[slot] != step:
            if self._held[slot] > step:
                return
            self._held[slot] = step
            self._sums[slot] = 0
            self._ttft[slot] = 0
        self._sums[slot] += sums.sums()
        for index, count in zip(sums.ttft[::2], sums.ttft[1::2], strict=True):
            self._ttft[slot, index] += min(count, np.iinfo(np.uint32).max - int(self._ttft[slot, index]))
        self.newest = max(self.newest, step)

    def add_to(self, total: StepSums, first: int) -> None:
        """Add the sums of consecutive steps, beginning with the number `first`, to the rows of `total`."""
        row, rows = 0, len(total.sums)
        while row < rows:
            # The slots of consecutive steps are consecutive up to the end of the ring.
            slot = (first + row) % self._size
            part, slots = slice(row, min(rows, row + self._size - slot)), slice(slot, slot + rows - row)
            held = self._held[slots] == np.arange(first + part.start, first + part.stop)
            if held.all():
                total.sums[part] += self._sums[slots]
                total.ttft[part] += self._ttft[slots]
            elif held.any():
                total.sums[part] += self._sums[slots] * held[:, None]
                total.ttft[part] += self._ttft[slots] * held[:, None]
            row = part.stop


def percentiles(ttft: Counts, share: float) -> list[float | None]:
    """Return, for each row, the time below which `share` of its answers lie, interpolated; None without answers."""
    reached = np.cumsum(ttft, axis=1, dtype=np.float64)
    totals = reached[:, -1]
    target = totals * share
    index = (reached < target[:, None]).sum(axis=1)
    # The last class has no upper bound, so its lower bound is used instead.
    lower = _BOUNDS_S[index]
    upper = _BOUNDS_S[np.minimum(index + 1, len(_BOUNDS_S) - 1)]
    rows = np.arange(len(ttft))
    inside = ttft[rows, index].astype(np.float64)
    before = reached[rows, index] - inside
    part = np.divide(target - before, inside, out=np.zeros(len(ttft)), where=inside > 0)
    times = np.round(lower + (upper - lower) * part, 6).tolist()
    return [time if total else None for time, total in zip(times, totals.tolist(), strict=True)]
