# SPDX-License-Identifier: Apache-2.0
"""What is counted of one worker's events."""

from __future__ import annotations

import msgspec


class IngestCounters(msgspec.Struct):
    """Counters of one worker since this process began to follow it."""

    batches: int = 0
    events: int = 0
    blocks: int = 0
    broken: int = 0
    unknown: int = 0
    malformed: int = 0
    # Connections that were closed because of what they brought.
    floods: int = 0
    gaps: int = 0
    missed_batches: int = 0
    restarts: int = 0
    # Times that the engine's HTTP was lost.
    losses: int = 0
    heartbeats: int = 0
    mismatches: int = 0
    # Ways back to what the engine holds: batches replayed, a snapshot, or everything learned again.
    replays: int = 0
    snapshots: int = 0
    relearned: int = 0
    # The same in the worker's life before.
    resyncs_before: int = 0
    # Times that the engine dropped a whole cache.
    clears: int = 0
    # Blocks that were held when a snapshot of the same life showed that they are not there, and the other way round.
    ghost_blocks: int = 0
    lost_blocks: int = 0
    # Blocks that the worker's own bounds left no room for: they earn no credit.
    refused: int = 0
    # Batches that name another data-parallel rank.
    foreign: int = 0

    @property
    def resyncs(self) -> int:
        """In the worker's whole life."""
        return self.resyncs_before + self.replays + self.snapshots + self.relearned
