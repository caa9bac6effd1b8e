# SPDX-License-Identifier: Apache-2.0
"""The blocks that one worker holds since nothing was missed, their seqs, and the changes that wait for a flush. Pure.

Invariant: the flushes that `take` returned so far, applied in order, are what the worker's feed reported. A doubt that
cannot be settled begins a new, empty epoch.
"""

from __future__ import annotations

from collections.abc import Callable

from kvrouter.router.index.ingest.pending_commit import PendingCommit
from kvrouter.router.index.ingest.residency import Residency
from kvrouter.router.index.ingest.worker_profile import WorkerProfile


class WorkerEpoch:
    """The open epoch of one worker, `profile`. Everything up to `seq` is in `blocks`."""

    def __init__(self, profile: WorkerProfile, new_epoch: Callable[[], str]) -> None:
        self.profile = profile
        self._new_epoch = new_epoch
        self.epoch = new_epoch()
        self._opens_epoch = True
        self.seq: int | None = None
        # The first seq of the batches that no flush has taken yet, None if there are none.
        self._first_seq: int | None = None
        self.blocks = Residency()

    def advance(self, first_seq: int, last_seq: int) -> None:
        """Note that the batches from `first_seq` to `last_seq`, and all before them, were applied."""
        self.profile.tally.refused = self.blocks.refused_blocks
        if self._first_seq is None:
            self._first_seq = first_seq
        self.seq = last_seq

    def can_jump(self, seq: int) -> bool:
        """Return whether `jump` to `seq` continues this epoch."""
        return self.seq is not None and (seq > self.seq or (seq == self.seq and self._first_seq is not None))

    def jump(self, seq: int) -> None:
        """Note that everything up to `seq` was applied without having come as batches."""
        if self._first_seq is None:
            self._first_seq = seq if self.seq is None else self.seq + 1
        self.seq = seq

    def continue_from(self, epoch: str, seq: int) -> None:
        """Continue `epoch`, of which Redis has everything up to `seq` and `blocks` has the same blocks."""
        self.epoch, self.seq, self._opens_epoch = epoch, seq, False

    def void(self, incident: str) -> None:
        """Begin a new epoch, in which the blocks held so far no longer count."""
        contact = self.profile.contact
        self.epoch, self._opens_epoch = self._new_epoch(), True
        self.blocks.forget()
        self.seq = self._first_seq = None
        self.profile.rewrite()
        contact.unproven = contact.same_life = contact.missing = contact.incomplete = False
        contact.next_seq_s = None
        self.profile.report(incident)

    def void_life(self, incident: str) -> None:
        """Begin a new epoch because another life of the engine may have begun, and forget all that was learned."""
        self.void(incident)
        self.profile.contact.process_start_s = self.profile.contact.reported_start_s = None
        self.profile.forget_learned()

    def rewrite_epoch(self) -> None:
        """Make the next flush write to Redis, as a new epoch, all blocks that the worker holds.

        Use it where Redis has lost the worker's epoch, or has a state of it that is too old to continue from.
        """
        self.epoch, self._opens_epoch = self._new_epoch(), True
        self._first_seq = self.seq
        self.profile.rewrite()
        self.blocks.mark_all_pending()

    def continues(self, epoch: str | None, seq: int | None) -> bool:
        """Return whether the next flush, if there is one, continues what Redis has, up to `seq` of `epoch`."""
        flushed = self.seq if self._first_seq is None else self._first_seq - 1
        return not self._opens_epoch and (self.epoch, flushed) == (epoch, seq)

    @property
    def has_news(self) -> bool:
        """Whether a flush would change anything in Redis."""
        return self._first_seq is not None or self._opens_epoch

    def take(self) -> PendingCommit | None:
        """Return the net changes since the last call, or None if the stream brought nothing."""
        if not self.has_news:
            return None
        flush = PendingCommit(
            epoch=self.epoch,
            opens_epoch=self._opens_epoch,
            seqs=None if self._first_seq is None or self.seq is None else (self._first_seq, self.seq),
            changes=self.blocks.take_changes(),
            copies=self.blocks.take_copies(),
            meta=self.profile.dump(),
        )
        self._opens_epoch, self._first_seq = False, None
        return flush
