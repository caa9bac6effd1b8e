# SPDX-License-Identifier: Apache-2.0
"""The lead of a worker's mirror by the process that follows it. Pure.

The worker's changes go into the process's own mirror at once, and into the store later.

Invariant: after `draw` the mirror shows exactly what the worker holds, whatever the store does. The content of the
store with the backlog applied is the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from kvrouter.router.base.common.ids import Place, WorkerKey
from kvrouter.router.index.ingest.commit_backlog import CommitBacklog
from kvrouter.router.index.ingest.net_changes import Hashes, ResidencyDelta
from kvrouter.router.index.ingest.pending_commit import PendingCommit
from kvrouter.router.index.ingest.worker_epoch import WorkerEpoch

# Transitions that may wait for the store. If more wait and the store is slow, the socket is left unread for
# BACKPRESSURE_S (ZMQ buffers, and later the publisher drops, which is a gap). If more wait and the store is away, they
# are dropped, and everything that the worker holds is written when the store is back. The waiting transitions become one
# commit, which every other router applies at once, in some milliseconds. With a bound of a million, one worker that
# published as fast as it could held up everybody's answers for a second.
MAX_PENDING_BLOCKS = 65_536


class MirrorSource(Protocol):
    """The mirror as the follower of a worker uses it.

    A protocol, because the component that writes the mirror (`fleet/mirror_sync.py`) is in a later room: it reads the
    workers' states.

    Invariant: a worker's part of the mirror is written either by the worker's leader or from its log in the store.
    """

    async def lead(self, worker: WorkerKey) -> None:
        """Stop reading the worker's log; from now on the caller writes the worker's part of the mirror."""

    async def follow_log(self, worker: WorkerKey) -> None:
        """End the lead: load the worker from the store, and follow its log from there. Raises StoreError."""

    def begin_epoch(self, worker: WorkerKey, epoch: str) -> None:
        """Void a led worker's blocks in the mirror, and begin an empty epoch."""

    def load(self, worker: WorkerKey, epoch: str, places: Mapping[Place, Hashes]) -> None:
        """Begin an epoch of a led worker with the blocks that it holds already."""

    def rename_epoch(self, worker: WorkerKey, epoch: str) -> None:
        """Rename the epoch of a worker that the caller leads, and keep its blocks."""

    def change(self, worker: WorkerKey, changes: Sequence[ResidencyDelta]) -> None:
        """Apply changes of a led worker's residency."""


class MirrorLead:
    """The path of one worker's changes into the mirror and the store, while this process writes its part of the mirror."""

    def __init__(self, worker: WorkerKey, mirror: MirrorSource) -> None:
        """Begin with an empty backlog.

        Args:
            worker: The worker.
            mirror: The mirror, which the caller must lead for this worker.
        """
        self._worker = worker
        self._mirror = mirror
        self.backlog = CommitBacklog(MAX_PENDING_BLOCKS)

    def show_all(self, held: WorkerEpoch) -> dict[Place, Hashes]:
        """Replace the worker's part of the mirror by the blocks that it holds now, and return these by place."""
        places = {place: held.blocks.hashes(place) for place in held.blocks.places}
        self._mirror.load(self._worker, held.epoch, places)
        return places

    def draw(self, held: WorkerEpoch) -> PendingCommit | None:
        """Apply the worker's new changes to the mirror and the backlog, and return them; None if there are none."""
        flush = held.take()
        if flush is not None:
            if flush.opens_epoch:
                self._mirror.begin_epoch(self._worker, flush.epoch)
            self._mirror.change(self._worker, flush.changes)
            self.backlog.add(flush)
        return flush

    def take(self, held: WorkerEpoch) -> PendingCommit | None:
        """Return the next commit for the store, or None if there is nothing to write.

        Call `draw` before, so that nothing is left to draw.
        """
        if self.backlog.overflowed:
            held.rewrite_epoch()
            # The mirror holds all blocks already.
            self._mirror.rename_epoch(self._worker, held.epoch)
            if (flush := held.take()) is not None:
                self.backlog.add(flush)
        return self.backlog.take()

    def residents(self, held: WorkerEpoch) -> dict[Place, Hashes] | None:
        """Return everything that the store holds once it has the last commit of `take`.

        Returns None if more changes wait, because then the blocks in memory are ahead of the store.
        """
        if held.has_news or not self.backlog.is_empty:
            return None
        return {place: held.blocks.hashes(place) for place in held.blocks.places}

    def continues(self, held: WorkerEpoch, epoch: str | None, seq: int | None) -> bool:
        """Return whether the next commit can follow the (epoch, seq) that the store has."""
        return (held if self.backlog.is_empty else self.backlog).continues(epoch, seq)
