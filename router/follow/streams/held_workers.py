# SPDX-License-Identifier: Apache-2.0
"""The workers that this process follows, for the heartbeat that reports them to the other routers. Pure."""

from __future__ import annotations

import msgspec


class HeldLease(msgspec.Struct):
    """A lease of this process, and how much of its worker's log is in the store."""

    # The number of the lease.
    lease: int
    # The number of the worker's last log entry that is known to be in the store.
    commits: int


class HeldWorkers:
    """The leases of one process, and its changes that wait for the store.

    Workers are named by `keys.worker_tag`. The `Lease` and the `Commits` of each worker keep the tables up to
    date.
    """

    def __init__(self) -> None:
        self.holdings: dict[str, HeldLease] = {}
        # Workers for which the last attempt to write to the store failed.
        self.refused: set[str] = set()
        # For each worker with changes that the store lacks, the time of the oldest, by this process's clock.
        self.unwritten_since_s: dict[str, float] = {}
        # For each worker with received stream items that are not applied yet, when they were received.
        self.unapplied_since_s: dict[str, float] = {}

    def waits_s(self, tag: str, now_s: float) -> float:
        """Return the age in seconds of a worker's oldest change that the store lacks, 0 if it lacks none."""
        waits = (self.unwritten_since_s, self.unapplied_since_s)
        return max((max(0.0, now_s - since_s[tag]) for since_s in waits if tag in since_s), default=0.0)
