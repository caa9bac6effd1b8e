# SPDX-License-Identifier: Apache-2.0
"""The load of every worker: what this process has reserved there, and what other processes report. Pure.

A reservation counts from the choice until its release or expiry: its prefill tokens until the first token at the
latest, its decode tokens to the end. Others report totals, never differences, so the next message repairs a lost one.
Invariants: no total is ever negative; all are 0 once all reservations have ended and all other processes are silent or
have none.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile

import msgspec

from kvrouter.router.base.common.errors import Conflict
from kvrouter.router.base.common.ids import WorkerKey

# A client that reserved and was never heard again: longer than nearly all answers take, and the engine's own numbers
# take the load away earlier where the engine turns out to be idle.
RESERVATION_TTL_S = 600.0
# A prefill whose end nobody reports, as a gateway that only uses `DELETE`.
PREFILL_TTL_S = 60.0
# Some 300 bytes each. More in flight at one process than any has connections for; beyond, the oldest count no longer.
MAX_RESERVATIONS = 100_000


class Totals(msgspec.Struct, frozen=True, gc=False):
    """What one process has in flight at one worker."""

    prefill_tokens: int = 0
    decode_tokens: int = 0
    requests: int = 0


NOTHING = Totals()


class WorkerLoad:
    """What is in flight at one worker, of all processes. Read by each choice, so plain attributes.

    since_s: when it began with the prompt that it computes: the last one's first token, or when there was none before.
    head_tokens: of that prompt, if it is one of this process, else 0."""

    __slots__ = ("decode_tokens", "head_tokens", "prefill_tokens", "requests", "since_s")

    def __init__(self) -> None:
        self.prefill_tokens = 0
        self.decode_tokens = 0
        self.requests = 0
        self.since_s = 0.0
        self.head_tokens = 0

    def change(self, before: Totals, after: Totals, now: float) -> None:
        if after.prefill_tokens < before.prefill_tokens or not self.prefill_tokens:
            self.since_s = now
        self.prefill_tokens += after.prefill_tokens - before.prefill_tokens
        self.decode_tokens += after.decode_tokens - before.decode_tokens
        self.requests += after.requests - before.requests

    @property
    def is_idle(self) -> bool:
        return not (self.prefill_tokens or self.decode_tokens or self.requests)


class Reservation(msgspec.Struct, gc=False):
    """One request's load. What of it has been released is 0; it stays known until its end, so that a release is
    found."""

    worker: WorkerKey
    prefill_tokens: int
    decode_tokens: int
    made_s: float
    counts: bool = True


class LoadTable:
    """All workers' load. Not thread-safe; time is passed in and never goes back."""

    def __init__(
        self,
        *,
        ttl_s: float = RESERVATION_TTL_S,
        prefill_ttl_s: float = PREFILL_TTL_S,
        max_reservations: int = MAX_RESERVATIONS,
    ) -> None:
        self._ttl_s = ttl_s
        self._prefill_ttl_s = prefill_ttl_s
        self._max = max_reservations
        # By age, as all live equally long.
        self._reservations: dict[str, Reservation] = {}
        self._prefilling: dict[str, Reservation] = {}
        # The same by worker, the first to be computed first.
        self._queues: dict[WorkerKey, dict[str, Reservation]] = {}
        self._own: dict[WorkerKey, Totals] = {}
        self._others: dict[str, tuple[float, dict[WorkerKey, Totals]]] = {}
        self._loads: dict[WorkerKey, WorkerLoad] = {}
        # Workers whose own totals changed since they were last taken.
        self._changed: set[WorkerKey] = set()

    def __len__(self) -> int:
        return len(self._reservations)

    def __contains__(self, selection_id: str) -> bool:
        return selection_id in self._reservations

    @property
    def loads(self) -> Mapping[WorkerKey, WorkerLoad]:
        """Workers with something in flight; one that is absent has nothing."""
        return self._loads

    # -- what this process has in flight

    def reserve(
        self, selection_id: str, worker: WorkerKey, prefill_tokens: int, decode_tokens: int, now: float
    ) -> list[str]:
        """Counts from now on; returns the oldest ones that were dropped to make room. Raises Conflict for an id in
        use."""
        if selection_id in self._reservations:
            raise Conflict(f"selection {selection_id!r} is already reserved: release it first, or use another id")
        dropped = []
        while len(self._reservations) >= self._max:
            dropped.append(next(iter(self._reservations)))
            self.release(dropped[-1], now)
        made = Reservation(worker, prefill_tokens, decode_tokens, now)
        self._reservations[selection_id] = made
        self._join_queue(selection_id, made)
        self._add(worker, prefill_tokens, decode_tokens, 1, now)
        return dropped

    def prefill_done(self, selection_id: str, now: float) -> bool:
        """Its prefill counts no longer. False: there is no such reservation here."""
        found = self._reservations.get(selection_id)
        if found is None:
            return False
        self._leave_queue(selection_id, found.worker)
        if found.counts and found.prefill_tokens:
            self._add(found.worker, -found.prefill_tokens, 0, 0, now)
        found.prefill_tokens = 0
        return True

    def renew(self, selection_id: str, now: float, prefill_tokens: int | None = None) -> None:
        """It begins only now: its time starts again, and it counts although its engine reported before that it is idle.
        prefill_tokens: replaces the reserved amount. A reservation that ended stays ended."""
        found = self._reservations.pop(selection_id, None)
        if found is None:
            return
        self._leave_queue(selection_id, found.worker)
        self._uncount(found, now)
        if prefill_tokens is not None:
            found.prefill_tokens = prefill_tokens
        found.made_s, found.counts = now, True
        self._reservations[selection_id] = found
        self._join_queue(selection_id, found)
        self._add(found.worker, found.prefill_tokens, found.decode_tokens, 1, now)

    def release(self, selection_id: str, now: float) -> bool:
        """It counts no longer and is forgotten. False: there is no such reservation here."""
        found = self._reservations.pop(selection_id, None)
        if found is None:
            return False
        self._leave_queue(selection_id, found.worker)
        self._uncount(found, now)
        return True

    def void(self, worker: WorkerKey, before: float, now: float) -> int:
        """The engine reports that it is idle: reservations made there before `then` are over, released or not."""
        ended = 0
        if worker not in self._own:
            return 0
        for selection_id, found in self._reservations.items():
            if found.made_s >= before:
                break
            if found.worker == worker and found.counts:
                self._leave_queue(selection_id, worker)
                self._uncount(found, now)
                ended += 1
        return ended

    def expire(self, now: float) -> list[str]:
        """Ends what is too old; returns which reservations that were."""
        for selection_id in _made_until(self._prefilling, now - self._prefill_ttl_s):
            self.prefill_done(selection_id, now)
        expired = _made_until(self._reservations, now - self._ttl_s)
        for selection_id in expired:
            self.release(selection_id, now)
        return expired

    def _join_queue(self, selection_id: str, made: Reservation) -> None:
        self._prefilling[selection_id] = made
        if made.prefill_tokens:
            self._queues.setdefault(made.worker, {})[selection_id] = made

    def _leave_queue(self, selection_id: str, worker: WorkerKey) -> None:
        self._prefilling.pop(selection_id, None)
        queue = self._queues.get(worker)
        if queue is not None and queue.pop(selection_id, None) is not None and not queue:
            del self._queues[worker]

    def _uncount(self, found: Reservation, now: float) -> None:
        if found.counts:
            found.counts = False
            self._add(found.worker, -found.prefill_tokens, -found.decode_tokens, -1, now)

    def _add(self, worker: WorkerKey, prefill_tokens: int, decode_tokens: int, requests: int, now: float) -> None:
        before = self._own.get(worker, NOTHING)
        after = Totals(
            before.prefill_tokens + prefill_tokens, before.decode_tokens + decode_tokens, before.requests + requests
        )
        if after == NOTHING:
            self._own.pop(worker, None)
        else:
            self._own[worker] = after
        self._changed.add(worker)
        self._change(worker, before, after, now)

    def own(self) -> dict[WorkerKey, Totals]:
        """What this process has in flight; workers with nothing are left out."""
        self._changed.clear()
        return dict(self._own)

    def own_changes(self) -> dict[WorkerKey, Totals]:
        """The part of `own` that changed since it or this was last called, including workers that fell to zero."""
        changes = {worker: self._own.get(worker, NOTHING) for worker in self._changed}
        self._changed.clear()
        return changes

    # -- what other processes have in flight

    def heard(self, process: str, totals: Mapping[WorkerKey, Totals], *, whole: bool, now: float) -> None:
        """The report of `process`. whole: of all workers; else only of these, and the others are unchanged."""
        _, known = self._others.get(process, (now, {}))
        for worker in [worker for worker in known if whole and worker not in totals]:
            self._change(worker, known.pop(worker), NOTHING, now)
        for worker, after in totals.items():
            self._change(worker, known.pop(worker, NOTHING), after, now)
            if after != NOTHING:
                known[worker] = after
        self._others[process] = (now, known)

    def forget_silent(self, before: float, now: float) -> list[str]:
        """Processes that were last heard before then: they are gone, and their load with them."""
        gone = [process for process, (heard_s, _) in self._others.items() if heard_s < before]
        for process in gone:
            self.forget_process(process, now)
        return gone

    def forget_process(self, process: str, now: float) -> None:
        _, known = self._others.pop(process, (0.0, {}))
        for worker, totals in known.items():
            self._change(worker, totals, NOTHING, now)

    @property
    def others(self) -> int:
        """How many other processes are heard."""
        return len(self._others)

    @property
    def processes(self) -> set[str]:
        """Their names."""
        return set(self._others)

    def _change(self, worker: WorkerKey, before: Totals, after: Totals, now: float) -> None:
        load = self._loads.get(worker)
        if load is None:
            load = self._loads[worker] = WorkerLoad()
        load.change(before, after, now)
        queue = self._queues.get(worker)
        load.head_tokens = next(iter(queue.values())).prefill_tokens if queue else 0
        if load.is_idle:
            del self._loads[worker]


def _made_until(reservations: dict[str, Reservation], then: float) -> list[str]:
    return [selection_id for selection_id, _ in takewhile(lambda item: item[1].made_s <= then, reservations.items())]
