# SPDX-License-Identifier: Apache-2.0
"""Counters of one worker's events."""

from __future__ import annotations

import msgspec


class IngestCounters(msgspec.Struct):
    """Counters of one worker since this process began to follow it."""

    batches: int = 0
    events: int = 0
    blocks: int = 0
    # Batches and events that could not be decoded.
    broken: int = 0
    # Events of an unknown type.
    unknown: int = 0
    # Messages that were not of the form of a batch.
    malformed: int = 0
    # Connections that were closed because more came over them than the limits of `flood_watch.py` allow.
    floods: int = 0
    gaps: int = 0
    missed_batches: int = 0
    restarts: int = 0
    # Times that the engine no longer answered over HTTP.
    losses: int = 0
    # Heartbeats of the engine's patch, and those that contradicted the blocks held.
    heartbeats: int = 0
    mismatches: int = 0
    # Resyncs with the engine, by method: missing batches replayed, a snapshot loaded, or everything learned again.
    replays: int = 0
    snapshots: int = 0
    relearned: int = 0
    # Resyncs of the worker before this process followed it.
    resyncs_before: int = 0
    # Times that the engine dropped a whole cache.
    clears: int = 0
    # Blocks held that a snapshot of the same life did not have, and blocks of the snapshot that were not held.
    ghost_blocks: int = 0
    lost_blocks: int = 0
    # Blocks refused because one worker had more blocks or places than `residency.py` allows. They never count as hits.
    refused: int = 0
    # Batches that name another data-parallel rank.
    foreign: int = 0

    @property
    def resyncs(self) -> int:
        """Resyncs in the worker's whole life."""
        return self.resyncs_before + self.replays + self.snapshots + self.relearned
