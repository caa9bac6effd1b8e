# SPDX-License-Identifier: Apache-2.0
"""The states of a worker's stream, and what each means for its credit (docs/reference/states.md)."""

from __future__ import annotations

from enum import StrEnum


class StreamState(StrEnum):
    """Where a worker's event stream stands. The values are what `/workers` and the metrics show."""

    CONNECTING = "connecting"
    CATCHING_UP = "catching_up"
    LIVE = "live"
    SUSPECT = "suspect"
    RESYNCING = "resyncing"
    UNHASHABLE = "unhashable"
    # Its registration contradicts what its engine says of itself: the events may be another engine's.
    MISMATCHED = "mismatched"
    DOWN = "down"


# In these states the residency that is known is credited. `suspect` is, for a while: nothing contradicts it yet, it is
# marked, and whatever disproves it voids it. `resyncing` is not: batches are known to be missing.
CREDITED = frozenset({StreamState.CATCHING_UP, StreamState.LIVE, StreamState.SUSPECT})

# The same, and the one in which questions by block hash are answered: what doubt turns into `suspect`.
SHOWN = CREDITED | {StreamState.UNHASHABLE}
# In these states, the blocks of the worker were proven, or began from nothing.
PROVEN = frozenset({StreamState.LIVE, StreamState.CATCHING_UP, StreamState.UNHASHABLE})
# In these its events are heard now.
HEARD = frozenset({StreamState.CATCHING_UP, StreamState.LIVE, StreamState.RESYNCING, StreamState.UNHASHABLE})


def credited(state: StreamState, overdue: bool) -> bool:
    """Whether a worker gets credit for what is known of it. overdue: it is in this state for longer than doubt is
    credited."""
    return state in CREDITED and not (state is StreamState.SUSPECT and overdue)
