# SPDX-License-Identifier: Apache-2.0
"""One OpenAI request from its client to an engine, and the answer back: bodies and streams as they are, byte for byte.

What is to be placed is read in `reading.py`, which worker takes it is `placing.py`'s, when another one is asked is `failure.py`'s.
An engine's errors are the client's; the router's own say what to do.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

import msgspec

import kvrouter.router.proxy.headers as h
from kvrouter.router.allow_list import AllowList
from kvrouter.router.errors import NoWorker, RouterError, Saturated, WorkerSilent, WorkerUnreachable
from kvrouter.router.metrics import Metrics
from kvrouter.router.model_names import Served
from kvrouter.router.names import WorkerKey
from kvrouter.router.placement import Ask, Placement
from kvrouter.router.placing import Placing
from kvrouter.router.proxy.addresses import Addresses
from kvrouter.router.proxy.admission import Admission
from kvrouter.router.proxy.client import Client
from kvrouter.router.proxy.connection import AnswerHead, Connection
from kvrouter.router.proxy.failure import GONE_STATUSES, Failure, Kind
from kvrouter.router.proxy.pool import Pool
from kvrouter.router.proxy.reading import Reading, Request, Tokens
from kvrouter.router.proxy.target import Target
from kvrouter.router.registration import Registration

log = logging.getLogger("kvrouter.proxy")

EVENT_STREAM = b"text/event-stream"
FIRST_ERROR = 400
FIRST_SERVER_ERROR = 500


class _Answer:
    """An attempt that came as far as the first byte of an answer."""

    def __init__(self, placement: Placement, target: Target, connection: Connection, head: AnswerHead) -> None:
        self.placement = placement
        self.target = target
        self.connection = connection
        self.head = head


class Proxy:
    """Belongs to one loop. `close` when no request is under way any more.

    worker_key: sent to engines in place of the client's Authorization, which goes on where the router has no key of its own."""

    def __init__(
        self,
        *,
        placing: Placing,
        tokens: Tokens,
        resolve: Callable[[str], Served],
        registrations: Callable[[], Sequence[Registration]],
        admission: Admission,
        pool: Pool,
        metrics: Metrics,
        allowed: AllowList,
        silence_s: float,
        worker_key: str | None,
        has_own_key: bool,
        clock: Callable[[], float],
    ) -> None:
        """silence_s: how long an engine may say nothing. clock: seconds, monotonic."""
        self._placing = placing
        self._reading = Reading(tokens, resolve, lambda: sorted(self._addresses().models), self._authorization)
        self._registrations = registrations
        self._admission = admission
        self._pool = pool
        self._metrics = metrics
        self._allowed = allowed
        self._silence_s = silence_s
        self._worker_authorization = None if worker_key is None else f"Bearer {worker_key}".encode()
        self._has_own_key = has_own_key
        self._clock = clock
        self._open = 0
        metrics.proxy_open.set_function(lambda: self._open)
        self._addressed: Sequence[Registration] | None = None
        self._known_addresses = Addresses((), allowed)

    async def forward(self, client: Client) -> None:
        """Answers the client; raises nothing but defects and its own cancellation, which means that the client is gone."""
        began_s = self._clock()
        request = Request(client)
        outcome = "client_gone"
        self._open += 1
        try:
            ask = await self._reading.read(request)
            answer = await self._answer(request, ask)
            self._metrics.observe_first_byte(client.path, self._clock() - began_s)
            outcome = await self._relay(request, answer, predicted=ask.question.token_ids is not None)
        except RouterError as error:
            outcome = "unreachable" if isinstance(error, WorkerUnreachable | WorkerSilent) else "refused"
            client.refuse(error, [(h.REQUEST_ID, request.request_id), *_retried(request)])
        except Exception:
            outcome = "bug"
            raise
        finally:
            self._open -= 1
            self._metrics.count_proxied(client.path, outcome)

    def closed(self, worker: WorkerKey) -> str | None:
        """Why a worker takes no new request now; None when it does."""
        return self._admission.problem(worker)

    def health(self) -> list[str]:
        """Which workers are sent nothing because requests to them failed."""
        return self._admission.health()

    def close(self) -> None:
        self._pool.close()

    def _authorization(self, headers: h.Headers) -> bytes | None:
        """What an engine is sent: its own key, else the client's word unless that is meant for this router."""
        if self._worker_authorization is not None or self._has_own_key:
            return self._worker_authorization
        return h.header(headers, b"authorization")

    async def _answer(self, request: Request, ask: Ask) -> _Answer:
        """The first byte of an answer, from whichever worker gives one. Raises RouterError."""
        # A gateway's word that its engine is gone: the client's, if nobody has a better one.
        spare: _Answer | None = None
        error: RouterError | None = None
        try:
            while True:
                try:
                    placement = await self._place(ask)
                except (NoWorker, Saturated):
                    if spare is not None:
                        answer, spare = spare, None
                        return answer
                    if error is not None:
                        # What the last one said is more than that no other is left.
                        raise error from None
                    raise
                if spare is not None:
                    spare.connection.close()
                    spare = None
                try:
                    answer = await self._attempt(request, placement)
                except Failure as caught:
                    failure, error = caught, _error_of(caught)
                    if not request.attempts.failed(_named(placement), failure):
                        raise error from None
                else:
                    if answer.head.status not in GONE_STATUSES:
                        return answer
                    failure = Failure(Kind.GONE, f"the engine answers {answer.head.status}")
                    self._count(placement.worker, failure)
                    if not request.attempts.failed(_named(placement), failure):
                        return answer
                    placement.done()
                    spare = answer
                self._metrics.proxy_retries.labels(failure.kind.value).inc()
                ask = _without(ask, {placement.worker.worker_id})
        finally:
            if spare is not None:
                spare.connection.close()

    async def _place(self, ask: Ask) -> Placement:
        """A place at a worker that can be sent something."""
        placement = await self._placing.place(ask)
        addresses = self._addresses()
        if placement.worker in addresses.targets:
            return placement
        placement.done()
        if ask.pinned is None:
            placement = await self._placing.place(_without(ask, addresses.unreachable))
            if placement.worker in addresses.targets:
                return placement
            placement.done()
        raise NoWorker("no worker can take it: register the engine's HTTP address (url), one that is allowed")

    def _addresses(self) -> Addresses:
        registrations = self._registrations()
        if registrations is not self._addressed:
            self._addressed = registrations
            self._known_addresses = Addresses(registrations, self._allowed)
        return self._known_addresses

    async def _attempt(self, request: Request, placement: Placement) -> _Answer:
        """The first byte of this worker's answer; its breaker knows how it went. Raises Failure."""
        worker, client = placement.worker, request.client
        addresses = self._addresses()
        target = addresses.targets[worker]
        head = h.request_head(
            target,
            client.url,
            client.headers,
            length=len(request.body),
            request_id=request.request_id,
            authorization=self._authorization(client.headers),
            rank=addresses.ranks.get(worker),
        )
        self._admission.begun(worker)
        try:
            connection, answered = await self._exchange(request, placement, target, head)
        except Failure as failure:
            placement.done()
            self._count_failure(worker, failure)
            raise
        except BaseException:
            placement.done()
            self._admission.unknown(worker)
            raise
        if answered.status < FIRST_SERVER_ERROR:
            self._admission.answered(worker)
        else:
            self._admission.failed(worker, f"it answers {answered.status}")
        return _Answer(placement, target, connection, answered)

    async def _exchange(
        self, request: Request, placement: Placement, target: Target, head: bytes
    ) -> tuple[Connection, AnswerHead]:
        """Over a kept connection where there is one, over a new one where it was closed. Raises Failure."""
        connection = self._pool.idle(target) if request.attempts.reuses_connections else None
        if connection is not None:
            try:
                return connection, await self._ask(connection, request, placement, head)
            except Failure as failure:
                if failure.kind is not Kind.STALE:
                    raise
                self._count(placement.worker, failure)
                request.attempts.stale(_named(placement))
        connection = await self._pool.connect(target)
        return connection, await self._ask(connection, request, placement, head)

    async def _ask(self, connection: Connection, request: Request, placement: Placement, head: bytes) -> AnswerHead:
        try:
            with self._admission.waiting(placement.worker, connection):
                return await connection.ask(head, request.body, self._silence_s)
        except BaseException:
            connection.close()
            raise

    async def _relay(self, request: Request, answer: _Answer, *, predicted: bool) -> str:
        """Passes the answer on, until its end; how it ended. predicted: whether the hit of the choice is a prediction."""
        placement, connection, head, client = answer.placement, answer.connection, answer.head, request.client
        added = [
            (h.WORKER, _named(placement).encode()),
            (h.SELECTION_ID, placement.selection_id.encode()),
            *_retried(request),
        ]
        if predicted:
            added.append((h.PREDICTED_HIT, b"%d" % placement.choice.hit.disk))
        if _streams(head):
            # The first byte of any other answer comes with its last token.
            placement.first_token()
        try:
            client.begin(head, h.answer_headers(head.headers, added, request.request_id), connection)
            await connection.relay(client.send)
            client.finish()
        except Failure as failure:
            connection.close()
            client.break_off()
            self._count_failure(placement.worker, failure)
            return "cut"
        except BaseException:
            connection.close()
            raise
        finally:
            placement.done()
        self._pool.give_back(answer.target, connection)
        outcome = _outcome(head.status)
        self._metrics.count_answer(placement.worker, outcome)
        if log.isEnabledFor(logging.DEBUG):
            extra = {"path": client.path, "worker": placement.worker, "status": head.status}
            log.debug("proxied", extra=extra | {"trail": request.attempts.trail})
        return outcome

    def _count_failure(self, worker: WorkerKey, failure: Failure) -> None:
        self._count(worker, failure)
        self._admission.failed(worker, failure.text)

    def _count(self, worker: WorkerKey, failure: Failure) -> None:
        self._metrics.proxy_failures.labels(self._metrics.worker_label(worker), failure.kind.value).inc()


