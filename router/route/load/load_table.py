# SPDX-License-Identifier: Apache-2.0
"""The load of every worker: the reservations of this process, and the totals that other processes report. Pure.

A reservation counts from the choice until its release or expiry: its prefill tokens until the first token at the
latest, its decode tokens to the end. The tokens that a worker lends to a request count until that request's first
token. Other processes report totals, never differences, so the next message repairs a lost one.

Invariants: no total is ever negative. All totals are 0 once all reservations have ended and all other processes are
silent or report no load.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile

import msgspec

from kvrouter.router.base.common.errors import Conflict
from kvrouter.router.base.common.ids import WorkerKey

# For a client that reserves and is never heard again. It is longer than nearly all answers take, and an engine that
# reports that it is idle ends the reservation earlier.
RESERVATION_TTL_S = 600.0
# For a prefill whose end is never reported, as by a gateway that only uses `DELETE`.
PREFILL_TTL_S = 60.0
# Some 300 bytes each. One process has connections for fewer; beyond the limit, the oldest reservations are dropped.
MAX_RESERVATIONS = 100_000


class Totals(msgspec.Struct, frozen=True, gc=False):
    """The load of one process at one worker."""

    prefill_tokens: int = 0
    decode_tokens: int = 0
    requests: int = 0
    # Tokens of its CPU tier that other workers fetch.
    lent_tokens: int = 0


NOTHING = Totals()


class WorkerLoad:
    """The load of all processes at one worker. Its plain attributes are fast to read at every choice."""

    __slots__ = ("decode_tokens", "head_tokens", "lent_tokens", "prefill_tokens", "requests", "since_s")

    def __init__(self) -> None:
        self.prefill_tokens = 0
        self.decode_tokens = 0
        self.requests = 0
        self.lent_tokens = 0
        # When the worker began with the prompt that it is computing: at the first token of the previous prompt, or when
        # this prompt arrived at an empty queue.
        self.since_s = 0.0
        # Tokens to compute of that prompt if it belongs to this process, else 0.
        self.head_tokens = 0

    def change(self, before: Totals, after: Totals, now: float) -> None:
        """Replace a process's part of this load."""
        if after.prefill_tokens < before.prefill_tokens or not self.prefill_tokens:
            self.since_s = now
        self.prefill_tokens += after.prefill_tokens - before.prefill_tokens
        self.decode_tokens += after.decode_tokens - before.decode_tokens
        self.requests += after.requests - before.requests
        self.lent_tokens += after.lent_tokens - before.lent_tokens

    @property
    def is_idle(self) -> bool:
        """Whether no process has any load at the worker."""
        return not (self.prefill_tokens or self.decode_tokens or self.requests or self.lent_tokens)


class Reservation(msgspec.Struct, gc=False):
    """The load of one request.

    The parts of it that were released are 0. It stays in the table until it ends, so that its release finds it.
    """

    worker: WorkerKey
    prefill_tokens: int
    decode_tokens: int
    made_s: float
    # The number of requests as its engine counts them: each prompt of a list and each answer to a prompt is one.
    requests: int = 1
    # Whether it is part of the worker's load; False after its engine reported that it is idle.
    counts: bool = True
    # The worker that lends blocks for its prompt, and how many tokens; None and 0 without one, or after the first token.
    source: WorkerKey | None = None
    lent_tokens: int = 0


