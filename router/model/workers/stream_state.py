# SPDX-License-Identifier: Apache-2.0
"""The states of a worker's event stream, and their effect on the worker's credit (docs/reference/states.md)."""

from __future__ import annotations

from enum import StrEnum


class StreamState(StrEnum):
    """The state of a worker's event stream. `/workers` and the metrics show the values."""

    CONNECTING = "connecting"
    CATCHING_UP = "catching_up"
    LIVE = "live"
    SUSPECT = "suspect"
    RESYNCING = "resyncing"
    UNHASHABLE = "unhashable"
    # The registration contradicts the answers of its engine, so the events may come from another engine.
    MISMATCHED = "mismatched"
    DOWN = "down"


# In these states the known residency earns credit. `suspect` earns it for a while: no evidence contradicts the residency
# yet, answers mark it as suspect, and any contradiction voids it. `resyncing` earns none, because batches are missing.
CREDITED = frozenset({StreamState.CATCHING_UP, StreamState.LIVE, StreamState.SUSPECT})

# The credited states, and the state in which only questions by block hash are answered. Doubt turns each into `suspect`.
SHOWN = CREDITED | {StreamState.UNHASHABLE}
# In these states, the blocks of the worker were proven, or were followed from an empty cache on.
PROVEN = frozenset({StreamState.LIVE, StreamState.CATCHING_UP, StreamState.UNHASHABLE})
# In these states, events of the worker arrive.
HEARD = frozenset({StreamState.CATCHING_UP, StreamState.LIVE, StreamState.RESYNCING, StreamState.UNHASHABLE})


def credited(state: StreamState, overdue: bool) -> bool:
    """Return whether a worker gets credit for its known residency.

    Args:
        state: The state of its stream.
        overdue: Whether the worker is in this state for longer than `suspect` earns credit.
    """
    return state in CREDITED and not (state is StreamState.SUSPECT and overdue)
