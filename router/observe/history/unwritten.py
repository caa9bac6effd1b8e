# SPDX-License-Identifier: Apache-2.0
"""The counts of this process that are not in Redis yet, and the batches in which they are written. Pure.

A batch is one transaction that also sets the writer's number, which shows later whether the batch was executed.
"""

from __future__ import annotations

import math

import msgspec

from kvrouter.router.base.redis_client.resp import command
from kvrouter.router.index.store import keys
from kvrouter.router.observe.history.history import FINE_STEP_S, MINUTE_S, RANGE_S
from kvrouter.router.observe.history.history_entry import HistoryEntry, ModelStep, encode
from kvrouter.router.observe.history.saved_days import COLUMNS, KEPT_S, Columns

# How many steps of each kind one batch contains. After Redis was away for long, several batches are written.
STEPS_PER_BATCH = 128
# The stream of each kind of steps.
STREAMS = {FINE_STEP_S: keys.HISTORY_STEPS, MINUTE_S: keys.HISTORY_MINUTES}
# How many entries a stream keeps, besides the limit by age: a full range of 32 processes.
MAX_ENTRIES = {step_s: 32 * (range_s // step_s) for step_s, range_s in RANGE_S.items()}
# A stream to which no process writes expires when all of its steps are out of range.
STREAM_TTL_S = {step_s: 2 * range_s for step_s, range_s in RANGE_S.items()}
# A writer's number is needed only while its process runs, which renews it every few seconds.
WRITER_TTL_S = 86_400
# How many pairs of a day and a model may wait. If Redis is away for longer, the oldest are lost.
MAX_DAY_SUMS = 1_024


class DaySum(msgspec.Struct, frozen=True):
    """An amount to add to one field of a day's savings."""

    day: str
    model: str
    column: str
    amount: int
    # Whether Redis refused it once.
    was_refused: bool = False

    @property
    def order(self) -> bytes:
        """The command that adds it."""
        return command("HINCRBY", keys.savings(self.day), keys.savings_field(self.model, self.column), self.amount)


class Batch(msgspec.Struct, frozen=True):
    """The commands of one transaction."""

    # Increases with each batch of the writer.
    number: int
    orders: list[bytes]
    # The sums of days. Their commands are the first of `orders`, in the same order.
    day_sums: list[DaySum]


class Unwritten:
    """The counts that wait to be written."""

    def __init__(self, writer: str) -> None:
        """Begin without counts. `writer` is a name for this run of the process, which no other run ever has."""
        self.writer = writer
        # The sums of each model, by length of the step, start of the step and model.
        self._steps: dict[int, dict[int, dict[str, ModelStep]]] = {step_s: {} for step_s in STREAMS}
        self.days: dict[tuple[str, str], Columns] = {}
        # Not mixed with other sums, which Redis may take.
        self._refused: list[DaySum] = []
        self._entries = self._batches = 0
        # Steps and days that were dropped, because Redis was away for longer than they are kept.
        self.dropped = 0

    def add(self, step_s: int, start_s: int, sums: ModelStep) -> None:
        """Add the sums of a model to a step."""
        models = self._steps[step_s].setdefault(start_s, {})
        before = models.get(sums.model)
        models[sums.model] = sums if before is None else before.plus(sums)
        while len(self._steps[step_s]) > RANGE_S[step_s] // step_s:
            del self._steps[step_s][min(self._steps[step_s])]
            self.dropped += 1

    def add_day(self, day: str, model: str, sums: Columns) -> None:
        """Add sums to a day."""
        before = self.days.get((day, model))
        self.days[day, model] = sums if before is None else tuple(map(sum, zip(before, sums, strict=True)))
        while len(self.days) > MAX_DAY_SUMS:
            del self.days[min(self.days)]
            self.dropped += 1

    def restore(self, part: DaySum) -> None:
        """Take back a sum of a day that Redis refused, for the next batch."""
        self._refused.append(msgspec.structs.replace(part, was_refused=True))

    def seal(self, until_s: float = math.inf) -> Batch | None:
        """Return the next batch, with the steps that ended by `until_s`, or None if there is nothing to write."""
        days, self.days = self.days, {}
        day_sums = [
            DaySum(day, model, column, amount)
            for (day, model), sums in days.items()
            for column, amount in zip(COLUMNS, sums, strict=True)
            if amount
        ]
        day_sums += self._refused
        self._refused = []
        orders = [part.order for part in day_sums]
        orders += [command("EXPIRE", keys.savings(day), KEPT_S) for day in {part.day for part in day_sums}]
        for step_s, key in STREAMS.items():
            steps = self._steps[step_s]
            ended = sorted(start_s for start_s in steps if start_s + step_s <= until_s)[:STEPS_PER_BATCH]
            for start_s in ended:
                self._entries += 1
                entry = HistoryEntry(self.writer, self._entries, start_s, list(steps.pop(start_s).values()))
                field = (keys.HISTORY_MESSAGE, encode(entry))
                orders.append(command("XADD", key, "MAXLEN", "~", MAX_ENTRIES[step_s], "*", *field))
            if ended:
                orders.append(command("EXPIRE", key, STREAM_TTL_S[step_s]))
        if not orders:
            return None
        self._batches += 1
        orders.append(command("SET", keys.history_writer(self.writer), self._batches, "EX", WRITER_TTL_S))
        return Batch(self._batches, orders, day_sums)
