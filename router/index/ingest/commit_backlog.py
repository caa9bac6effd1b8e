# SPDX-License-Identifier: Apache-2.0
"""The changes of one worker that the store does not have yet, merged into one commit. Pure.

Invariant: committing the result of `take` has the same effect as committing every flush since the last `take`, one by
one. A backlog that overflowed holds nothing; only a flush that opens an epoch can fill it again, because such a flush
needs nothing before it.
"""

from __future__ import annotations

from kvrouter.router.base.common.ids import Place
from kvrouter.router.index.ingest.net_changes import NetChanges, ResidencyDelta
from kvrouter.router.index.ingest.pending_commit import PendingCommit


class CommitBacklog:
    """The flushes of one worker that wait for the store, merged in order."""

    def __init__(self, max_blocks: int) -> None:
        """Create an empty backlog, which is full above `max_blocks` waiting transitions."""
        self._max_blocks = max_blocks
        self._epoch: str | None = None
        self._opens_epoch = False
        self._seqs: tuple[int, int] | None = None
        self._places: dict[Place, NetChanges] = {}
        self._copies: dict[tuple[Place, int], int] = {}
        self._meta: dict[str, bytes] = {}
        self._overflowed = False

    @property
    def is_empty(self) -> bool:
        """Whether no flush waits. An overflowed backlog is not empty, because its epoch must be written again."""
        return self._epoch is None and not self._overflowed

    @property
    def overflowed(self) -> bool:
        """Whether the waiting flushes were dropped and no flush has opened an epoch since."""
        return self._overflowed

    @property
    def blocks(self) -> int:
        """Number of waiting transitions and copy counts."""
        return sum(transitions.count for transitions in self._places.values()) + len(self._copies)

    @property
    def is_full(self) -> bool:
        """Whether more transitions wait than `max_blocks` allows."""
        return self.blocks > self._max_blocks

    def add(self, flush: PendingCommit) -> None:
        """Merge the worker's next flush; an overflowed backlog ignores it unless it opens an epoch."""
        if flush.opens_epoch:
            self._clear()
            self._overflowed = False
            self._opens_epoch = True
        if self._overflowed:
            return
        self._epoch = flush.epoch
        if flush.seqs is not None:
            first, last = flush.seqs
            self._seqs = (first if self._seqs is None else self._seqs[0], last)
        for change in flush.changes:
            transitions = self._places.get(change.place)
            if transitions is None:
                transitions = self._places[change.place] = NetChanges()
            transitions.left(change.removed)
            transitions.arrived(change.added)
        self._copies.update(((place, block_hash), count) for place, block_hash, count in flush.copies)
        self._meta |= flush.meta

    def overflow(self) -> None:
        """Drop the waiting flushes, so that the store can only continue with a new epoch."""
        self._clear()
        self._overflowed = True

    def continues(self, epoch: str | None, seq: int | None) -> bool:
        """Return whether the waiting flushes can be committed after (epoch, seq). The backlog must not be empty."""
        if self._opens_epoch:
            return True
        return self._seqs is not None and (self._epoch, self._seqs[0] - 1) == (epoch, seq)

    def take(self) -> PendingCommit | None:
        """Remove all waiting flushes and return them as one, or return None if none waits."""
        if self._epoch is None:
            return None
        changes = []
        for place, transitions in self._places.items():
            added, removed = transitions.net()
            if len(added) or len(removed):
                changes.append(ResidencyDelta(place, added, removed))
        copies = [(place, block_hash, count) for (place, block_hash), count in self._copies.items()]
        flush = PendingCommit(self._epoch, self._opens_epoch, self._seqs, changes, copies, self._meta)
        self._clear()
        return flush

    def _clear(self) -> None:
        self._epoch, self._opens_epoch, self._seqs = None, False, None
        self._places, self._copies, self._meta = {}, {}, {}
