# SPDX-License-Identifier: Apache-2.0
"""One request to one worker, until the first byte of its answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from http import HTTPStatus

import msgspec

import kvrouter.router.serve.proxy.headers as h
from kvrouter.router.base.common.errors import RouterError, WorkerSilent, WorkerUnreachable
from kvrouter.router.base.common.ids import WorkerKey
from kvrouter.router.model.upstream.connection import AnswerHead, Connection
from kvrouter.router.model.upstream.failure import Failure, Kind
from kvrouter.router.model.upstream.origin import Target
from kvrouter.router.model.upstream.pool import Pool
from kvrouter.router.serve.proxy.admission import Admission, Exchange
from kvrouter.router.serve.proxy.proxy_metrics import ProxyMetrics
from kvrouter.router.serve.proxy.request_reader import Request
from kvrouter.router.serve.proxy.worker_addresses import Addresses

# The kind of a retry in `ProxyMetrics.retries`.
KEY_CHANGED = "key"


class Sent(msgspec.Struct, frozen=True, eq=False):
    """An answer that has begun."""

    target: Target
    connection: Connection
    head: AnswerHead
    # The exchange needs one more report: how the answer ends.
    exchange: Exchange


class Attempt:
    """The sender of requests to workers, with a kept connection where one is open."""

    def __init__(
        self,
        *,
        addresses: Callable[[], Addresses],
        authorization: Callable[[h.Headers, Target], bytes | None],
        refresh_keys: Callable[[], Awaitable[None]],
        admission: Admission,
        pool: Pool,
        metrics: ProxyMetrics,
        silence_s: float,
    ) -> None:
        # Returns the current addresses.
        self._addresses = addresses
        # Returns the Authorization that an engine gets for a client's headers.
        self._authorization = authorization
        # Reads the engines' keys again if their file has changed.
        self._refresh_keys = refresh_keys
        self._admission = admission
        self._pool = pool
        self._metrics = metrics
        # The seconds for which an engine may send nothing.
        self.silence_s = silence_s

    async def send(
        self,
        request: Request,
        worker: WorkerKey,
        body: bytes,
        headers: h.Headers,
        added: h.Headers = h.NOTHING,
    ) -> Sent:
        """Send the request to the worker and return the beginning of its answer.

        Raises Failure if the worker does not answer.

        Args:
            request: The request of the client.
            worker: The worker, which must have an address.
            body: The body to send.
            headers: The client's headers to send.
            added: The router's own headers.
        """
        sent, key = await self._send(request, worker, body, headers, added)
        if key is None or sent.head.status != HTTPStatus.UNAUTHORIZED:
            return sent
        try:
            # The engine may have got a new key a moment before this router read it.
            await self._refresh_keys()
            target = self._addresses().targets.get(worker)
        except BaseException:
            # The client may hang up in this moment, before the answer has an owner that ends it.
            self.give_up(sent)
            raise
        if target is None or self._authorization(request.client.headers, target) == key:
            return sent
        self.give_up(sent)
        self._metrics.retries.labels(KEY_CHANGED).inc()
        sent, _ = await self._send(request, worker, body, headers, added)
        return sent

    async def _send(
        self, request: Request, worker: WorkerKey, body: bytes, headers: h.Headers, added: h.Headers
    ) -> tuple[Sent, bytes | None]:
        """Send the request once. Return the answer, and the Authorization header that was sent."""
        client = request.client
        addresses = self._addresses()
        target = addresses.targets[worker]
        authorization = self._authorization(client.headers, target)
        head = h.request_head(
            target,
            request.url,
            request.watch.sending(worker, target.host, target.port, headers),
            length=len(body),
            request_id=request.request_id,
            authorization=authorization,
            rank=addresses.ranks.get(worker),
            added=added,
            method=request.method,
        )
        exchange = self._admission.begun(worker, request.caller)
        try:
            connection, answer_head = await self._first_byte(request, worker, target, head, body)
        except Failure as failure:
            self.count(worker, failure)
            exchange.failed(failure.text)
            request.watch.failed(failure.kind.value, failure.text)
            raise
        except BaseException:
            exchange.unknown()
            raise
        exchange.answered(answer_head.status)
        return Sent(target, connection, answer_head, exchange), authorization

    async def _first_byte(
        self, request: Request, worker: WorkerKey, target: Target, head: bytes, body: bytes
    ) -> tuple[Connection, AnswerHead]:
        """Send the request over a kept connection if there is one, and over a new one if the kept one was closed.

        Raises Failure if the worker does not answer.
        """
        connection = self._pool.idle(target) if request.attempts.reuses_connections else None
        if connection is not None:
            try:
                return connection, await self._ask(connection, request, worker, head, body)
            except Failure as failure:
                if failure.kind is not Kind.STALE:
                    raise
                self.count(worker, failure)
                request.attempts.stale(named(worker))
        request.record()
        connection = await self._pool.connect(target)
        return connection, await self._ask(connection, request, worker, head, body)

    async def _ask(
        self, connection: Connection, request: Request, worker: WorkerKey, head: bytes, body: bytes
    ) -> AnswerHead:
        """Send the request over this connection and return the head of the answer. Raises Failure."""
        self._admission.waits(worker, connection)
        try:
            answered = connection.ask(head, body, self.silence_s)
            # The engine computes meanwhile.
            request.record()
            return await answered
        except BaseException:
            connection.close()
            raise
        finally:
            self._admission.waits_no_more(worker, connection)

    def give_back(self, sent: Sent) -> None:
        """Note that the answer is complete, and keep its connection if possible."""
        sent.exchange.ended()
        self._pool.give_back(sent.target, sent.connection)

    def break_off(self, worker: WorkerKey, sent: Sent, failure: Failure) -> None:
        """Note that the answer broke off because of the worker, and close its connection."""
        sent.connection.close()
        self.count(worker, failure)
        sent.exchange.spoiled(failure.text)

    def give_up(self, sent: Sent) -> None:
        """Close the connection of an answer whose rest is not needed."""
        sent.connection.close()
        sent.exchange.unknown()

    def count(self, worker: WorkerKey, failure: Failure) -> None:
        """Count a failed attempt."""
        self._metrics.failures(worker)(failure.kind).inc()


def named(worker: WorkerKey) -> str:
    """Return the worker's name in the form that headers use."""
    return h.named_in_header(worker.route_name)


def error_of(failure: Failure) -> RouterError:
    """Return the error that the client gets if this failure is the last one."""
    if failure.kind in (Kind.SILENT, Kind.CONNECT_TIMEOUT):
        return WorkerSilent(f"{failure.text}; send the request again, or raise the router's answer_timeout_s")
    return WorkerUnreachable(f"{failure.text}; no other worker was tried or could answer; send the request again")
