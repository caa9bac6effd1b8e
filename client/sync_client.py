# SPDX-License-Identifier: Apache-2.0
"""The client that blocks. `async_client.py` has the same methods for asyncio; what they send and read is `calls.py`'s."""

from __future__ import annotations

import logging
import random
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

from kvrouter.client import calls
from kvrouter.client.answers import HealthReply, QueryReply, RegisteredReply, SelectReply, WorkerStatus
from kvrouter.client.bodies import QueryBody, QueryByHashBody, RegisterBody, SelectBody, UnregisterBody
from kvrouter.client.calls import Call, Reply
from kvrouter.client.errors import NotFound, RouterError
from kvrouter.client.retries import Retries
from kvrouter.client.transport import DEFAULT_URL, Timeouts, failure, httpx2, options

log = logging.getLogger(__name__)


class Client:
    """Calls one router; a context manager, which closes its connections. Threads may share it.

    url: of the router, with the path prefix of a gateway where there is one. tls: whom to trust, and with which
    certificate to come; default: the system's authorities. Every method raises RouterError."""

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        api_key: str | None = None,
        timeouts: Timeouts | None = None,
        retries: Retries | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._http = httpx2.Client(**options(url, api_key, timeouts or Timeouts(), tls))
        self._retries = retries or Retries()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def query(self, body: QueryBody) -> QueryReply:
        """How much of a prompt each worker would reuse, by token ids."""
        return self._ask(calls.query(body))

    def query_by_hash(self, body: QueryByHashBody) -> QueryReply:
        """The same by block hashes."""
        return self._ask(calls.query_by_hash(body))

    def select(self, body: SelectBody) -> SelectReply:
        """The worker with the lowest cost for a prompt, and why; reserves nothing."""
        return self._ask(calls.select(body))

    def select_and_reserve(self, body: SelectBody) -> SelectReply:
        """The same, and its load counts until it is released or expires. `reserve` releases by itself."""
        return self._ask(calls.select_and_reserve(body))

    @contextmanager
    def reserve(self, body: SelectBody) -> Iterator[SelectReply]:
        """A worker whose load counts as long as the body of `with` runs. The reservation is released however that ends;
        one that cannot be released now is logged, and expires at the router."""
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
        """The first token came: the prefill part of a reservation counts no longer."""
        self._ask(calls.prefill_complete(selection_id))

    def release(self, selection_id: str) -> bool:
        """Ends a reservation; False if there is none: it was released, has expired, or was never made."""
        try:
            self._ask(calls.release(selection_id))
        except NotFound as error:
            if not calls.is_gone(error):
                raise
            return False
        return True

    def workers(self) -> list[WorkerStatus]:
        """All workers, rank by rank."""
        return self._ask(calls.workers()).workers

    def register(self, body: RegisterBody) -> RegisteredReply:
        """Adds a worker, or replaces it. The same again changes nothing."""
        return self._ask(calls.register(body))

    def unregister(self, body: UnregisterBody) -> RegisteredReply:
        """Drops a worker and its residency."""
        return self._ask(calls.unregister(body))

    def health(self) -> HealthReply:
        """Whether the router is well, and why not."""
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
