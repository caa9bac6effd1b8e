# SPDX-License-Identifier: Apache-2.0
"""The client for asyncio, with the methods of `sync_client.py`."""

from __future__ import annotations

import asyncio
import logging
import random
import ssl
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Self, TypeVar

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

Result = TypeVar("Result")


class AsyncClient:
    """A client like `Client` for one asyncio loop. `close` waits for releases that are under way."""

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        api_key: str | None = None,
        timeouts: Timeouts | None = None,
        retries: Retries | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._http = httpx2.AsyncClient(**options(url, api_key, timeouts or Timeouts(), tls))
        self._retries = retries or Retries()
        # Tasks that continue after a cancellation of their caller. Each ends by its timeouts.
        self._tasks: set[asyncio.Task[Any]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Wait for releases under way, and close the connections."""
        while self._tasks:
            await asyncio.wait(self._tasks)
        await self._http.aclose()

    async def query(self, body: QueryBody) -> QueryReply:
        """Return how much of a prompt each worker would reuse, by token ids."""
        return await self._ask(calls.query(body))

    async def query_by_hash(self, body: QueryByHashBody) -> QueryReply:
        """Return how much of a prompt each worker would reuse, by block hashes."""
        return await self._ask(calls.query_by_hash(body))

    async def select(self, body: SelectBody) -> SelectReply:
        """Choose the worker with the lowest cost for a prompt, and reserve nothing."""
        return await self._ask(calls.select(body))

    async def select_and_reserve(self, body: SelectBody) -> SelectReply:
        """Choose a worker, and count the prompt's load there until the reservation is released or expires.

        `reserve` releases the reservation without a further call.
        """
        return await self._ask(calls.select_and_reserve(body))

    @asynccontextmanager
    async def reserve(self, body: SelectBody) -> AsyncIterator[SelectReply]:
        """Choose a worker, and count the prompt's load there while the body of `async with` runs.

        The reservation is released however the body ends, also by a cancellation, and also if the choice has not been
        answered yet: a cancelled task ends at once, and another task waits for the answer and releases the reservation.
        A release that fails is logged; the reservation then expires at the router.
        """
        call, selection_id = calls.own_reservation(body)
        asking = self._begin(self._ask(call))
        try:
            yield await asyncio.shield(asking)
        finally:
            leaving = self._begin(self._leave(asking, selection_id))
            # A cancelled task does not wait for the answer.
            if asking.done():
                await asyncio.shield(leaving)

    async def prefill_complete(self, selection_id: str) -> None:
        """Report the first token: the prefill part of a reservation no longer counts."""
        await self._ask(calls.prefill_complete(selection_id))

    async def release(self, selection_id: str) -> bool:
        """End a reservation. Returns False if it does not exist: it was released, has expired, or was never made."""
        try:
            await self._ask(calls.release(selection_id))
        except NotFound as error:
            if not calls.is_gone(error):
                raise
            return False
        return True

    async def workers(self) -> list[WorkerStatus]:
        """Return the status of all workers, rank by rank."""
        return (await self._ask(calls.workers())).workers

    async def register(self, body: RegisterBody) -> RegisteredReply:
        """Add a worker, or replace it. Repeating the call changes nothing."""
        return await self._ask(calls.register(body))

    async def unregister(self, body: UnregisterBody) -> RegisteredReply:
        """Drop a worker and its residency."""
        return await self._ask(calls.unregister(body))

    async def health(self) -> HealthReply:
        """Return whether the router is well, and why not."""
        return await self._ask(calls.health())

    def _begin(self, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _leave(self, asking: asyncio.Task[SelectReply], selection_id: str) -> None:
        """Wait until `asking` is done, and release the reservation that it may have made."""
        await asyncio.wait({asking})
        error = None if asking.cancelled() else asking.exception()
        if isinstance(error, RouterError) and not error.may_have_acted:
            return
        try:
            await self.release(selection_id)
        except RouterError as problem:
            log.warning("a reservation was not released: it expires at the router", extra={"error": str(problem)})

    async def _ask(self, call: Call[Reply]) -> Reply:
        content, attempt = call.content(), 0
        while True:
            try:
                return await self._send(call, content)
            except RouterError as error:
                pause_s = self._retries.pause_s(
                    error, attempt, is_repeatable=call.is_repeatable, chance=random.random()
                )
                if pause_s is None:
                    raise
            await asyncio.sleep(pause_s)
            attempt += 1

    async def _send(self, call: Call[Reply], content: bytes | None) -> Reply:
        try:
            answer = await self._http.request(call.method, call.path, content=content)
        except httpx2.RequestError as error:
            raise failure(error, call) from error
        return call.read(answer.status_code, answer.headers, answer.content)
