# SPDX-License-Identifier: Apache-2.0
"""The history in Redis: writes this process's counts in batches, and reads the entries of all processes. Async shell.

A batch is kept until it is known to be written. Each attempt first compares the writer's number in Redis, so a batch
that was executed although its answer was lost counts once.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from kvrouter.contract.history import SavedDay
from kvrouter.router.base.redis_client.connection import Connection
from kvrouter.router.base.redis_client.errors import ReplyError, StoreError
from kvrouter.router.base.redis_client.resp import command
from kvrouter.router.base.redis_client.servers import Servers
from kvrouter.router.index.store import keys
from kvrouter.router.index.store.transactions import UNWATCH, WRONG_TYPE, multi, pairs
from kvrouter.router.observe.history.history import RANGE_S
from kvrouter.router.observe.history.history_entry import MAX_MODELS, OTHER, HistoryEntry, decode
from kvrouter.router.observe.history.history_metrics import HistoryMetrics
from kvrouter.router.observe.history.saved_days import models_in, rows_of
from kvrouter.router.observe.history.unwritten import STREAMS, Batch, DaySum, Unwritten

log = logging.getLogger("kvrouter.history")

# How many entries are read with one command.
ENTRIES_PER_READ = 128
# After the sums of this many models, which take about a millisecond, other tasks get a turn.
MODELS_PER_TURN = 64
# How many writers' last numbers are remembered. Each restart of a process makes a new writer.
MAX_WRITERS = 4_096
# How long a process that ends waits for Redis.
LEAVE_S = 2.0
# The id before the first entry of a stream.
FIRST_ID = b"0-0"


class HistoryLog:
    """This process's side of the history in Redis."""

    def __init__(
        self,
        servers: Servers,
        unwritten: Unwritten,
        take: Callable[[int, HistoryEntry], bool],
        metrics: HistoryMetrics,
        clock: Callable[[], float],
        heard_time: Callable[[float, float], None],
    ) -> None:
        """Prepare to exchange this process's counts with the streams on the servers, reading them from their start.

        Args:
            servers: The servers that hold the streams.
            unwritten: The counts that wait to be written.
            take: Called with the length of the steps and each entry of another process; returns False if its time is
                ahead of the range. Older ones are expected, because trimming leaves some.
            metrics: Counts the parts of the history that are lost.
            clock: Returns the monotonic time.
            heard_time: Called with the time of Redis in seconds since 1970, and the monotonic time of that moment.
        """
        self._servers = servers
        self._unwritten = unwritten
        self._take = take
        self._metrics = metrics
        self._clock = clock
        self._heard_time = heard_time
        # The batch whose outcome is not known yet.
        self._sealed: Batch | None = None
        self._last_ids = dict.fromkeys(STREAMS, FIRST_ID)
        # The number of the last entry that was read, by length of the steps and writer.
        self._read_numbers: OrderedDict[tuple[int, str], int] = OrderedDict()
        # The models that have sums in Redis, by day, as far as this process knows.
        self._day_models: dict[str, set[str]] = {}

    # -- writing

    async def write(self, until_s: float) -> None:
        """Write the sums of days, and the steps that ended by `until_s`. Raises StoreError."""
        await self._name_models()
        while True:
            if self._sealed is None:
                self._sealed = self._unwritten.seal(until_s)
            if self._sealed is None:
                return
            await self._apply(self._sealed)
            self._sealed = None

    async def hear_time(self) -> None:
        """Ask Redis for the time. Raises StoreError."""
        began_s = self._clock()
        ((seconds, micros),) = await self._servers.run(keys.HISTORY_STEPS, command("TIME"))
        # The server read its clock about halfway between the request and the answer.
        self._heard_time(int(seconds) + int(micros) / 1e6, (began_s + self._clock()) / 2)

    async def _apply(self, batch: Batch) -> None:
        """Execute a batch unless it was executed before.

        If Redis refuses a sum, delete the field in its way, and try the sum once more in the next batch.
        """
        writer, orders = keys.history_writer(self._unwritten.writer), batch.orders

        async def attempt(connection: Connection) -> list[Any] | None:
            # The number is watched, because the server may execute an earlier attempt only now.
            _, number = await connection.run(command("WATCH", writer) + command("GET", writer), 2)
            if number == b"%d" % batch.number:
                await connection.run(UNWATCH, 1)
                return []
            *_, replies = await connection.run(multi(orders), len(orders) + 2)
            return replies  # type: ignore[no-any-return]

        while (replies := await self._servers.on(writer, attempt)) is None:
            pass
        refused = [(index, str(reply)) for index, reply in enumerate(replies) if isinstance(reply, Exception)]
        in_the_way: list[tuple[DaySum, bool]] = []
        for index, text in refused:
            log.warning("a part of the history was refused", extra={"reason": text})
            if index >= len(batch.day_sums) or batch.day_sums[index].was_refused:
                # The key of a stream has another type, which `common_keys.py` replaces; or no stored value is the cause.
                self._metrics.lost["unwritten"].inc()
                continue
            part = batch.day_sums[index]
            self._metrics.lost["damaged"].inc()
            self._unwritten.restore(part)
            in_the_way.append((part, text.startswith(WRONG_TYPE)))
        # Last, because these orders may fail.
        for part, whole in in_the_way:
            await self._drop(part, whole=whole)

    async def _drop(self, part: DaySum, *, whole: bool) -> None:
        key = keys.savings(part.day)
        order = command("DEL", key) if whole else command("HDEL", key, keys.savings_field(part.model, part.column))
        await self._servers.run(key, order)

    async def _name_models(self) -> None:
        """Count a model as OTHER if its day already has MAX_MODELS others, whichever processes added them."""
        days = self._unwritten.days
        unknown = {day for day, model in days if model not in self._day_models.get(day, ())}
        for day in unknown:
            try:
                (fields,) = await self._servers.run(keys.savings(day), command("HGETALL", keys.savings(day)))
            except ReplyError as error:
                if error.code != WRONG_TYPE:
                    raise
                fields = []
            self._day_models[day] = models_in(fields[::2])
        for day, model in list(days):
            models = self._day_models.setdefault(day, set())
            if model in models or model == OTHER:
                continue
            if len(models - {OTHER}) < MAX_MODELS:
                models.add(model)
            else:
                self._unwritten.add_day(day, OTHER, days.pop((day, model)))
        for day in self._day_models.keys() - {max(self._day_models, default="")}:
            del self._day_models[day]

    # -- reading

    async def read(self) -> None:
        """Read the entries that all processes have written since the last call. Raises StoreError."""
        for step_s, key in STREAMS.items():
            while await self._read_some(step_s, key):
                pass

    async def _read_some(self, step_s: int, key: str) -> bool:
        """Read some entries of a stream, and return whether there may be more."""
        last_id = self._last_ids[step_s]
        newest, reply = await self._servers.run(
            key,
            command("XREVRANGE", key, "+", "-", "COUNT", 1),
            command("XREAD", "COUNT", ENTRIES_PER_READ, "STREAMS", key, last_id),
        )
        if newest and _parts(newest[0][0]) < _parts(last_id):
            # The stream was replaced, as after the loss of the store, so it is read from its start. Entries that were
            # read before are recognised by their numbers.
            self._last_ids[step_s] = FIRST_ID
            return True
        if reply is None:
            return False
        ((_, entries),) = reply
        added = 0
        for entry_id, fields in entries:
            self._last_ids[step_s] = entry_id
            added += self._read_entry(step_s, fields)
            if added >= MODELS_PER_TURN:
                # Other tasks have their turn.
                await asyncio.sleep(0)
                added = 0
        return len(entries) == ENTRIES_PER_READ

    def _read_entry(self, step_s: int, fields: Sequence[bytes]) -> int:
        """Read an entry, and return the number of models whose sums were added."""
        entry = decode(fields[1]) if len(fields) == 2 and fields[0] == keys.HISTORY_MESSAGE.encode() else None
        if entry is None:
            self._metrics.lost["damaged"].inc()
            return 0
        if entry.writer == self._unwritten.writer:
            return 0
        source = (step_s, entry.writer)
        if entry.number <= self._read_numbers.get(source, 0):
            return 0
        self._read_numbers[source] = entry.number
        self._read_numbers.move_to_end(source)
        while len(self._read_numbers) > MAX_WRITERS:
            self._read_numbers.popitem(last=False)
        if not self._take(step_s, entry):
            self._metrics.lost["time"].inc()
        return len(entry.models)

    async def trim(self, now_s: float) -> None:
        """Drop entries that are out of range. Raises StoreError."""
        for step_s, key in STREAMS.items():
            oldest_id = f"{int((now_s - RANGE_S[step_s] - 2 * step_s) * 1e3)}-0"
            try:
                await self._servers.run(key, command("XTRIM", key, "MINID", "~", oldest_id))
            except ReplyError as error:
                # Servers before Redis 6.2 cannot trim by age. The number of entries is bounded there, too.
                log.debug("the history is not trimmed by age", extra={"reason": str(error)})

    # -- savings

    async def savings(self, days: Sequence[str]) -> list[SavedDay]:
        """Return the stored sums of the days, in the order of `days`. Raises StoreError."""
        rows: list[SavedDay] = []
        for day in days:
            key = keys.savings(day)
            try:
                (flat,) = await self._servers.run(key, command("HGETALL", key))
            except ReplyError as error:
                if error.code != WRONG_TYPE:
                    raise
                self._metrics.lost["damaged"].inc()
                continue
            day_rows, damaged = rows_of(day, pairs(flat))
            rows += day_rows
            for problem in damaged:
                self._metrics.lost["damaged"].inc()
                log.warning("a part of the savings is left out", extra={"reason": str(problem)})
        return rows

    async def leave(self) -> None:
        """Write the last counts, with those of unfinished steps. Counts that are not written in LEAVE_S are lost."""
        try:
            async with asyncio.timeout(LEAVE_S):
                await self.write(float("inf"))
        except (StoreError, TimeoutError) as error:
            log.warning("the last counts of the history were not written", extra={"reason": str(error)})


def _parts(entry_id: bytes) -> tuple[int, int]:
    milliseconds, _, number = entry_id.partition(b"-")
    return int(milliseconds), int(number)
