# SPDX-License-Identifier: Apache-2.0
"""The client that blocks. `async_client.py` has the same methods for asyncio; both use the calls of `calls.py`."""

from __future__ import annotations

import logging
import random
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

from kvrouter.client import calls
from kvrouter.client.calls import Call, Reply
from kvrouter.client.errors import NotFound, RouterError
from kvrouter.client.retries import Retries
from kvrouter.client.select_body import SelectBody
from kvrouter.client.transport import DEFAULT_URL, Timeouts, failure, httpx2, options
from kvrouter.contract.choices import SelectReply
from kvrouter.contract.health import HealthReply
from kvrouter.contract.queries import QueryBody, QueryByHashBody, QueryReply
from kvrouter.contract.registrations import RegisterBody, RegisteredReply, UnregisterBody
from kvrouter.contract.worker_status import WorkerStatus

log = logging.getLogger(__name__)


class Client:
    """A client of one router, and a context manager that closes its connections. Threads may share it.

    Every method raises RouterError.
    """

    def __init__(
        self,
        # The router's URL, with the path prefix of a gateway if there is one.
        url: str = DEFAULT_URL,
        *,
        api_key: str | None = None,
        timeouts: Timeouts | None = None,
        retries: Retries | None = None,
        # The trusted authorities and the client's certificate; by default the system's authorities.
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._http = httpx2.Client(**options(url, api_key, timeouts or Timeouts(), tls))
        self._retries = retries or Retries()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def query(self, body: QueryBody) -> QueryReply:
        """Return how much of a prompt each worker would reuse, by token ids."""
        return self._ask(calls.query(body))

    def query_by_hash(self, body: QueryByHashBody) -> QueryReply:
        """Return how much of a prompt each worker would reuse, by block hashes."""
        return self._ask(calls.query_by_hash(body))

    def select(self, body: SelectBody) -> SelectReply:
        """Choose the worker with the lowest cost for a prompt, and reserve nothing."""
        return self._ask(calls.select(body))

    def select_and_reserve(self, body: SelectBody) -> SelectReply:
        """Choose a worker, and count the prompt's load there until the reservation is released or expires.

        `reserve` releases the reservation without a further call.
        """
        return self._ask(calls.select_and_reserve(body))

    @contextmanager
    def reserve(self, body: SelectBody) -> Iterator[SelectReply]:
        """Choose a worker, and count the prompt's load there while the body of `with` runs.

        The reservation is released however the body ends. A release that fails is logged; the reservation then expires
        at the router.
        """
        call, selection_id = calls.own_reservation(body)
        try:
            choice = self._ask(call)
        except BaseException as error:
            if not isinstance(error, RouterError) or error.may_have_acted:
                self._leave(selection_id)
            raise
        try:
            yield choice
        finally:
            self._leave(selection_id)

    def prefill_complete(self, selection_id: str) -> None:
        """Report the first token: the prefill part of a reservation no longer counts."""
        self._ask(calls.prefill_complete(selection_id))

    def release(self, selection_id: str) -> bool:
        """End a reservation. Returns False if it does not exist: it was released, has expired, or was never made."""
        try:
            self._ask(calls.release(selection_id))
        except NotFound as error:
            if not calls.is_gone(error):
                raise
            return False
        return True

    def workers(self) -> list[WorkerStatus]:
        """Return the status of all workers, rank by rank."""
        return self._ask(calls.workers()).workers

    def register(self, body: RegisterBody) -> RegisteredReply:
        """Add a worker, or replace it. Repeating the call changes nothing."""
        return self._ask(calls.register(body))

    def unregister(self, body: UnregisterBody) -> RegisteredReply:
        """Drop a worker and its residency."""
        return self._ask(calls.unregister(body))

    def health(self) -> HealthReply:
        """Return whether the router is well, and why not."""
        return self._ask(calls.health())

    def _leave(self, selection_id: str) -> None:
        try:
            self.release(selection_id)
        except RouterError as error:
            log.warning("a reservation was not released: it expires at the router", extra={"error": str(error)})

    def _ask(self, call: Call[Reply]) -> Reply:
        content, attempt = call.content(), 0
        while True:
            try:
                return self._send(call, content)
            except RouterError as error:
                pause_s = self._retries.pause_s(
                    error, attempt, is_repeatable=call.is_repeatable, chance=random.random()
                )
                if pause_s is None:
                    raise
            time.sleep(pause_s)
            attempt += 1

    def _send(self, call: Call[Reply], content: bytes | None) -> Reply:
        try:
            answer = self._http.request(call.method, call.path, content=content)
        except httpx2.RequestError as error:
            raise failure(error, call) from error
        return call.read(answer.status_code, answer.headers, answer.content)
