# SPDX-License-Identifier: Apache-2.0
"""The logs of many workers as one stream of typed items, each entry once and in its worker's order.

One blocking XREAD reads all logs of a single server. A cluster refuses an XREAD over several slots, so there each
worker has a connection of its own. Entries are numbered per worker without holes, and the seqs of an epoch's commits
have none either. Anything that breaks this (a trimmed log, a store that lost its last second or was replaced by another
one, a worker dropped and registered again) ends in one `Reload`, never in a silent miss. The follower decides nothing
and keeps no residency; while the store is away, routing continues from the mirror.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable

import msgspec

from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.base.common.task_supervisor import TaskSupervisor
from kvrouter.router.base.redis_client.connection import Connection
from kvrouter.router.base.redis_client.errors import ReplyError, StoreError
from kvrouter.router.base.redis_client.resp import command
from kvrouter.router.base.redis_client.servers import Servers
from kvrouter.router.index.store import keys
from kvrouter.router.index.store.commit import WorkerImage
from kvrouter.router.index.store.log_entry import LogEntry, parse_entry

# How long one XREAD waits for news. News arrives at once, so this only bounds how long a dead connection can look idle.
BLOCK_S = 1.0
# A reply that is later than BLOCK_S by this much means that the store is lost. This router then misses the news of
# other routers, which must be reported within seconds. A command that takes longer than this, with all others waiting
# behind it, is as bad as silence.
SILENT_S = 1.5
# Entries of one log in one read. This bounds the memory of a reply (2,048 transitions are 16 KiB, 65,536 are 512 KiB),
# not the rate.
ENTRIES_PER_READ = 16
# Replies that are read ahead of the consumer; beyond that the follower waits, and the log is the queue. A reply is no
# larger than the logs that it reads (LOG_BYTES each in `store.py`), and usually far smaller.
READ_AHEAD = 4
# How long an added log waits for more logs before it is read. To read one more log takes another connection, and a
# worker that this process is to follow itself is read here for a moment only.
GATHER_S = 0.05
# Pause before reconnecting: doubled from the first to the last, spread by half so that routers do not return in step.
RETRY_FIRST_S = 0.05
RETRY_LAST_S = 2.0


class Reload(msgspec.Struct, frozen=True):
    """A worker whose log cannot be followed from the present position.

    No item of the worker comes until it is loaded and added again.
    """

    worker: WorkerKey
    reason: str


class StoreLost(msgspec.Struct, frozen=True):
    """A store that does not answer, which the follower keeps trying. Entries of these workers may be late."""

    workers: tuple[WorkerKey, ...]
    reason: str


class StoreBack(msgspec.Struct, frozen=True):
    """A store that answers again for these workers. The entries that were missed follow, or a `Reload`."""

    workers: tuple[WorkerKey, ...]


FollowerItem = LogEntry | Reload | StoreLost | StoreBack


class _Position:
    """The position up to which one worker's log was read.

    Each `add` makes a new position, which separates its items from those of an earlier one.
    """

    def __init__(self, image: WorkerImage) -> None:
        self.worker = image.worker
        self.log_id = image.log_id
        self.commits = image.commits
        self.epoch = image.epoch
        # The last seq that was committed in the epoch, None if none was.
        self.seq = image.seq
        # Whether the present connection has read the log to its end.
        self.is_current = False

    def advance(self, entry_id: bytes, fields: list[bytes]) -> LogEntry | Reload:
        """Move to the next entry and return it, or return a `Reload` if it does not continue the log."""
        try:
            entry = parse_entry(self.worker, entry_id, fields)
        except (ValueError, KeyError, msgspec.MsgspecError) as error:
            return Reload(self.worker, f"an entry of the log cannot be read: {error!r}")
        if entry.commit != self.commits + 1:
            reason = (
                f"the log continues with entry {entry.commit} after entry {self.commits}: it was trimmed or rewritten"
            )
            return Reload(self.worker, reason)
        if not self._continues(entry):
            # After a failover and back, a store may have as many entries as were read, but others.
            return Reload(
                self.worker, f"entry {entry.commit} of the log does not continue the epoch and seq that were read"
            )
        self.log_id, self.commits, self.epoch = entry.id, entry.commit, entry.epoch
        self.seq = None if entry.opened_epoch else self.seq if entry.last_seq is None else entry.last_seq
        return entry

    def _continues(self, entry: LogEntry) -> bool:
        """Return whether an entry belongs to the state that the entries before it made."""
        if entry.opened_epoch or self.epoch is None:
            return True
        if entry.first_seq is None or self.seq is None:
            return entry.epoch == self.epoch
        return (entry.epoch, entry.first_seq) == (self.epoch, self.seq + 1)


_Found = list[tuple[_Position | None, FollowerItem]]


class _Reader:
    """One connection and the logs that it reads."""

    def __init__(
        self, servers: Servers, out: asyncio.Queue[_Found], rng: random.Random, supervisor: TaskSupervisor
    ) -> None:
        self._servers = servers
        self._out = out
        self._rng = rng
        self._positions: dict[str, _Position] = {}  # by the key of the log
        self._connection: Connection | None = None
        self._blocked = False
        # The logs of the read under way, and the timer that ends it for logs that were added since.
        self._followed: dict[str, _Position] = {}
        self._gathering: asyncio.TimerHandle | None = None
        # Whether some of the logs may not have been read to their ends.
        self._has_backlogs = False
        self._woken = asyncio.Event()
        self._lost = False
        # False between a failure and the next start.
        self.runs = True
        self.task = supervisor.start("log_reader", self._run)

    def add(self, position: _Position) -> None:
        self._positions[keys.log(position.worker)] = position
        self._has_backlogs = True
        self._woken.set()
        if self._blocked and self._gathering is None:
            self._gathering = asyncio.get_running_loop().call_later(GATHER_S, self._restart_read)

    def _restart_read(self) -> None:
        """End the read under way if it lacks a log that was added."""
        self._gathering = None
        is_behind = any(self._followed.get(log) is not position for log, position in self._positions.items())
        if is_behind and self._blocked and self._connection is not None:
            # Nothing is lost with the connection, because positions move only with replies.
            self._connection.close()

    def remove(self, worker: WorkerKey) -> None:
        self._positions.pop(keys.log(worker), None)

    async def close(self) -> None:
        self.task.cancel()
        if self._gathering is not None:
            self._gathering.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        if self._connection is not None:
            self._connection.close()

    async def _run(self) -> None:
        pause_s = RETRY_FIRST_S
        self.runs = True
        while True:
            try:
                await self._follow()
                pause_s = RETRY_FIRST_S
            except StoreError as error:
                if self._connection is not None:
                    self._connection.close()
                if self._woken.is_set() and self._blocked:
                    continue
                if not self._lost:
                    self._lost = True
                    await self._out.put([(None, StoreLost(self._workers(), str(error)))])
                await asyncio.sleep(pause_s * self._rng.uniform(0.5, 1.0))
                pause_s = min(2 * pause_s, RETRY_LAST_S)
            except Exception:
                # A defect of ours: positions have moved past entries that were not delivered.
                self.runs = False
                if self._connection is not None:
                    self._connection.close()
                await self._reload(list(self._positions.values()), "the reader of the logs failed")
                raise

    async def _reload(self, positions: list[_Position], reason: str) -> None:
        """Stop reading these logs, which cannot be continued, and report a `Reload` for each."""
        for position in positions:
            self._stop(position)
        if positions:
            await self._out.put([(position, Reload(position.worker, reason)) for position in positions])

    async def _follow(self) -> None:
        """Read once, after connecting if needed."""
        self._blocked = False
        self._woken.clear()
        if not self._positions:
            await self._woken.wait()
            await asyncio.sleep(GATHER_S)
            return
        if self._connection is None or self._connection.closed:
            self._connection = await self._servers.dedicated(next(iter(self._positions)))
            self._has_backlogs = True
            for position in self._positions.values():
                position.is_current = False
            await self._check_positions()
            if self._lost:
                self._lost = False
                await self._out.put([(None, StoreBack(self._workers()))])
            if not self._positions:
                return
        followed = self._followed = dict(self._positions)
        had_backlogs, self._has_backlogs = self._has_backlogs, False
        request = command(
            *("XREAD", "COUNT", ENTRIES_PER_READ, "BLOCK", round(BLOCK_S * 1_000), "STREAMS"),
            *followed,
            *(position.log_id for position in followed.values()),
        )
        self._blocked = True
        try:
            (streams,) = await self._connection.run(request, 1, BLOCK_S + SILENT_S)
        except ReplyError as error:
            if error.code == "WRONGTYPE":
                await self._stop_foreign(list(followed.values()))
            # UNBLOCKED: the slot went to another node while we waited; the next read learns where.
            elif error.code != "UNBLOCKED":
                await self._servers.follow_error(error)
            self._connection.close()
            return
        self._blocked = False
        items: _Found = []
        full: list[_Position] = []
        for log, entries in streams or ():
            position = followed[log.decode("ascii")]
            items += self._advance(position, entries)
            if len(entries) == ENTRIES_PER_READ and not position.is_current:
                full.append(position)
        if had_backlogs:
            for position in followed.values():
                position.is_current = position not in full
            self._has_backlogs |= bool(full)
        if items:
            await self._out.put(items)

    def _advance(self, position: _Position, entries: Iterable[tuple[bytes, list[bytes]]]) -> _Found:
        items: _Found = []
        for entry_id, fields in entries:
            item = position.advance(entry_id, fields)
            if isinstance(item, LogEntry) and not position.is_current:
                item = msgspec.structs.replace(item, is_backlog=True)
            items.append((position, item))
            if isinstance(item, Reload):
                self._stop(position)
                break
        return items

    async def _check_positions(self) -> None:
        """Reload each worker of whose log the store has fewer entries than this process has read.

        A store that lost entries in a crash may never get newer ones, whose numbers would reveal the loss. Call this
        after each connection: if the store restarts later, the connection breaks, and the next one is checked.
        """
        positions = list(self._positions.values())
        if not positions:
            return
        try:
            stored = await self._commits(positions)
        except ReplyError as error:
            if error.code != "WRONGTYPE":
                raise
            # Read one at a time, to see which worker's key has another type.
            stored = []
            for position in positions:
                try:
                    stored += await self._commits([position])
                except ReplyError as refusal:
                    stored.append(str(refusal).encode())
        for position, number in zip(positions, stored, strict=True):
            try:
                commits = keys.parse_number(number or b"0")
            except ValueError:
                await self._reload([position], f"the store counts its entries as {number!r}")
                continue
            if commits < position.commits:
                reason = f"the store has {commits} entries where we read {position.commits}: it lost some"
                await self._reload([position], reason)

    async def _commits(self, positions: list[_Position]) -> list[bytes | None]:
        requests = [command("HGET", keys.meta(position.worker), keys.META_COMMITS) for position in positions]
        return await self._servers.run(keys.meta(positions[0].worker), *requests)

    async def _stop_foreign(self, positions: list[_Position]) -> None:
        """Reload the workers whose log is a key of another type, for which the server refuses the read of all logs."""
        requests = [command("TYPE", keys.log(position.worker)) for position in positions]
        kinds = await self._servers.run(keys.log(positions[0].worker), *requests)
        foreign = [
            position for position, kind in zip(positions, kinds, strict=True) if kind not in (b"stream", b"none")
        ]
        await self._reload(foreign, "its log in the store is of a type that no router writes")

    def _stop(self, position: _Position) -> None:
        log = keys.log(position.worker)
        if self._positions.get(log) is position:
            del self._positions[log]

    def _workers(self) -> tuple[WorkerKey, ...]:
        return tuple(position.worker for position in self._positions.values())


class LogFollower:
    """A follower of the logs of all added workers; `next` returns many items at once.

    It belongs to one event loop and one consumer. `rng` spreads reconnections.
    """

    def __init__(self, servers: Servers, *, supervisor: TaskSupervisor, rng: random.Random | None = None) -> None:
        self._servers = servers
        self._rng = rng or random.Random()
        self._supervisor = supervisor
        self._out: asyncio.Queue[_Found] = asyncio.Queue(READ_AHEAD)
        self._positions: dict[WorkerKey, _Position] = {}
        self._readers: dict[WorkerKey | None, _Reader] = {}

    def add(self, worker: WorkerKey) -> None:
        """Follow a worker's log from its first entry on. Replaces an earlier addition."""
        self.add_image(WorkerImage.empty(worker))

    def add_image(self, image: WorkerImage) -> None:
        """Follow a worker's log from the state in its loaded image on. Replaces an earlier addition."""
        worker = image.worker
        position = self._positions[worker] = _Position(image)
        name = worker if self._servers.is_cluster else None
        reader = self._readers.get(name)
        if reader is None:
            reader = self._readers[name] = _Reader(self._servers, self._out, self._rng, self._supervisor)
        reader.add(position)

    @property
    def reading(self) -> bool:
        """Whether all added logs are read; false while a reader that failed waits to be started again."""
        return all(reader.runs for reader in self._readers.values())

    async def remove(self, worker: WorkerKey) -> None:
        """Stop following `worker`; no item of it comes after this."""
        if self._positions.pop(worker, None) is None:
            return
        if self._servers.is_cluster:
            await self._readers.pop(worker).close()
        else:
            self._readers[None].remove(worker)

    async def next(self) -> list[FollowerItem]:
        """Wait until there is at least one item, and return all that are there, in order for each worker."""
        while True:
            batches = [await self._out.get()]
            while not self._out.empty():
                batches.append(self._out.get_nowait())
            items: list[FollowerItem] = []
            for batch in batches:
                items += (item for position, item in batch if self._is_current(position))
            if items:
                return items

    def _is_current(self, position: _Position | None) -> bool:
        return position is None or self._positions.get(position.worker) is position

    async def close(self) -> None:
        """End all reading."""
        await asyncio.gather(*(reader.close() for reader in self._readers.values()))
        self._readers.clear()
        self._positions.clear()
