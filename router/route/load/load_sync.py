# SPDX-License-Identifier: Apache-2.0
"""Sharing of load between router processes: publishes this one's load and reads that of the others. The async shell.

Choices never wait for it: changes are collected briefly and written in the background. A process that is not heard for
SILENT_S counts as gone, and its load is dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import random
from collections.abc import Callable

from kvrouter.router.base.common.errors import StoreDown
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.base.common.task_supervisor import TaskSupervisor
from kvrouter.router.base.redis_client.connection import Connection
from kvrouter.router.base.redis_client.errors import StoreError
from kvrouter.router.base.redis_client.resp import command
from kvrouter.router.base.redis_client.servers import Servers
from kvrouter.router.index.store import keys
from kvrouter.router.model.engines.engine_metrics import EngineLoad
from kvrouter.router.route.load.load_messages import (
    LoadMessage,
    ReservationEnd,
    WorkerGauge,
    WorkerTotals,
    decode,
    encode,
)
from kvrouter.router.route.load.worker_load import LoadModel

log = logging.getLogger("kvrouter.load")

# How long changes are collected. Even with a round trip and a busy loop, others see them well within a tenth of a
# second; at 50 messages a second and process, 64 processes still cost the server little.
BATCH_S = 0.02
# Interval of complete messages, even without changes; they repair lost messages and show that this process is alive.
WHOLE_EVERY_S = 0.5
# How long after the beginning of the reading all other processes have been heard: each publishes twice in this time.
ALL_HEARD_S = 2 * WHOLE_EVERY_S
# How long after the beginning of the reading a message is read that came after ALL_HEARD_S: this process's own, at the
# latest.
ALL_READ_S = ALL_HEARD_S + WHOLE_EVERY_S
# Four missed complete messages: a process that stalls for this long serves no requests either.
SILENT_S = 2.0
# After a longer gap between two messages that were read, another process may count as gone although it publishes: it was
# heard up to ALL_HEARD_S before the gap, and is forgotten after SILENT_S.
MAX_READ_GAP_S = SILENT_S - ALL_HEARD_S
# Messages kept in the stream: some seconds of 64 processes. A reader that is further behind learns everything from the
# next complete messages.
STREAM_MESSAGES = 4_096
# Messages read at once; the limit gives other tasks their turn.
MESSAGES_PER_READ = 256
# Length of one blocking read.
READ_BLOCK_S = 1.0
# How long other processes may take to say whether a reservation is theirs: two batches, and the stall of a busy
# machine.
ENDING_ANSWER_S = 2.0
RETRY_FIRST_S = 0.1
RETRY_LAST_S = 2.0
# Requests to end reservations of other processes that may be pending at once, and answers to those of others; more are
# refused or dropped, because the store is not keeping up.
MAX_ENDINGS = 10_000
# Notices in one message: as many as one process sends in some seconds.
MAX_NOTICES = 64


class LoadSync:
    """This process's side of the shared load: a task that publishes its load, and one that reads the others' load."""

    def __init__(
        self,
        weights: LoadModel,
        servers: Servers,
        *,
        process: str,
        clock: Callable[[], float],
        rng: random.Random,
        end_here: Callable[[str, str], bool],
        changed: Callable[[], None],
        noticed: Callable[[bytes], None] = lambda notice: None,
        supervisor: TaskSupervisor | None = None,
    ) -> None:
        """Connect a load model with the stream of the servers.

        Args:
            weights: This process's load model.
            servers: The servers that hold the stream.
            process: The name of this process among all. The first message replaces the load that an earlier process of
                this name left behind.
            clock: Returns the current time.
            rng: Source of the jitter of retries.
            end_here: Ends a reservation of this process, by its id and how it ends; returns False if this process does
                not have it.
            changed: Called when load may have fallen.
            noticed: Called with each notice of another process.
            supervisor: Runs both tasks; None for a new one.
        """
        self._weights = weights
        self._table = weights.table
        self._servers = servers
        self._process = process
        self._clock = clock
        self._rng = rng
        self._end_here = end_here
        self._changed = changed
        self._noticed = noticed
        self._supervisor = supervisor or TaskSupervisor(clock=clock, rng=rng)
        self._news = asyncio.Event()
        self._whole_wanted = True
        self._gauges: dict[WorkerKey, EngineLoad] = {}
        self._endings: list[ReservationEnd] = []
        # Answers to the endings of others, each with the time of its ending. They stay until a message with them is sent.
        self._answers: list[tuple[float, tuple[str, int, bool]]] = []
        self._notices: list[bytes] = []
        self._numbers = itertools.count(1)
        # Pending requests to end a reservation, by number: the future, and the processes that have not yet denied
        # ownership.
        self._pending_ends: dict[int, tuple[asyncio.Future[bool], set[str]]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        # Held while a message is under way.
        self._sending = asyncio.Lock()
        # When a message was read last, and its id in the stream. Each process reads its own messages, too, which it
        # writes every WHOLE_EVERY_S.
        self._read_s = -math.inf
        self._read_id = b"0-0"
        # Since when the messages are read without an interruption: a new connection, or more than MAX_READ_GAP_S without any.
        self._reading_since_s = -math.inf
        # Messages of another version or another program.
        self.unreadable = 0
        # Why the load of the other processes is not known; None while it is.
        self.problem: str | None = None

    def start(self) -> None:
        """Start publishing and reading."""
        self._tasks = [
            self._supervisor.start("load_write", self._write),
            self._supervisor.start("load_read", self._read),
        ]

    async def stop(self) -> None:
        """Stop, and notify the other processes so that they need not wait for the timeout."""
        # The notice goes over another connection. If it overtook a message, others would count this process again until
        # SILENT_S, so the message gets its reply first, within the time after which they drop this process anyway.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SILENT_S), self._sending:
                pass
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._tasks:
            with contextlib.suppress(StoreError):
                await self._send(LoadMessage(self._process, True, leaves=True))

    @property
    def others(self) -> int:
        """The number of other processes."""
        return self._table.others

    def touched(self) -> None:
        """Publish changes of this process's load soon; nothing is sent without other processes."""
        if self._table.others:
            self._news.set()

    def gauge(self, worker: WorkerKey, report: EngineLoad) -> None:
        """Publish the report of an engine that this process polls; other processes poll other engines."""
        if self._table.others:
            self._gauges[worker] = report
            self._news.set()

    def send_notice(self, notice: bytes) -> None:
        """Send a notice to the other processes; it is dropped if too many wait, because nothing depends on it."""
        if self._table.others and len(self._notices) < MAX_NOTICES:
            self._notices.append(notice)
            self._news.set()

    async def end_elsewhere(self, selection_id: str, how: str) -> bool:
        """End a reservation of another process; return False if all other processes deny that it is theirs.

        Raises:
            StoreDown: The owner could not be determined.
        """
        # Some of the others may be known before all are, and the denials of some prove nothing about the rest. A message
        # that was read after ALL_HEARD_S proves that all were read; the clock does not, as the connection may hang.
        since_s = self._reading_since_s
        all_heard_s = since_s + ALL_HEARD_S
        if self._read_s < all_heard_s:
            await asyncio.sleep(max(0.0, since_s + ALL_READ_S - self._clock()))
        problem = self.problem
        if problem is None and self._reading_since_s != since_s:
            problem = "reading what routers publish was interrupted"
        elif problem is None and self._clock() - self._read_s > MAX_READ_GAP_S:
            # The store hangs or refuses writes, or this process stood still: others may exist that are not heard.
            problem = f"nothing that routers publish was read for {MAX_READ_GAP_S:g} s"
        elif problem is None and self._read_s < all_heard_s:
            problem = "too little of what routers publish was read since the reading began"
        if not self._table.others and problem is None:
            return False
        if problem is not None or len(self._pending_ends) >= MAX_ENDINGS:
            raise _unasked(problem or "too many are under way")
        number = next(self._numbers)
        answered: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._pending_ends[number] = (answered, self._table.processes)
        self._endings.append(ReservationEnd(number, selection_id, how))
        self._news.set()
        try:
            async with asyncio.timeout(ENDING_ANSWER_S):
                return await answered
        except TimeoutError:
            raise _unasked("not all routers answer") from None
        finally:
            del self._pending_ends[number]

    # -- publishing

    async def _write(self) -> None:
        retry_s, whole_due = RETRY_FIRST_S, 0.0
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, whole_due - self._clock())):
                    await self._news.wait()
            if self._news.is_set():
                await asyncio.sleep(BATCH_S)
            now = self._clock()
            message = self._message(self._whole_wanted or now >= whole_due)
            try:
                async with self._sending:
                    await self._send(message)
            except StoreError as error:
                # The next message contains the whole load again.
                self._whole_wanted = True
                self._refuse(message.endings, str(error))
                await asyncio.sleep(retry_s * self._rng.uniform(0.5, 1.0))
                retry_s = min(2 * retry_s, RETRY_LAST_S)
            else:
                retry_s = RETRY_FIRST_S
                del self._answers[: len(message.answers)]
                if message.whole:
                    whole_due = now + WHOLE_EVERY_S

    def _refuse(self, endings: list[ReservationEnd], reason: str) -> None:
        """Fail the pending requests to end these reservations."""
        for ending in endings:
            pending = self._pending_ends.get(ending.number)
            if pending is not None and not pending[0].done():
                pending[0].set_exception(_unasked(reason))

    def _message(self, whole: bool) -> LoadMessage:
        """Return the next message, and clear everything that it contains but the answers."""
        self._news.clear()
        self._whole_wanted = False
        totals_by_worker = self._table.own() if whole else self._table.own_changes()
        gauges, self._gauges = self._gauges, {}
        endings, self._endings = self._endings, []
        # Nobody waits for an older answer.
        oldest = self._clock() - ENDING_ANSWER_S
        self._answers = [(since, answer) for since, answer in self._answers if since > oldest]
        notices, self._notices = self._notices, []
        return LoadMessage(
            self._process,
            whole,
            [WorkerTotals.of(worker, totals) for worker, totals in totals_by_worker.items()],
            [WorkerGauge(*worker, load) for worker, load in gauges.items()],
            endings,
            [answer for _, answer in self._answers],
            notices=notices,
        )

    async def _send(self, message: LoadMessage) -> None:
        fields = (keys.LOADS_MESSAGE, encode(message))
        await self._servers.run(keys.LOADS, command("XADD", keys.LOADS, "MAXLEN", "~", STREAM_MESSAGES, "*", *fields))

    # -- reading

    async def _read(self) -> None:
        retry_s = RETRY_FIRST_S
        while True:
            connection: Connection | None = None
            try:
                connection = await self._servers.dedicated(keys.LOADS)
                self._read_id = await self._newest(connection)
                self._reading_since_s = self._clock()
                # Publish the whole load now; each process to which this one is new answers with its whole load.
                self._whole_wanted = True
                self._news.set()
                self._regained()
                while True:
                    await self._next(connection)
                    retry_s = RETRY_FIRST_S
            except StoreError as error:
                self._lost(str(error))
                await asyncio.sleep(retry_s * self._rng.uniform(0.5, 1.0))
                retry_s = min(2 * retry_s, RETRY_LAST_S)
            finally:
                if connection is not None:
                    connection.close()

    async def _newest(self, connection: Connection) -> bytes:
        """Return the id of the stream's newest entry."""
        (newest,) = await connection.run(command("XREVRANGE", keys.LOADS, "+", "-", "COUNT", 1), 1)
        entry_id: bytes = newest[0][0] if newest else b"0-0"
        return entry_id

    async def _next(self, connection: Connection) -> None:
        """Read and apply the entries after the last one that was read, or none if none comes in READ_BLOCK_S."""
        block_ms = round(READ_BLOCK_S * 1_000)
        request = command("XREAD", "COUNT", MESSAGES_PER_READ, "BLOCK", block_ms, "STREAMS", keys.LOADS, self._read_id)
        # After SILENT_S others count as gone, so a connection to a machine that died without a word is not kept longer.
        (reply,) = await connection.run(request, 1, READ_BLOCK_S + SILENT_S)
        if reply is None:
            return
        now = self._clock()
        if now - max(self._read_s, self._reading_since_s) > MAX_READ_GAP_S:
            self._reading_since_s = now
        self._read_s = now
        ((_, entries),) = reply
        for self._read_id, fields in entries:
            message = decode(fields[1]) if fields else None
            if message is None:
                self.unreadable += 1
            elif message.process != self._process:
                self._take(message)
        self._changed()

    def _take(self, message: LoadMessage) -> None:
        """Apply a message of another process."""
        now = self._clock()
        if message.leaves:
            self._table.forget_process(message.process, now)
            return
        others_before = self._table.others
        totals = {entry.worker: entry.totals for entry in message.totals}
        self._table.heard(message.process, totals, whole=message.whole, now=now)
        if self._table.others > others_before:
            self._whole_wanted = True
            self._news.set()
        for gauge in message.gauges:
            self._weights.take_engine_load(gauge.worker, gauge.report, now)
        for ending in message.endings:
            answer = (message.process, ending.number, self._end_here(ending.selection_id, ending.how))
            if len(self._answers) < MAX_ENDINGS:
                self._answers.append((now, answer))
                self._news.set()
        for notice in message.notices:
            self._noticed(notice)
        for process, number, ended in message.answers:
            if process == self._process and (pending := self._pending_ends.get(number)) is not None:
                answered, silent = pending
                silent.discard(message.process)
                if not answered.done() and (ended or not silent):
                    answered.set_result(ended)

    def tick(self) -> None:
        """Drop the load of processes that are silent; called periodically."""
        now = self._clock()
        silent = self._table.forget_silent(now - SILENT_S, now)
        if silent:
            log.info("routers not heard, their load is dropped", extra={"routers": len(silent)})
            self._changed()

    def _lost(self, reason: str) -> None:
        if self.problem is None:
            log.warning("load of other routers not known", extra={"reason": reason})
        self.problem = reason

    def _regained(self) -> None:
        if self.problem is not None:
            log.info("load of other routers known again")
        self.problem = None


def _unasked(reason: str) -> StoreDown:
    """Return the error that says why the owner of a reservation could not be determined."""
    return StoreDown(f"the owner of this reservation is unknown now ({reason}); it ends by itself, or try again")
