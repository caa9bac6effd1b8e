# SPDX-License-Identifier: Apache-2.0
"""The blocking and the asyncio client behind one interface, so that each test runs with both."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from kvrouter.client import AsyncClient, Client, SelectBody, SelectReply


class Caller(Protocol):
    def ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of the client."""

    def reserve(self, body: SelectBody) -> AbstractContextManager[SelectReply]: ...

    def close(self) -> None: ...


class Blocking:
    def __init__(self, url: str, **options: Any) -> None:
        self._client = Client(url, **options)

    def ask(self, method: str, *arguments: Any) -> Any:
        return getattr(self._client, method)(*arguments)

    def reserve(self, body: SelectBody) -> AbstractContextManager[SelectReply]:
        return self._client.reserve(body)

    def close(self) -> None:
        self._client.close()


class Looped:
    def __init__(self, url: str, **options: Any) -> None:
        self._runner = asyncio.Runner()
        self._client = AsyncClient(url, **options)

    def ask(self, method: str, *arguments: Any) -> Any:
        return self._runner.run(getattr(self._client, method)(*arguments))

    @contextmanager
    def reserve(self, body: SelectBody) -> Iterator[SelectReply]:
        reservation = self._client.reserve(body)
        choice = self._runner.run(_entered(reservation))
        try:
            yield choice
        except BaseException:
            self._runner.run(_left(reservation, *sys.exc_info()))
            raise
        self._runner.run(_left(reservation, None, None, None))

    def close(self) -> None:
        self._runner.run(self._client.close())
        self._runner.close()


async def _entered(reservation: Any) -> SelectReply:
    choice: SelectReply = await reservation.__aenter__()
    return choice


async def _left(reservation: Any, *exception: Any) -> None:
    await reservation.__aexit__(*exception)


CALLERS: tuple[type[Blocking] | type[Looped], ...] = (Blocking, Looped)
