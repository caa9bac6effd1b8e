# SPDX-License-Identifier: Apache-2.0
"""Which workers take new requests: those that are not draining and whose breaker is not open.

It also tracks the requests that wait for a worker's first byte: they stop waiting when its health check fails.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvrouter.router.common.escaping import printable
from kvrouter.router.common.ids import WorkerKey
from kvrouter.router.matching.matcher import WorkerView
from kvrouter.router.proxy.circuit_breaker import Breaker, BreakerState
from kvrouter.router.proxy.proxy_metrics import ProxyMetrics
from kvrouter.router.upstream.connection import Connection
from kvrouter.router.upstream.failure import Failure, Kind
from kvrouter.router.workers.stream_state import StreamState

DRAINING = "it is draining and takes no new requests until its state is set to active"

log = logging.getLogger("kvrouter.proxy")


class Admission:
    """One breaker for each worker that was sent a request or was lost.

    drains: whether a worker is draining. clock: seconds, monotonic."""

    def __init__(self, drains: Callable[[WorkerKey], bool], clock: Callable[[], float], metrics: ProxyMetrics) -> None:
        self._drains = drains
        self._clock = clock
        self._metrics = metrics
        self._known: dict[WorkerKey, Breaker] = {}
        self._shown: dict[WorkerKey, BreakerState] = {}
        self._waiting: dict[WorkerKey, set[Connection]] = {}
        self._down: set[WorkerKey] = set()

    def problem(self, worker: WorkerKey) -> str | None:
        """Why `worker` takes no new requests now; None if it does."""
        if self._drains(worker):
            return DRAINING
        breaker = self._known.get(worker)
        # Nearly all are closed.
        return None if breaker is None or breaker.until_s is None else breaker.problem(self._clock())

    def health(self) -> list[str]:
        """Breakers that are open; an engine whose health checks fail is reported with its stream."""
        return [
            f"worker {printable(worker.route_name)} takes no requests: {problem}"
            for worker in self._known
            if (problem := self.breaker_problem(worker)) is not None
        ]

    def breaker_problem(self, worker: WorkerKey) -> str | None:
        """Why its breaker admits no requests; None where it does, and where its health checks fail."""
        breaker = self._known.get(worker)
        return None if breaker is None or worker in self._down else breaker.problem(self._clock())

    def begun(self, worker: WorkerKey) -> None:
        breaker = self._known.get(worker)
        if breaker is None:
            breaker = self._known[worker] = Breaker()
        if breaker.until_s is not None:
            breaker.begun(self._clock())

    def answered(self, worker: WorkerKey) -> None:
        breaker = self._known.get(worker)
        if breaker is not None and (breaker.failures or breaker.until_s is not None):
            breaker.answered()
            self._show(worker, breaker)

    def failed(self, worker: WorkerKey, problem: str) -> None:
        if (breaker := self._known.get(worker)) is not None:
            breaker.failed(problem, self._clock())
            self._show(worker, breaker)

    def unknown(self, worker: WorkerKey) -> None:
        if (breaker := self._known.get(worker)) is not None:
            breaker.unknown()

    def waits(self, worker: WorkerKey, connection: Connection) -> None:
        """A request waits there for its first byte, until `waits_no_more`."""
        self._waiting.setdefault(worker, set()).add(connection)

    def waits_no_more(self, worker: WorkerKey, connection: Connection) -> None:
        waiting = self._waiting[worker]
        waiting.discard(connection)
        if not waiting:
            del self._waiting[worker]

    def on_view(self, worker: WorkerKey, view: WorkerView | None) -> None:
        """Called when the core's status of `worker` changes; None: it was dropped."""
        if view is None:
            self._down.discard(worker)
            self._known.pop(worker, None)
            self._shown.pop(worker, None)
            return
        down = view.state is StreamState.DOWN
        if down == (worker in self._down):
            return
        if down:
            self._down.add(worker)
            breaker = self._known.setdefault(worker, Breaker())
            breaker.lost(view.reason, self._clock())
            for connection in list(self._waiting.get(worker, ())):
                connection.give_up(Failure(Kind.LOST, view.reason))
        else:
            self._down.discard(worker)
            breaker = self._known[worker]
            breaker.found()
        self._show(worker, breaker)

    def _show(self, worker: WorkerKey, breaker: Breaker) -> None:
        now = self._clock()
        state = breaker.state(now)
        before = self._shown.get(worker, BreakerState.CLOSED)
        if state is before:
            return
        self._shown[worker] = state
        for known in BreakerState:
            self._metrics.breaker_state(worker)(known).set(known is state)
        extra = {"worker": worker, "state": state.value, "reason": breaker.problem(now) or ""}
        log.log(logging.INFO if state is BreakerState.CLOSED else logging.WARNING, "breaker", extra=extra)