class LoadTable:
    """The load of all workers. Not thread-safe; the current time is passed in and never goes back."""

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
        # Ordered by age, because all have the same lifetime.
        self._reservations: dict[str, Reservation] = {}
        self._prefilling: dict[str, Reservation] = {}
        # Reservations with queued prefill tokens by worker, in the order in which they are computed.
        self._queues: dict[WorkerKey, dict[str, Reservation]] = {}
        # The totals of this process; and by process, when it was last heard and its totals.
        self._own: dict[WorkerKey, Totals] = {}
        self._others: dict[str, tuple[float, dict[WorkerKey, Totals]]] = {}
        self._loads: dict[WorkerKey, WorkerLoad] = {}
        # Workers whose totals in this process changed since `own` or `own_changes` was last called.
        self._changed: set[WorkerKey] = set()

    def __len__(self) -> int:
        return len(self._reservations)

    def __contains__(self, selection_id: str) -> bool:
        return selection_id in self._reservations

    @property
    def loads(self) -> Mapping[WorkerKey, WorkerLoad]:
        """The load by worker; a worker that is absent has none."""
        return self._loads

    # -- load of this process

    def reserve(
        self,
        selection_id: str,
        worker: WorkerKey,
        prefill_tokens: int,
        decode_tokens: int,
        now: float,
        requests: int = 1,
        source: WorkerKey | None = None,
        lent_tokens: int = 0,
    ) -> list[str]:
        """Count a request at a worker from now on, and return the ids of the old reservations dropped to make room.

        Args:
            selection_id: The id of the reservation.
            worker: The worker.
            prefill_tokens: The tokens to compute before the first token.
            decode_tokens: The tokens that are held while it is decoded.
            now: The current time.
            requests: The number of requests that its engine makes of it.
            source: The worker from which blocks are fetched for it, or None.
            lent_tokens: The tokens that are fetched.

        Raises:
            Conflict: The id is in use.
        """
        if selection_id in self._reservations:
            raise Conflict(f"selection {selection_id!r} is already reserved: release it first, or use another id")
        dropped = []
        while len(self._reservations) >= self._max:
            dropped.append(next(iter(self._reservations)))
            self.release(dropped[-1], now)
        reservation = Reservation(
            worker, prefill_tokens, decode_tokens, now, requests, source=source, lent_tokens=lent_tokens
        )
        self._reservations[selection_id] = reservation
        self._join_queue(selection_id, reservation)
        self._add(worker, prefill_tokens, decode_tokens, requests, now)
        if source is not None:
            self._add(source, 0, 0, 0, now, lent_tokens)
        return dropped

    def prefill_done(self, selection_id: str, now: float) -> bool:
        """Stop counting a reservation's prefill; return False if this process has no such reservation."""
        reservation = self._reservations.get(selection_id)
        if reservation is None:
            return False
        self._leave_queue(selection_id, reservation.worker, now)
        if reservation.counts and reservation.prefill_tokens:
            self._add(reservation.worker, -reservation.prefill_tokens, 0, 0, now)
        reservation.prefill_tokens = 0
        return True

    def renew(self, selection_id: str, now: float, prefill_tokens: int | None = None) -> None:
        """Start a reservation's time again, because its request begins only now; ignore a reservation that ended.

        It counts again even if its engine reported before that it is idle.

        Args:
            selection_id: Id of the reservation.
            now: The current time.
            prefill_tokens: Replaces the reserved prefill tokens, unless None.
        """
        reservation = self._reservations.pop(selection_id, None)
        if reservation is None:
            return
        self._leave_queue(selection_id, reservation.worker, now)
        self._uncount(reservation, now)
        if prefill_tokens is not None:
            reservation.prefill_tokens = prefill_tokens
        reservation.made_s, reservation.counts = now, True
        self._reservations[selection_id] = reservation
        self._join_queue(selection_id, reservation)
        self._add(reservation.worker, reservation.prefill_tokens, reservation.decode_tokens, reservation.requests, now)

    def release(self, selection_id: str, now: float) -> bool:
        """Stop counting a reservation and forget it; return False if this process has no such reservation."""
        reservation = self._reservations.pop(selection_id, None)
        if reservation is None:
            return False
        self._leave_queue(selection_id, reservation.worker, now)
        self._uncount(reservation, now)
        return True

    def void(self, worker: WorkerKey, before: float, now: float) -> int:
        """Stop counting reservations at a worker made before a time, and return how many; its engine is idle.

        They are over whether they were released or not, but stay in the table until they end.

        Args:
            worker: The worker that reported that it is idle.
            before: Reservations made at this time or later still count.
            now: The current time.
        """
        ended = 0
        if worker not in self._own:
            return 0
        for selection_id, reservation in self._reservations.items():
            if reservation.made_s >= before:
                break
            if reservation.worker == worker and reservation.counts:
                self._leave_queue(selection_id, worker, now)
                self._uncount(reservation, now)
                ended += 1
        return ended

    def expire(self, now: float) -> list[str]:
        """End the reservations and prefills that are too old, and return the ids of those reservations."""
        for selection_id in _made_until(self._prefilling, now - self._prefill_ttl_s):
            self.prefill_done(selection_id, now)
        expired = _made_until(self._reservations, now - self._ttl_s)
        for selection_id in expired:
            self.release(selection_id, now)
        return expired

    def _join_queue(self, selection_id: str, reservation: Reservation) -> None:
        self._prefilling[selection_id] = reservation
        if reservation.prefill_tokens:
            self._queues.setdefault(reservation.worker, {})[selection_id] = reservation

    def _leave_queue(self, selection_id: str, worker: WorkerKey, now: float) -> None:
        reservation = self._prefilling.pop(selection_id, None)
        if reservation is not None and reservation.source is not None:
            source, lent_tokens = reservation.source, reservation.lent_tokens
            reservation.source, reservation.lent_tokens = None, 0
            self._add(source, 0, 0, 0, now, -lent_tokens)
        queue = self._queues.get(worker)
        if queue is not None and queue.pop(selection_id, None) is not None and not queue:
            del self._queues[worker]

    def _uncount(self, reservation: Reservation, now: float) -> None:
        if reservation.counts:
            reservation.counts = False
            self._add(
                reservation.worker, -reservation.prefill_tokens, -reservation.decode_tokens, -reservation.requests, now
            )

    def _add(
        self,
        worker: WorkerKey,
        prefill_tokens: int,
        decode_tokens: int,
        requests: int,
        now: float,
        lent_tokens: int = 0,
    ) -> None:
        before = self._own.get(worker, NOTHING)
        after = Totals(
            before.prefill_tokens + prefill_tokens,
            before.decode_tokens + decode_tokens,
            before.requests + requests,
            before.lent_tokens + lent_tokens,
        )
        if after == NOTHING:
            self._own.pop(worker, None)
        else:
            self._own[worker] = after
        self._changed.add(worker)
        self._change(worker, before, after, now)

    def own(self) -> dict[WorkerKey, Totals]:
        """Return the totals of this process by worker, without workers at which it has no load."""
        self._changed.clear()
        return dict(self._own)

    def own_changes(self) -> dict[WorkerKey, Totals]:
        """Return the totals of this process that changed since the last call of this method or `own`.

        Workers whose totals fell to zero are included.
        """
        changes = {worker: self._own.get(worker, NOTHING) for worker in self._changed}
        self._changed.clear()
        return changes

    # -- load of other processes

    def heard(self, process: str, totals: Mapping[WorkerKey, Totals], *, whole: bool, now: float) -> None:
        """Apply a report of another process.

        Args:
            process: Name of the process that reports.
            totals: Its totals by worker.
            whole: Whether the report covers all workers; otherwise workers that it leaves out are unchanged.
            now: The current time.
        """
        _, stored = self._others.get(process, (now, {}))
        for worker in [worker for worker in stored if whole and worker not in totals]:
            self._change(worker, stored.pop(worker), NOTHING, now)
        for worker, after in totals.items():
            self._change(worker, stored.pop(worker, NOTHING), after, now)
            if after != NOTHING:
                stored[worker] = after
        self._others[process] = (now, stored)

    def forget_silent(self, before: float, now: float) -> list[str]:
        """Drop the load of processes that were last heard before a time, and return their names."""
        silent = [process for process, (heard_s, _) in self._others.items() if heard_s < before]
        for process in silent:
            self.forget_process(process, now)
        return silent

    def forget_process(self, process: str, now: float) -> None:
        """Drop the load of another process."""
        _, stored = self._others.pop(process, (0.0, {}))
        for worker, totals in stored.items():
            self._change(worker, totals, NOTHING, now)

    @property
    def others(self) -> int:
        """The number of other processes that report load."""
        return len(self._others)

    @property
    def processes(self) -> set[str]:
        """The names of the other processes that report load."""
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


def _made_until(reservations: dict[str, Reservation], until_s: float) -> list[str]:
    """Return the ids of the reservations made until `until_s`; the reservations must be ordered by age."""
    return [selection_id for selection_id, _ in takewhile(lambda item: item[1].made_s <= until_s, reservations.items())]
