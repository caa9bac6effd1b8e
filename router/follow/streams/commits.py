# SPDX-License-Identifier: Apache-2.0
"""The loop that writes one worker's changes into the store.

This module decides when changes are written, and handles a store that is slow or away.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from kvrouter.router.base.common.event_wait import set_within
from kvrouter.router.base.common.ids import Place
from kvrouter.router.base.redis_client.errors import StoreError
from kvrouter.router.follow.streams.lease import Lease, LeaseLost
from kvrouter.router.follow.streams.mirror_lead import MAX_PENDING_BLOCKS, MirrorLead
from kvrouter.router.follow.streams.peer_view import META_STATE_LEASE, META_STATE_WRITER
from kvrouter.router.follow.streams.stream_services import StreamServices
from kvrouter.router.follow.streams.worker_state import WorkerState
from kvrouter.router.index.ingest.net_changes import Hashes
from kvrouter.router.index.ingest.pending_commit import PendingCommit
from kvrouter.router.index.store.checkpoint import LogTail
from kvrouter.router.index.store.commit import LeaseValue

log = logging.getLogger("kvrouter.stream")

T = TypeVar("T")

# How long the socket may be left unread. Meanwhile this process answers from older data.
BACKPRESSURE_S = 1.0

# How long one worker's items are applied before everything else gets its turn.
TURN_S = 0.002

# How long to wait for the last commit when a worker is given up; it takes some milliseconds. A store that hangs is not
# waited for longer, because the operator who stops the router waits too.
LAST_COMMIT_S = 1.0

# A worker that changes nothing for about this time gets a checkpoint, so that a reader of Redis finds its state whole.
# With a much shorter time, a worker that changes something every few seconds would have all of its blocks written as
# often.
QUIET_S = 60.0


class Commits:
    """The commits of one worker, while this process leads the worker's mirror."""

    def __init__(self, state: WorkerState, lease: Lease, services: StreamServices) -> None:
        self._state = state
        self._lease = lease
        self._services = services
        # The last commit that was sent to the store, None once its outcome is known.
        self.sending: PendingCommit | None = None
        # Varied by half to either side, because a thousand workers may fall quiet at once.
        self._quiet_s = QUIET_S * services.rng.uniform(0.5, 1.5)
        # The entries of the store's log after the checkpoint.
        self.tail = LogTail()
        # The state as last written for the other processes.
        self._written_state: dict[str, bytes] = {}

    @property
    def unwritten_s(self) -> float:
        """The age in seconds of the oldest change that the store lacks, 0 if it lacks none."""
        return self._services.held.waits_s(self._state.tag, self._services.clock())

    @property
    def unwritten_blocks(self) -> int:
        """The number of transitions that wait for the store."""
        return 0 if self._state.lead is None else self._state.lead.backlog.blocks

    @property
    def _lead(self) -> MirrorLead:
        assert self._state.lead is not None
        return self._state.lead

    def begin_lead(self) -> None:
        """Forget which state was written last, because another process may have written since."""
        self._written_state = {}

    def end_lead(self) -> None:
        """Forget the waiting time and the log's tail, because another process writes from now on."""
        self._services.held.unwritten_since_s.pop(self._state.tag, None)
        self.tail.clear()

    def go_on(self) -> None:
        """Continue with the blocks in memory under a new lease; write all of them if the store lacks some."""
        if not self._lead.continues(self._state.ingest.held, *self._lease.written):
            log.warning("index in Redis rewritten from memory", extra={"worker": self._state.worker})
            self.rewrite()

    def rewrite(self) -> None:
        """Drop the waiting changes and have everything that the worker holds written as a new epoch."""
        self._services.metrics.rewrites(self._state.worker).inc()
        self._lead.backlog.overflow()

    def wake(self) -> None:
        """Schedule a write if the store lacks anything."""
        lead = self._state.lead
        waits = lead is not None and not lead.backlog.is_empty
        if waits or self._state_fields() != self._written_state:
            self._state.schedule_write()

    def _state_fields(self) -> dict[str, bytes]:
        """Return the state that other processes should show, with the lease that it belongs to."""
        lease = LeaseValue(self._services.token, self._lease.number)
        return self._state.state_fields() | {META_STATE_LEASE: b"%d" % lease.number, META_STATE_WRITER: lease.value}

    async def take_in(self, items: Sequence[T], apply: Callable[[deque[T], float], None]) -> None:
        """Apply the items in turns, publish their effect after each turn, and wait for the store if it lacks too much.

        Args:
            items: Items of the worker's stream, all received now.
            apply: Applies the next item or items and takes them from the queue. Called with the queue and the time at which
                its items were received.
        """
        received_s = self._services.clock()
        left = deque(items)
        unapplied_since_s = self._services.held.unapplied_since_s
        # A busy process applies items some time after it received them, and vouches only for what it has applied.
        unapplied_since_s[self._state.tag] = received_s
        try:
            await self._take_in_turns(left, received_s, apply)
        finally:
            del unapplied_since_s[self._state.tag]

    async def _take_in_turns(self, left: deque[T], received_s: float, apply: Callable[[deque[T], float], None]) -> None:
        turns, clock = self._services.turns, self._services.clock
        while left:
            await turns.wait()
            begun_s = clock()
            try:
                self._apply_some(left, received_s, apply, begun_s + TURN_S)
                self.wake()
            finally:
                turns.spend(clock() - begun_s)
            await self._wait_for_store()

    def _apply_some(
        self, left: deque[T], received_s: float, apply: Callable[[deque[T], float], None], until_s: float
    ) -> None:
        state, clock = self._state, self._services.clock
        room_blocks = MAX_PENDING_BLOCKS - self.unwritten_blocks
        try:
            while left and clock() < until_s:
                apply(left, received_s)
                if state.ingest.held.blocks.pending_blocks > room_blocks:
                    break
        finally:
            # Even after an error, what was applied must not stay behind what is credited.
            state.on_items(received_s)

    async def _wait_for_store(self) -> None:
        """Wait while the backlog is full; rewrite the epoch if the store is away or takes longer than BACKPRESSURE_S."""
        drained, backlog = self._state.drained, self._lead.backlog
        give_up_s = self._services.clock() + BACKPRESSURE_S
        while backlog.is_full:
            if self._lease.away or self._services.clock() > give_up_s:
                self.rewrite()
                return
            drained.clear()
            await set_within(drained, BACKPRESSURE_S)

    async def run(self) -> None:
        """Write to the store whatever it lacks, until cancelled. Raises LeaseLost."""
        dirty, clock, unwritten = self._state.dirty, self._services.clock, self._services.held.unwritten_since_s
        while True:
            # If nothing came for so long, a checkpoint is due.
            if not await set_within(dirty, self._quiet_s if self.tail.blocks else None):
                await self._write_checkpoint(self._residents())
                continue
            dirty.clear()
            unwritten.setdefault(self._state.tag, clock())
            await asyncio.sleep(self._services.config.flush_interval_s)
            taken_s = clock()
            await self._write()
            if dirty.is_set():
                unwritten[self._state.tag] = taken_s
            else:
                unwritten.pop(self._state.tag, None)

    async def write_rest(self) -> None:
        """Try to write the remaining changes of a worker that this process gives up.

        The next follower may have no replay to learn it from. A failure is logged.
        """
        if self._lease.away or not self._lease.held:
            return
        try:
            async with asyncio.timeout(LAST_COMMIT_S):
                await self._write()
        except (LeaseLost, StoreError, TimeoutError) as error:
            log.warning(
                "last changes not written to Redis",
                extra={"worker": self._state.worker, "reason": str(error) or "Redis does not answer"},
            )

    async def _write(self) -> None:
        """Write everything that the store lacks now, and a checkpoint if the log after the last one is long."""
        if self.sending is not None:
            # The last write was cut off, by a change of the worker's stream or its end, so whether the store has the commit is
            # not known.
            await self._send(self.sending)
        flush, state = self._next_commit(), self._state_fields()
        # Only a write can show that a store that was away works again, so even an idle worker then writes its state.
        is_state_due = state != self._written_state or self._lease.away
        self._measure_tail(flush, noted=is_state_due)
        residents = self._residents() if self.tail.is_long(self._state.ingest.held.blocks.blocks) else None
        self._state.drained.set()
        if flush is not None:
            if flush.opens_epoch or state != self._written_state:
                flush = msgspec.structs.replace(flush, meta=flush.meta | state)
            await self._send(flush)
        elif is_state_due:
            await self._lease.note(self._state.ingest.held.epoch, state)
        self._written_state = state
        await self._write_checkpoint(residents)

    async def _send(self, flush: PendingCommit) -> None:
        self.sending = flush
        await self._lease.write(flush)
        self.sending = None

    def _measure_tail(self, flush: PendingCommit | None, *, noted: bool) -> None:
        """Count the log entry that the next write adds.

        Args:
            flush: The next commit; None if there is none.
            noted: Whether the state changed, which takes an entry even without a commit.
        """
        if flush is None:
            if noted:
                self.tail.add(())
            return
        if flush.opens_epoch:
            self.tail.clear()
        if flush.seqs is not None:
            self.tail.add(flush.changes)

    def _residents(self) -> dict[Place, Hashes] | None:
        """Return the blocks that the store will hold once it has the last taken commit, or None if that is not known."""
        held = self._state.ingest.held
        return None if held.seq is None else self._lead.residents(held)

    async def _write_checkpoint(self, residents: dict[Place, Hashes] | None) -> None:
        if residents is not None:
            await self._lease.checkpoint(residents)
            self.tail.clear()

    def _next_commit(self) -> PendingCommit | None:
        """Take the next commit from the backlog, or None if the store lacks no blocks."""
        flush = self._lead.take(self._state.ingest.held)
        if flush is not None and flush.epoch != self._state.shown.epoch:
            self._state.on_epoch_renamed(flush.epoch)
        return flush
