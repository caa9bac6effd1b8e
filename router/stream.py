# SPDX-License-Identifier: Apache-2.0
"""One worker, followed: lease, subscription, ingest and commits. The async shell around `ingest.py`.

One task a worker. Whatever breaks its hold (a lost lease, a store that is elsewhere) makes it begin again from what Redis holds.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable

import msgspec
import zmq

from kvrouter.events.codec import BatchDecoder
from kvrouter.events.items import ResumePoint
from kvrouter.events.subscriber import Subscriber, SubscriberSettings
from kvrouter.router.config import Config
from kvrouter.router.index.store import Commit, CommitOutcome, IndexStore, StoreError, WorkerImage
from kvrouter.router.ingest import Flush, Ingest
from kvrouter.router.match import WorkerView
from kvrouter.router.metrics import Metrics
from kvrouter.router.names import Place, WorkerKey
from kvrouter.router.registration import CatalogSpec, Registration

log = logging.getLogger("kvrouter.stream")

# Transitions that may wait for the store before the socket is left unread (then ZMQ buffers, and later the publisher drops: a gap).
MAX_PENDING_BLOCKS = 1_000_000

# Flushed batches whose way into the mirror is timed.
MAX_TIMED = 1_024

# Pause between tries while the store does not answer or the lease is held elsewhere: doubled from the first to the last.
RETRY_FIRST_S = 0.05
RETRY_LAST_S = 1.0


class HoldLost(Exception):
    """This process must not commit for the worker as it stands: the lease or the continuity with Redis is lost."""


class WorkerStream:
    """Follows one worker from registration to `stop`. `view` is what the matcher may know of it now."""

    def __init__(
        self,
        registration: Registration,
        *,
        store: IndexStore,
        token: str,
        config: Config,
        metrics: Metrics,
        context: zmq.Context[zmq.Socket[bytes]],
        clock: Callable[[], float],
        new_epoch: Callable[[], str],
        changed: Callable[[], None],
    ) -> None:
        """changed: called when `view` did. token: names this process in leases."""
        self.registration = registration
        self._store = store
        self._token = token
        self._config = config
        self._metrics = metrics
        self._context = context
        self._clock = clock
        self._new_epoch = new_epoch
        self._changed = changed
        self._decoder = BatchDecoder()
        self._hold_problem: str | None = None
        self._task: asyncio.Task[None] | None = None
        self._timed: deque[tuple[str, int, float]] = deque(maxlen=MAX_TIMED)
        # (epoch, seq) in Redis that `ingest` was prepared from, None once it goes on from there.
        self._prepared: tuple[str | None, int | None] | None = None
        self.lag_s: float | None = None
        self.visible_epoch: str | None = None
        self.visible_seq: int | None = None
        self.ingest = self._new_ingest()
        self.view = self._make_view()

    @property
    def worker(self) -> WorkerKey:
        return self.registration.worker

    def _new_ingest(self) -> Ingest:
        seed = self._config.none_hash_seed
        return Ingest(self.registration, seed=seed, decoder=self._decoder, new_epoch=self._new_epoch)

    def update(self, registration: Registration) -> None:
        """Take over a registration that differs in nothing that the stream depends on."""
        self.registration = registration
        self._refresh()

    def prepare(self, image: WorkerImage, copies: dict[tuple[Place, int], int]) -> None:
        """Begin from what Redis holds, before the stream says anything."""
        self.ingest = self._new_ingest()
        self._prepared = (image.epoch, image.seq)
        if image.epoch is not None and image.seq is not None:
            try:
                self.ingest.restore(image.epoch, image.seq, image.places, copies, image.meta)
            except (msgspec.MsgspecError, ValueError) as error:
                # Written by another version or another program: what it means is not known, so it is not used.
                log.warning("stored state not readable", extra={"worker": self.worker, "error": str(error)})
                self.ingest = self._new_ingest()
        self._refresh()

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(), name=f"stream {self.worker}")

    async def stop(self) -> None:
        """End the task; what was committed stays, the lease is given back."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    def shown(self, epoch: str, seq: int | None, now: float) -> None:
        """The mirror shows everything up to `seq` of `epoch`."""
        self.visible_epoch = epoch
        self.visible_seq = seq
        while self._timed and seq is not None and (self._timed[0][0] != epoch or self._timed[0][1] <= seq):
            timed_epoch, _, received_s = self._timed.popleft()
            if timed_epoch == epoch:
                self.lag_s = now - received_s

    def _make_view(self) -> WorkerView:
        ingest = self.ingest
        spec = self.registration.catalog or CatalogSpec()
        return WorkerView(
            worker=self.worker,
            url=self.registration.url,
            state=ingest.state,
            reason=self._hold_problem or ingest.reason,
            epoch=ingest.epoch,
            catalog=ingest.catalog,
            scheme=ingest.identity.scheme if ingest.identity.explained else None,
            lora_paths=spec.lora_paths,
        )

    def _refresh(self) -> None:
        view = self._make_view()
        old, self.view = self.view, view
        if msgspec.structs.astuple(old) != msgspec.structs.astuple(view):
            if old.state is not view.state:
                log.info(
                    "stream state", extra={"worker": self.worker, "state": view.state.value, "reason": view.reason}
                )
            self._changed()

    async def _run(self) -> None:
        retry_s = RETRY_FIRST_S
        while True:
            try:
                await self._take_lease()
                retry_s = RETRY_FIRST_S
                try:
                    await self._follow()
                finally:
                    await self._release()
            except (HoldLost, StoreError) as error:
                self._hold_problem = str(error)
                self._refresh()
                log.warning("worker not held", extra={"worker": self.worker, "reason": str(error)})
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, RETRY_LAST_S)
            except zmq.ZMQError as error:
                self._hold_problem = f"cannot subscribe to {self.registration.events}: {error}"
                self._refresh()
                await asyncio.sleep(RETRY_LAST_S)
            except Exception:
                # A defect of ours must not end the worker's task unseen; what Redis holds is begun from again.
                self._hold_problem = (
                    "internal error while following this worker: a bug in the router; its log has the details"
                )
                self._metrics.internal_errors.labels("stream").inc()
                log.exception("stream failed", extra={"worker": self.worker})
                self._refresh()
                await asyncio.sleep(RETRY_LAST_S)

    async def _take_lease(self) -> None:
        ttl_s = self._config.lease_ttl_s
        while not (
            await self._store.renew_lease(self.worker, self._token, ttl_s)
            or await self._store.take_lease(self.worker, self._token, ttl_s)
        ):
            self._hold_problem = (
                "another router process follows this worker; its answers are shown as they come from Redis"
            )
            self._refresh()
            await asyncio.sleep(ttl_s / 4)
        self._hold_problem = None
        if await self._store.committed(self.worker) != self._prepared:
            # Others have committed since, or this process lost its hold in the middle.
            image = await self._store.load(self.worker)
            self.prepare(image, await self._store.load_copies(self.worker))
        self._prepared = None
        self._refresh()

    async def _release(self) -> None:
        try:
            await asyncio.shield(self._store.release_lease(self.worker, self._token))
        except StoreError as error:
            log.warning("lease not released", extra={"worker": self.worker, "reason": str(error)})

    async def _follow(self) -> None:
        if self.registration.events is None:
            await self._keep_lease()
            return
        resume = self.ingest.resume_point
        subscriber = Subscriber(
            self.registration.events,
            self.registration.replay,
            context=self._context,
            resume=None if resume is None else ResumePoint(*resume),
            settings=SubscriberSettings(replay_timeout_s=self._config.replay_timeout_s),
        )
        news = asyncio.Event()
        room = asyncio.Event()
        try:
            await subscriber.start()
            async with asyncio.TaskGroup() as group:
                group.create_task(self._keep_lease())
                group.create_task(self._receive(subscriber, news, room))
                group.create_task(self._commit(news, room))
        except ExceptionGroup as group:
            lost, others = group.split((HoldLost, StoreError))
            if others is not None or lost is None:
                raise
            raise HoldLost(str(_first_of(lost))) from None
        finally:
            await subscriber.close()

    async def _keep_lease(self) -> None:
        ttl_s = self._config.lease_ttl_s
        lost_at = self._clock() + ttl_s
        while True:
            await asyncio.sleep(ttl_s / 3)
            try:
                if not await self._store.renew_lease(self.worker, self._token, ttl_s):
                    raise HoldLost("the lease went to another router process")
                lost_at = self._clock() + ttl_s
            except StoreError:
                # The commit task says so; the hold ends only when the lease may have.
                if self._clock() > lost_at:
                    raise

    async def _receive(self, subscriber: Subscriber, news: asyncio.Event, room: asyncio.Event) -> None:
        # A new worker has an empty epoch to announce before its stream says anything.
        news.set()
        while True:
            items = await subscriber.next()
            now = self._clock()
            for item in items:
                self.ingest.apply(item, now)
            self._refresh()
            if self.ingest.has_news:
                news.set()
            while self.ingest.pending_blocks > MAX_PENDING_BLOCKS:
                room.clear()
                await room.wait()

    async def _commit(self, news: asyncio.Event, room: asyncio.Event) -> None:
        while True:
            await news.wait()
            news.clear()
            received_s = self._clock()
            await asyncio.sleep(self._config.flush_interval_s)
            flush = self.ingest.take()
            room.set()
            if flush is not None:
                if flush.seqs is not None:
                    self._timed.append((flush.epoch, flush.seqs[1], received_s))
                await self._write(flush)

    async def _write(self, flush: Flush) -> None:
        """Commit until the store has it. Raises HoldLost when it must not."""
        retry_s = RETRY_FIRST_S
        while True:
            try:
                await self._write_once(flush)
            except StoreError as error:
                self._metrics.index_commits.labels("failed").inc()
                self._metrics.store_up.set(0)
                log.warning("commit failed", extra={"worker": self.worker, "reason": str(error)})
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, RETRY_LAST_S)
            else:
                self._metrics.store_up.set(1)
                return

    async def _write_once(self, flush: Flush) -> None:
        if flush.opens_epoch:
            outcome = await self._store.open_epoch(self.worker, flush.epoch, self._token, flush.meta)
            self._judge(outcome, stale_is_done=True)
        if flush.seqs is None:
            return
        commit = Commit(
            worker=self.worker,
            epoch=flush.epoch,
            first_seq=flush.seqs[0],
            last_seq=flush.seqs[1],
            changes=flush.changes,
            copies=flush.copies,
            meta=flush.meta,
        )
        outcome = await self._store.commit(commit, self._token)
        if outcome is CommitOutcome.STALE:
            # Sent again after a lost connection: the first one may have arrived.
            done = await self._store.committed(self.worker) == (flush.epoch, flush.seqs[1])
            self._judge(outcome, stale_is_done=done)
        else:
            self._judge(outcome, stale_is_done=False)

    def _judge(self, outcome: CommitOutcome, *, stale_is_done: bool) -> None:
        self._metrics.index_commits.labels(outcome.value).inc()
        if outcome is CommitOutcome.FENCED:
            raise HoldLost("the lease went to another router process")
        if outcome is CommitOutcome.STALE and not stale_is_done:
            raise HoldLost("Redis holds another state than this process; beginning again from there")


def _first_of(error: BaseException) -> BaseException:
    """The first plain exception of a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
