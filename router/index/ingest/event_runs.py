# SPDX-License-Identifier: Apache-2.0
"""Batches of plain events read as runs: one object for all events that differ only in their blocks. Pure.

An engine's events have a handful of shapes. With one block per event, creating an object for each event costs more than
everything else that is done with it.
"""

from __future__ import annotations

import msgspec

from kvrouter.events.vllm.codec import read_event
from kvrouter.events.vllm.messages import BlockRemoved, BlockStored, Event, HashArray
from kvrouter.router.index.ingest.batch_scan import scan

# Remembered shapes; an engine has some ten. Remembering a shape only saves decoding one of its events in each batch.
MAX_SHAPES = 1_024


class EventRun(msgspec.Struct, frozen=True, gc=False, eq=False):
    """Stored or removed events of one place."""

    # The fields that all events share, without hashes, parent and names.
    event: BlockStored | BlockRemoved
    # The hashes of all events, in order.
    hashes: HashArray
    # The number of events.
    count: int
    # The first hash of each event that stores blocks without a parent.
    roots: HashArray
    # Whether one of the events has several blocks.
    several: bool


class RunBatch(msgspec.Struct, frozen=True, gc=False, eq=False):
    """One `EventBatch` of which every event could be read, or several consecutive ones, joined."""

    dp_rank: int | None
    # The number of batches.
    batches: int
    # Events of other kinds stand alone, in their place.
    runs: list[EventRun | Event]


class RunReader:
    """A reader of batches as runs, one for each stream. It remembers shapes and nothing else."""

    def __init__(self) -> None:
        self._shapes: dict[bytes, BlockStored | BlockRemoved] = {}

    def read(self, payloads: list[bytes]) -> RunBatch | None:
        """Return the first batches, all of one rank, as runs, or None to leave the first one to `BatchDecoder`."""
        if len(self._shapes) > MAX_SHAPES:
            self._shapes.clear()
        scanned = scan(payloads, self._shapes, read_event)
        if scanned is None:
            return None
        rank, batches, runs = scanned
        return RunBatch(rank, batches, [EventRun(*run) if isinstance(run, tuple) else run for run in runs])
