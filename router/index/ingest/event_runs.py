# SPDX-License-Identifier: Apache-2.0
"""Batches of plain events as runs: one object for all events that say the same of other blocks. Pure.

An engine's events have a handful of shapes, and at one block an event an object each costs more than all else that is
done with them."""

from __future__ import annotations

import msgspec

from kvrouter.events.vllm.codec import read_event
from kvrouter.events.vllm.messages import BlockRemoved, BlockStored, Event, HashArray
from kvrouter.router.index.ingest.batch_scan import scan

# Shapes that are remembered; an engine has some ten. Only spares decoding an event of each batch.
MAX_SHAPES = 1_024


class EventRun(msgspec.Struct, frozen=True, gc=False, eq=False):
    """Stored or removed events of one place.

    event: what they have in common, without hashes, parent and names. hashes: of all, in order. count: of events.
    roots: the first hash of each that stores blocks without a parent."""

    event: BlockStored | BlockRemoved
    hashes: HashArray
    count: int
    roots: HashArray


class RunBatch(msgspec.Struct, frozen=True, gc=False, eq=False):
    """An `EventBatch` of which every event could be read. Events of other kinds stand alone, in their place."""

    dp_rank: int | None
    runs: list[EventRun | Event]


class RunReader:
    """Reads batches as runs. Remembers shapes, and nothing else; use one for each stream."""

    def __init__(self) -> None:
        self._shapes: dict[bytes, BlockStored | BlockRemoved] = {}

    def read(self, payload: bytes) -> RunBatch | None:
        """None: it is left to `BatchDecoder`."""
        if len(self._shapes) > MAX_SHAPES:
            self._shapes.clear()
        found = scan(payload, self._shapes, read_event)
        if found is None:
            return None
        rank, runs = found
        return RunBatch(rank, [EventRun(*run) if isinstance(run, tuple) else run for run in runs])
