# SPDX-License-Identifier: Apache-2.0
"""The reporter's counters over all its epochs, and the line of the engine's log that shows them.

The reporter's thread writes them; other threads may read a value a moment late.
"""

from __future__ import annotations

import logging

import msgspec

# The counters that grow while nothing is wrong.
HARMLESS = frozenset({"sent", "heartbeats", "snapshots_served"})
# Seconds between two lines: an engine whose readers come and go would otherwise fill its log.
SUMMARY_S = 600.0


class Counters(msgspec.Struct):
    """The counters of a reporter, which only grow."""

    # Messages with events that were handed to PUB.
    sent: int = 0
    # Messages with events that were not sent.
    dropped: int = 0
    # Messages that could not be translated, counted or encoded; `dropped` counts each of them, too.
    failed: int = 0
    # Epochs begun after the first one, because the ledger could no longer be trusted.
    epochs_lost: int = 0
    heartbeats: int = 0
    snapshots_served: int = 0
    snapshots_refused: int = 0
    # Snapshots abandoned because their client did not read for too long.
    snapshots_abandoned: int = 0
    # Snapshots whose client left.
    snapshots_gone: int = 0
    # Requests that could not be read. Requests with a legible id were refused, the others ignored.
    bad_requests: int = 0
    # Replies, except for snapshot parts, whose client left or had no room for too long.
    replies_unsent: int = 0
    # Connections refused because the file of clients does not list their key.
    clients_refused: int = 0


class CounterLog:
    """Writes all counters into the engine's log after something went wrong, at most once in ten minutes."""

    def __init__(self, counters: Counters, log: logging.Logger) -> None:
        self._counters = counters
        self._log = log
        self._written = self._harm()
        self._next_s = 0.0

    def write(self, now_s: float) -> None:
        """Write the counters if one that shows harm grew since the last line and the line is due."""
        harm = self._harm()
        if harm == self._written or now_s < self._next_s:
            return
        self._written, self._next_s = harm, now_s + SUMMARY_S
        counts = ", ".join(f"{name}: {value}" for name, value in msgspec.structs.asdict(self._counters).items())
        self._log.warning("kvrouter: counters of the reporter since its start (%s)", counts)

    def _harm(self) -> tuple[int, ...]:
        """Return the counters that grow only if something goes wrong."""
        counters = msgspec.structs.asdict(self._counters)
        return tuple(value for name, value in counters.items() if name not in HARMLESS)
