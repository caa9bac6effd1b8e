# SPDX-License-Identifier: Apache-2.0
"""The workers that this process follows, as its heartbeat reports them to the other routers. Pure."""

from __future__ import annotations

import msgspec


class Holding(msgspec.Struct):
    """A lease of this process, and the number of the last log entry of its worker that is known to be in the store."""

    lease: int
    commits: int


class HeldWorkers:
    """The leases of one process, and its changes that wait for the store. Workers are named by `keys.worker_tag`.

    `LeaseHolder` and `CommitLoop` of each worker keep it up to date."""

    def __init__(self) -> None:
        self.holdings: dict[str, Holding] = {}
        # Workers for which the last attempt to write to the store failed.
        self.refused: set[str] = set()
        # For each worker with changes that the store lacks, the time of the oldest, by this process's clock.
        self.unwritten_since_s: dict[str, float] = {}
        # For each worker with items of its stream in hand, when they were received.
        self.unapplied_since_s: dict[str, float] = {}

    def waits_s(self, tag: str, now_s: float) -> float:
        """Return the age of the oldest news of a worker that the store lacks, 0 if it lacks none."""
        waits = (self.unwritten_since_s, self.unapplied_since_s)
        return max((max(0.0, now_s - since_s[tag]) for since_s in waits if tag in since_s), default=0.0)
