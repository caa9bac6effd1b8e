# SPDX-License-Identifier: Apache-2.0
"""Detection of an engine that announces over and over that its cache is empty. Pure: the clock's value is passed in."""

from __future__ import annotations

from collections import deque

# This many clears in these seconds are too many. A person who resets a cache, or a trainer that does so between two
# updates of the weights, causes far fewer.
MOST_CLEARS = 20
WINDOW_S = 10.0


class ClearWatch:
    """The times at which a worker's count of clears last grew, at most MOST_CLEARS of them."""

    def __init__(self) -> None:
        # Each time with the count at that time.
        self._grown: deque[tuple[float, int]] = deque(maxlen=MOST_CLEARS)

    def record(self, clears: int, now_s: float) -> None:
        """Record that the worker's count of clears has grown. A jump of the count, as after a takeover, is one entry."""
        self._grown.append((now_s, clears))

    def problem(self, now_s: float) -> str:
        """Return how often the engine clears its cache if that is too often, or ""."""
        if len(self._grown) < MOST_CLEARS or now_s - self._grown[0][0] > WINDOW_S:
            return ""
        (first_s, first_clears), (last_s, last_clears) = self._grown[0], self._grown[-1]
        per_second = (last_clears - first_clears) / max(last_s - first_s, 0.001)
        return (
            f"its engine announced AllBlocksCleared {last_clears - first_clears + 1} times lately, {per_second:.0f} times a "
            "second, so nothing that it stores is credited for long"
        )
