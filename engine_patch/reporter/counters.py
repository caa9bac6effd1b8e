# SPDX-License-Identifier: Apache-2.0
"""The reporter's counters over all its epochs.

The reporter's thread writes them; other threads may read a value a moment late.
"""

from __future__ import annotations

import msgspec


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
