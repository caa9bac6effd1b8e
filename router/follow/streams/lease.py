# SPDX-License-Identifier: Apache-2.0
"""One worker's lease in this process, and the commits made under it.

A commit counts only under the lease that the store has now. A process that stood still while another process took the
worker therefore changes nothing when it continues. If the store lost the lease, it is taken again in place, provided
that no other process had it since and nothing else was lost. Otherwise LeaseLost is raised, and the worker's follower
begins again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

from kvrouter.router.base.common.ids import Place, WorkerKey
from kvrouter.router.base.redis_client.errors import StoredValueError, StoreError
from kvrouter.router.follow.streams.held_workers import HeldLease
from kvrouter.router.follow.streams.lease_rounds import LOOKS_PER_TTL
from kvrouter.router.follow.streams.stream_metrics import FAILED
from kvrouter.router.follow.streams.stream_services import StreamServices
from kvrouter.router.index.ingest.net_changes import Hashes
from kvrouter.router.index.ingest.pending_commit import PendingCommit
from kvrouter.router.index.store import keys
from kvrouter.router.index.store.checkpoint import Checkpoint
from kvrouter.router.index.store.commit import Commit, CommitOutcome, Head, LeaseValue
from kvrouter.router.index.store.leases import LeaseLook

log = logging.getLogger("kvrouter.lease")

# The pause between tries while the store does not answer, doubled from the first to the last.
RETRY_FIRST_S = 0.05
RETRY_LAST_S = 1.0

ELSEWHERE = "another router process follows this worker; its answers are shown as they come from Redis"

# The (epoch, seq) of the last commit.
Written = tuple[str | None, int | None]


class LeaseLost(Exception):
    """The loss of the lease or of the continuity with Redis: this process must not go on committing for the worker."""


class HandedOver(LeaseLost):
    """The planned loss of a lease, because another process should follow the worker and can."""


def _never() -> bool:
    return False


class Lease:
    """The lease on one worker, for one event loop. `keep` and `write` may run concurrently.

    It keeps both the lease and the position of the last write, because every reply of the store is judged by
    both.
    """

    def __init__(
        self,
        worker: WorkerKey,
        services: StreamServices,
        changed: Callable[[str | None], None],
    ) -> None:
        """Begin without a lease.

        Args:
            worker: The worker.
            services: The services that all streams of the process share.
            changed: Called with `problem` when it appeared or ended, and when the lease was taken again.
        """
        self._worker = worker
        self._services = services
        self._store = services.store
        self._rounds = services.leases
        self._held = services.held
        self._metrics = services.metrics
        self._tag = keys.worker_tag(worker)
        self._store_look = LeaseLook.of(worker)
        # The value of another router's lease, and when it was first seen.
        self._other: tuple[bytes, float] | None = None
        self._changed = changed
        self._value: LeaseValue | None = None
        # The number of this process's lease, or of its last one; 0 if it never had one.
        self.number = 0
        # Whether the loss of the lease is counted. `keep` and `write` may both find it, the second after taking the lease again.
        self._is_lost = False
        # Whether another process had the lease just before this process's last number.
        self._interrupted = False
        # The last position that this process wrote and the store confirmed.
        self.written: Written = (None, None)
        # The position that the store may have instead, because the connection was lost during the write.
        self._unsure: Written | None = None
        # Serializes writes and checks of the lease, which would otherwise see each other half done.
        self._lock = asyncio.Lock()
        # Wakes `take` and `keep`: the worker should change hands, or its lease is in doubt.
        self._called = asyncio.Event()
        self._movable: Callable[[], bool] = _never
        # The last fields of `meta` that were judged to be right, with the position and entry written at that time.
        self._confirmed: tuple[Written, int, list[bytes | None]] | None = None
        # Why the store takes no writes now, None while it takes them.
        self.problem: str | None = None

    @property
    def held(self) -> bool:
        """Whether this process has the lease."""
        return self._value is not None

    @property
    def wanted(self) -> bool:
        """Whether this process should follow the worker."""
        return self._services.mine(self._worker)

    @property
    def away(self) -> bool:
        """Whether the last try to reach the store, or to write to it, failed."""
        return self.problem is not None

    async def take(self) -> bool:
        """Wait for the lease; return whether no other process had it since this one did, as far as the store knows."""
        # The caller may have failed to load what it needs after an earlier take.
        self._end()
        self._rounds.join(self)
        try:
            lease, head = await self._take()
        finally:
            self._rounds.leave(self)
        alone = head.lease <= self.number and self.number > 0 and not self._interrupted
        self._interrupted = self._is_lost = False
        self._have(lease, head)
        self._say(None)
        self._wrote(await self._stored(head))
        return alone

    async def _stored(self, head: Head) -> Written:
        """Return the (epoch, seq) that the store has.

        Args:
            head: The head of `meta` before the lease was taken. Taking the lease may have mended an unreadable head.
        """
        return head.written if head.problem is None else await self._store.committed(self._worker)

    def _have(self, lease: LeaseValue, head: Head) -> None:
        """Note that this process has `lease` now. `head` is the head of `meta` before the lease was taken."""
        self._value, self.number = lease, lease.number
        self._held.holdings[self._tag] = HeldLease(lease.number, head.commits)

    def _end(self) -> None:
        """Note that this process has no lease."""
        self._value = None
        self._held.holdings.pop(self._tag, None)
        self._held.refused.discard(self._tag)

    def _count_entry(self) -> None:
        """Note that the last written log entry, and all before it, are in the store."""
        holding = self._held.holdings.get(self._tag)
        if holding is not None:
            holding.commits = self._store.last_entries[self._worker]

    def _wrote(self, written: Written) -> None:
        """Note the (epoch, seq) that the store is known to have."""
        self.written, self._unsure = written, None

    async def _take(self) -> tuple[LeaseValue, Head]:
        """Try until the lease is taken; return it with the head of `meta` before it."""
        await self._rounds.begun.wait()
        while True:
            if not self.wanted:
                self._called.clear()
                await self._called.wait()
            taken = await self._store.leases.take(
                self._worker, self._services.token, above=self.number, is_given_up=self._is_given_up
            )
            if taken is not None:
                return taken
            await asyncio.sleep(self._services.config.lease_ttl_s / LOOKS_PER_TTL)

    def _is_given_up(self, value: bytes) -> bool:
        """Return whether the router of this lease gave it back, and the store does not have that or has lost it."""
        now_s = self._services.clock()
        if self._other is None or self._other[0] != value:
            self._other = value, now_s
        return self._services.disowns(LeaseValue.token_of(value) or "", self._worker, self._other[1])

    async def release(self) -> None:
        """Give the lease back; if the store does not answer, the heartbeats of this process show that it did."""
        lease = self._value
        if lease is None:
            return
        self._end()
        # The end of the caller does not cut the request off.
        await asyncio.shield(self._release(lease))

    async def _release(self, lease: LeaseValue) -> None:
        try:
            await self._store.leases.release(self._worker, lease)
        except StoreError as error:
            log.warning("lease not released", extra={"worker": self._worker, "reason": str(error)})

    async def forget(self) -> None:
        """Delete the index of a worker that is no longer registered, unless another process has its lease."""
        self._end()
        await self._store.forget(self._worker, self._services.token)

    async def keep(self, movable: Callable[[], bool]) -> None:
        """Watch over the lease until it is lost, then raise LeaseLost, or HandedOver if another process should follow.

        Args:
            movable: Returns whether the worker may be handed over now.
        """
        self._movable = movable
        self._called.clear()
        self._rounds.join(self)
        try:
            await self._keep()
        finally:
            self._rounds.leave(self)
            # The callback refers to the owner of this lease, and would keep it alive.
            self._movable = _never

    async def _keep(self) -> None:
        while True:
            await self._called.wait()
            self._called.clear()
            if self._should_move():
                self._metrics.leases_lost["handed_over"].inc()
                raise HandedOver(
                    "router processes share the workers among themselves, and another process is to follow this one"
                )
            try:
                async with self._lock:
                    await self._confirm()
            except StoreError as error:
                self._say_unheard(str(error))

    def _should_move(self) -> bool:
        return not self.wanted and self._movable()

    def look(self) -> bool:
        """Wake `take` or `keep` if the worker should change hands; return True if only a new assignment changes that."""
        mine = self.wanted
        if mine if self._value is None else not mine and self._movable():
            self._called.set()
        # Keep looking at a held worker that another process should follow, because it may become movable.
        return mine or self._value is None

    def offer(self) -> tuple[LeaseValue, LeaseLook] | None:
        """Return the lease and the request that reads it from the store, or None without a lease."""
        return None if self._value is None else (self._value, self._store_look)

    def take_reply(self, lease: LeaseValue, holder: bytes | None, fields: list[bytes | None]) -> None:
        """Wake `keep` unless the reply confirms the lease and the last write.

        A write that ended meanwhile may make the reply look wrong, which costs one request.
        """
        if lease is self._value and not (holder == lease.value and self._is_confirmed(fields)):
            self._called.set()

    def doubt(self, lease: LeaseValue) -> None:
        """Wake `keep` to confirm the lease by a request of its own."""
        if lease is self._value:
            self._called.set()

    def _is_confirmed(self, fields: list[bytes | None]) -> bool:
        """Return whether these fields of `meta` agree with the last write of this process."""
        confirmed = (self.written, self._entries, fields)
        if self._confirmed == confirmed:
            return True
        head = Head.of(keys.meta(self._worker), *fields)
        if head.problem is not None or head.commits < self._entries or not self._is_ours(head.written):
            return False
        self._confirmed = confirmed
        return True

    def take_failure(self, lease: LeaseValue, reason: str) -> None:
        """Note that the store could not be reached."""
        if lease is self._value:
            self._say_unheard(reason)

    def _say_unheard(self, reason: str) -> None:
        if self.problem is None:
            log.warning("lease not confirmed", extra={"worker": self._worker, "reason": reason})
        self._say(reason)

    async def _confirm(self) -> None:
        """Check the lease and the last write in the store. Raises LeaseLost and StoreError."""
        assert self._value is not None
        head = await self._store.leases.confirm(self._worker, self._value)
        if head is None:
            await self._regain()
        elif head.problem is not None:
            self._lose("unreadable", str(head.problem))
        elif head.commits < self._entries or not self._is_ours(head.written):
            self._lose("data_lost", "Redis lost commits of this worker")

    @property
    def _entries(self) -> int:
        """The number of the last log entry that the store had.

        The (epoch, seq) alone does not show the loss of a note, because a note has no seq.
        """
        holding = self._held.holdings.get(self._tag)
        return 0 if holding is None else holding.commits

    def _is_ours(self, stored: Written) -> bool:
        """Return whether this (epoch, seq) of the store is that of the last write of this process."""
        return stored in (self.written, self._unsure)

    async def _regain(self) -> None:
        """Take the lost lease again. Raises LeaseLost if another process had it since, or the store lost commits."""
        taken = await self._store.leases.take(self._worker, self._services.token, above=self.number)
        if taken is None:
            self._lose("taken", ELSEWHERE)
        assert taken is not None
        lease, head = taken
        alone, entries = head.lease <= self.number, self._entries
        self._have(lease, head)
        if not alone:
            self._interrupted = True
            self._lose("taken", "another router process followed this worker meanwhile; beginning again from Redis")
        if head.commits < entries or not self._is_ours(await self._stored(head)):
            self._lose("data_lost", "Redis lost commits of this worker")
        log.warning("lease regained", extra={"worker": self._worker})
        # The state must be written again under the new number.
        self._changed(self.problem)

    def _lose(self, how: str, reason: str) -> None:
        if not self._is_lost:
            self._is_lost = True
            self._metrics.leases_lost[how].inc()
        raise LeaseLost(reason)

    async def write(self, flush: PendingCommit) -> None:
        """Write the commit, retrying until the store has it. Raises LeaseLost if this process must not write."""
        await self._until_done(lambda: self._write_once(flush))

    async def note(self, epoch: str, meta: dict[str, bytes]) -> None:
        """Set fields of `meta` without a batch, retrying as `write` does."""

        async def once() -> bool:
            assert self._value is not None
            outcome = await self._store.note(self._worker, epoch, self._value, meta, self._entries)
            return await self._judge(outcome, done=False)

        await self._until_done(once)

    async def checkpoint(self, residents: Mapping[Place, Hashes]) -> None:
        """Replace the checkpoint by the blocks held at the last commit, retrying as `write` does."""
        epoch, seq = self.written
        assert epoch is not None and seq is not None
        checkpoint = Checkpoint(self._worker, epoch, seq, residents)

        async def once() -> bool:
            assert self._value is not None
            outcome = await self._store.checkpoint(checkpoint, self._value)
            if outcome is CommitOutcome.APPLIED:
                self._metrics.checkpoints.inc()
            return await self._follow_outcome(outcome, done=False)

        await self._until_done(once)

    async def _until_done(self, once: Callable[[], Awaitable[bool]]) -> None:
        """Call `once` until it returns True, with growing pauses after errors of the store. Raises LeaseLost."""
        retry_s = RETRY_FIRST_S
        while True:
            try:
                async with self._lock:
                    if await once():
                        self._say(None)
                        return
            except StoredValueError as error:
                # Only a new epoch can be written over an unreadable value.
                self._lose("unreadable", str(error))
            except StoreError as error:
                self._metrics.commits[FAILED].inc()
                if self.problem is None:
                    log.warning("commit failed", extra={"worker": self._worker, "reason": str(error)})
                self._say(str(error))
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, RETRY_LAST_S)

    async def _write_once(self, flush: PendingCommit) -> bool:
        """Try to write the commit; return False if the lease was taken again, so the caller must try once more."""
        assert self._value is not None
        if flush.opens_epoch:
            self._unsure = (flush.epoch, None)
            # State and catalog are written with the blocks, because otherwise a reader of the still empty epoch would
            # show the worker as live.
            meta = flush.meta if flush.seqs is None else {}
            outcome = await self._store.open_epoch(self._worker, flush.epoch, self._value, meta)
            if not await self._judge(outcome, done=outcome is CommitOutcome.STALE):
                return False
            if outcome is CommitOutcome.APPLIED:
                self._wrote((flush.epoch, None))
        if flush.seqs is None:
            return True
        first, last = flush.seqs
        commit = Commit(
            worker=self._worker,
            epoch=flush.epoch,
            first_seq=first,
            last_seq=last,
            changes=flush.changes,
            copies=flush.copies,
            meta=flush.meta,
            may_be_first=self.written[0] != flush.epoch or self.written[1] is None,
        )
        self._unsure = (flush.epoch, last)
        outcome = await self._store.commit(commit, self._value, self._entries)
        # A commit that is sent again after a lost connection is STALE if the first one had arrived.
        done = outcome is CommitOutcome.STALE and await self._store.committed(self._worker) == (flush.epoch, last)
        if not await self._judge(outcome, done=done):
            return False
        self._wrote((flush.epoch, last))
        return True

    async def _judge(self, outcome: CommitOutcome, *, done: bool) -> bool:
        """Count the outcome of a write, and return whether the store has it; False means to try once more.

        Args:
            outcome: The store's answer.
            done: Whether STALE means that an earlier try was applied.

        Raises:
            LeaseLost: If the store lost commits or holds another state.
        """
        self._metrics.commits[outcome.value].inc()
        if done or outcome is CommitOutcome.APPLIED:
            self._count_entry()
        return await self._follow_outcome(outcome, done=done)

    async def _follow_outcome(self, outcome: CommitOutcome, *, done: bool) -> bool:
        """Return whether the store has the write, taking a lost lease again. Raises LeaseLost; see `_judge`."""
        if outcome is CommitOutcome.FENCED:
            await self._regain()
            return False
        if outcome is CommitOutcome.STALE and not done:
            lost = self._store.last_entries[self._worker] < self._entries
            other = "Redis holds another state than this process; beginning again"
            self._lose("data_lost", "Redis lost commits of this worker" if lost else other)
        return True

    def _say(self, problem: str | None) -> None:
        """Set `problem`, and report it if it appeared or ended."""
        if (problem is None) != (self.problem is None):
            self.problem = problem
            if problem is None:
                self._held.refused.discard(self._tag)
            elif self._value is not None:
                self._held.refused.add(self._tag)
            self._changed(problem)
