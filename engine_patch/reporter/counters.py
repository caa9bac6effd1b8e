# SPDX-License-Identifier: Apache-2.0
"""The reporter's counters over all its epochs. Written by its thread; other threads may read a value a moment late."""

from __future__ import annotations

import msgspec


class Counters(msgspec.Struct):
    """Counters that only grow."""

    # Messages with events handed to PUB; the changes in messages that could not be sent are in `dropped`.
    sent: int = 0
    dropped: int = 0
    # Messages that could not be translated, counted or encoded; each is in `dropped` too.
    failed: int = 0
    # Epochs begun after the first, because the ledger could no longer be trusted.
    epochs_lost: int = 0
    heartbeats: int = 0
    snapshots_served: int = 0
    snapshots_refused: int = 0
    # The client did not read for too long.
    snapshots_abandoned: int = 0
    # The client left.
    snapshots_gone: int = 0
    # Requests that could not be read; those with a legible id were refused, the others ignored.
    bad_requests: int = 0
    # Replies other than snapshot parts whose client left, or had no room for too long.
    replies_unsent: int = 0
    # Connections whose key the file of clients does not list.
    clients_refused: int = 0
