# SPDX-License-Identifier: Apache-2.0
"""What one worker holds, as the process that follows it knows: into its own mirror at once, into the store behind that.
Pure.

Invariant: after `draw` the mirror shows exactly what the worker holds, whatever the store does; and what the store has,
with the backlog applied, is the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from kvrouter.router.base.common.ids import Place, WorkerKey
from kvrouter.router.index.ingest.commit_backlog import CommitBacklog
from kvrouter.router.index.ingest.net_changes import Hashes, ResidencyDelta
from kvrouter.router.index.ingest.pending_commit import PendingCommit
from kvrouter.router.index.ingest.worker_epoch import WorkerEpoch


class MirrorSource(Protocol):
    """The mirror, for whoever follows a worker: it is written by its leader, or from its log in the store, never by
    both."""

    async def lead(self, worker: WorkerKey) -> None:
        """From now on the caller writes what the mirror shows of the worker, and its log is not read."""

    async def follow_log(self, worker: WorkerKey) -> None:
        """End the lead: load the worker from the store, and follow its log from there. Raises StoreError."""

    def begin_epoch(self, worker: WorkerKey, epoch: str) -> None:
        """Void what the mirror shows. Of a led worker only, as the three below."""

    def load(self, worker: WorkerKey, epoch: str, places: Mapping[Place, Hashes]) -> None:
        """Make the mirror show an epoch with what the worker holds already."""

    def rename_epoch(self, worker: WorkerKey, epoch: str) -> None: ...

    def change(self, worker: WorkerKey, changes: Sequence[ResidencyDelta]) -> None: ...


class MirrorLead:
    """One worker's, for as long as this process leads its mirror."""

    def __init__(self, worker: WorkerKey, mirror: MirrorSource, *, max_blocks: int) -> None:
        """max_blocks: transitions that may wait for the store."""
        self._worker = worker
        self._mirror = mirror
        self.backlog = CommitBacklog(max_blocks)

    def show_all(self, held: WorkerEpoch) -> dict[Place, Hashes]:
        """Make the mirror what the worker holds now, whatever it showed; returns that."""
        places = {place: held.blocks.hashes(place) for place in held.blocks.places}
        self._mirror.load(self._worker, held.epoch, places)
        return places

    def draw(self, held: WorkerEpoch) -> PendingCommit | None:
        """Bring the mirror up to what the worker holds; returns what was new."""
        flush = held.take()
        if flush is not None:
            if flush.opens_epoch:
                self._mirror.begin_epoch(self._worker, flush.epoch)
            self._mirror.change(self._worker, flush.changes)
            self.backlog.add(flush)
        return flush

    def take(self, held: WorkerEpoch) -> PendingCommit | None:
        """The next commit, None when there is nothing to write. Call it with nothing left to draw."""
        if self.backlog.overflowed:
            held.rewrite_epoch()
            # The mirror holds all of it already.
            self._mirror.rename_epoch(self._worker, held.epoch)
            if (flush := held.take()) is not None:
                self.backlog.add(flush)
        return self.backlog.take()

    def residents(self, held: WorkerEpoch) -> dict[Place, Hashes] | None:
        """All that the store holds when it has what `take` returned; None: something waits, so memory is ahead."""
        if held.has_news or not self.backlog.is_empty:
            return None
        return {place: held.blocks.hashes(place) for place in held.blocks.places}

    def continues(self, held: WorkerEpoch, epoch: str | None, seq: int | None) -> bool:
        """Whether the next commit can follow what (epoch, seq) in the store stands for."""
        return (held if self.backlog.is_empty else self.backlog).continues(epoch, seq)