def _without(ask: Ask, worker_ids: Iterable[str]) -> Ask:
    """The same, but for these workers."""
    excluded = ask.question.exclude_worker_ids.union(worker_ids)
    return msgspec.structs.replace(ask, question=msgspec.structs.replace(ask.question, exclude_worker_ids=excluded))


def _named(placement: Placement) -> str:
    return h.named_in_header(placement.worker.route_name)


def _outcome(status: int) -> str:
    if status >= FIRST_SERVER_ERROR:
        return "server_error"
    return "client_error" if status >= FIRST_ERROR else "ok"


def _streams(head: AnswerHead) -> bool:
    kind = h.header(head.headers, b"content-type")
    return kind is not None and kind.startswith(EVENT_STREAM)


def _retried(request: Request) -> h.Headers:
    trail = request.attempts.trail
    return [(h.RETRIED, ", ".join(trail).encode())] if trail else []


def _error_of(failure: Failure) -> RouterError:
    """What the client is told when no worker answered."""
    if failure.kind in (Kind.SILENT, Kind.CONNECT_TIMEOUT):
        return WorkerSilent(f"{failure.text}; send the request again, or raise answer_timeout_s of the router")
    return WorkerUnreachable(f"{failure.text}; no other worker was asked or could answer; send the request again")
