# SPDX-License-Identifier: Apache-2.0
"""The admission of new requests to workers: a worker takes them unless it is draining or its breaker is open.

Each request to a worker is an `Exchange`, which reports its outcome to the breaker. Requests that wait for a worker's
first byte are registered here too: they stop waiting when the worker's health check fails.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvrouter.router.base.common.escaping import printable
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.index.matching.matcher import WorkerView
from kvrouter.router.model.upstream.connection import Connection
from kvrouter.router.model.upstream.failure import Failure, Kind
from kvrouter.router.model.workers.stream_state import StreamState
from kvrouter.router.route.placement.candidates import DRAINING
from kvrouter.router.serve.proxy.circuit_breaker import Breaker, BreakerState
from kvrouter.router.serve.proxy.proxy_metrics import ProxyMetrics
from kvrouter.router.serve.proxy.refused_requests import FIRST_ERROR, FIRST_SERVER_ERROR, RefusedRequests

log = logging.getLogger("kvrouter.proxy")


class Exchange:
    """One request at one worker, as the worker's breaker sees it.

    Only the first report of its end counts.
    """

    __slots__ = ("_admission", "_breaker", "_caller", "_is_over", "_status", "_tried", "_worker")

    def __init__(
        self, admission: Admission, worker: WorkerKey, breaker: Breaker, caller: Callable[[], int], *, tried: bool
    ) -> None:
        """Begin the exchange.

        Args:
            admission: The admission to which the exchange belongs.
            worker: The worker.
            breaker: The worker's breaker.
            caller: Returns a number for the client, 0 if it is not known.
            tried: Whether this is the trial request, which decides if a failed worker takes requests again.
        """
        self._admission = admission
        self._worker = worker
        self._breaker = breaker
        self._caller = caller
        self._tried = tried
        self._status = 0
        self._is_over = False

    def answered(self, status: int) -> None:
        """Note the first byte of an answer. A 5xx is a failure at once, whatever follows it."""
        self._status = status
        if status >= FIRST_SERVER_ERROR:
            self.failed(f"it answers {status}")
        else:
            self._breaker.answered()

    def ended(self) -> None:
        """Note that the answer is complete."""
        if self._ends():
            self._admission.refused.add(self._worker, self._status, self._caller)
            self._breaker.ended(tried=self._tried, is_client_error=self._status >= FIRST_ERROR)
            if self._tried:
                self._show()

    def failed(self, problem: str) -> None:
        """Note that there is no answer because of the worker."""
        if self._ends():
            self._breaker.failed(problem, self._admission.clock(), tried=self._tried)
            self._show()

    def spoiled(self, problem: str) -> None:
        """Note an answer that began well but is useless because of the worker, for example because it broke off."""
        if self._ends():
            self._breaker.spoiled(problem, self._admission.clock(), tried=self._tried)
            self._show()

    def unknown(self) -> None:
        """Note that the request ended for a reason that says nothing about the worker."""
        if self._ends():
            self._breaker.unknown(tried=self._tried)

    def _ends(self) -> bool:
        """Mark the exchange as over, and return whether it was not over before."""
        is_over, self._is_over = self._is_over, True
        return not is_over

    def _show(self) -> None:
        self._admission.show(self._worker, self._breaker)


class Admission:
    """The breakers of all workers that were sent a request or whose health check failed."""

    def __init__(self, drains: Callable[[WorkerKey], bool], clock: Callable[[], float], metrics: ProxyMetrics) -> None:
        # Returns whether a worker is draining.
        self._drains = drains
        # Returns monotonic seconds.
        self.clock = clock
        self._metrics = metrics
        self.refused = RefusedRequests(clock)
        self._known: dict[WorkerKey, Breaker] = {}
        # The breakers' states that the metrics show now.
        self._shown: dict[WorkerKey, BreakerState] = {}
        # The connections of requests that wait for a worker's first byte.
        self._waiting: dict[WorkerKey, set[Connection]] = {}
        # The workers whose health check fails.
        self._down: set[WorkerKey] = set()

    def problem(self, worker: WorkerKey) -> str | None:
        """Return why the worker takes no new requests now, or None if it does."""
        if self._drains(worker):
            return DRAINING
        breaker = self._known.get(worker)
        # This is the fast path: nearly all breakers are closed.
        return None if breaker is None or breaker.until_s is None else breaker.problem(self.clock())

    def health(self) -> list[str]:
        """Return the problems of workers with an open breaker.

        A worker whose health check fails is left out, because its stream reports that.
        """
        return [
            f"worker {printable(worker.route_name)} takes no requests: {problem}"
            for worker in self._known
            if (problem := self.breaker_problem(worker)) is not None
        ]

    def breaker_problem(self, worker: WorkerKey) -> str | None:
        """Return why the worker's breaker admits no requests, or None if it does or if its health check fails."""
        breaker = self._known.get(worker)
        return None if breaker is None or worker in self._down else breaker.problem(self.clock())

    def begun(self, worker: WorkerKey, caller: Callable[[], int]) -> Exchange:
        """Note a request to a worker, and return the exchange on which its progress is reported.

        `caller` returns a number for the client, 0 if it is not known.
        """
        breaker = self._known.get(worker)
        if breaker is None:
            breaker = self._known[worker] = Breaker()
        tried = breaker.until_s is not None and breaker.begun(self.clock())
        return Exchange(self, worker, breaker, caller, tried=tried)

    def waits(self, worker: WorkerKey, connection: Connection) -> None:
        """Register a request that waits for the worker's first byte, until `waits_no_more`.

        If the worker's health check fails meanwhile, the connection gives the request up.
        """
        self._waiting.setdefault(worker, set()).add(connection)

    def waits_no_more(self, worker: WorkerKey, connection: Connection) -> None:
        """Forget a request that `waits` registered."""
        waiting = self._waiting[worker]
        waiting.discard(connection)
        if not waiting:
            del self._waiting[worker]

    def on_view(self, worker: WorkerKey, view: WorkerView | None) -> None:
        """Update the breaker after a change of the worker's status. `view` is None if the worker was dropped."""
        if view is None:
            self._down.discard(worker)
            self.refused.forget(worker)
            self._known.pop(worker, None)
            self._shown.pop(worker, None)
            return
        is_down = view.state is StreamState.DOWN
        if is_down == (worker in self._down):
            return
        if is_down:
            self._down.add(worker)
            breaker = self._known.setdefault(worker, Breaker())
            breaker.lost(view.reason, self.clock())
            for connection in list(self._waiting.get(worker, ())):
                connection.give_up(Failure(Kind.LOST, view.reason))
        else:
            self._down.discard(worker)
            breaker = self._known[worker]
            breaker.found()
        self.show(worker, breaker)

    def show(self, worker: WorkerKey, breaker: Breaker) -> None:
        """Update the metrics and the log if the state of the breaker has changed."""
        if self._known.get(worker) is not breaker:
            # The worker was dropped in the meantime.
            return
        now = self.clock()
        state = breaker.state(now)
        former_state = self._shown.get(worker, BreakerState.CLOSED)
        if state is former_state:
            return
        self._shown[worker] = state
        for possible_state in BreakerState:
            self._metrics.breaker_state(worker)(possible_state).set(possible_state is state)
        extra = {"worker": worker, "state": state.value, "reason": breaker.problem(now) or ""}
        log.log(logging.INFO if state is BreakerState.CLOSED else logging.WARNING, "breaker", extra=extra)
