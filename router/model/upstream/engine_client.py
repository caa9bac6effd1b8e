# SPDX-License-Identifier: Apache-2.0
"""The router's own frequent requests to engines: GETs over kept connections."""

from __future__ import annotations

import asyncio

from kvrouter.router.base.common.direct_task import directly
from kvrouter.router.model.upstream.connection import Connection
from kvrouter.router.model.upstream.failure import Failure, Kind
from kvrouter.router.model.upstream.origin import Target
from kvrouter.router.model.upstream.pool import Pool
from kvrouter.router.model.workers.engine_key import EngineKey


class EngineClient:
    """A client for HTTP requests to engines, used from one event loop. Call `close` at the end."""

    def __init__(self, loop: asyncio.AbstractEventLoop, key: EngineKey) -> None:
        """Prepare a pool of connections; `key` decides which engines get the API key."""
        self._pool = Pool(loop, key.allowed)
        self._key = key

    async def get(self, target: Target, path: str, most_bytes: int, timeout_s: float) -> tuple[int, bytes]:
        """Request `path` and return status and body.

        Redirects are not followed. Raises Failure, and TimeoutError if the answer is not complete in time.

        Args:
            target: The engine.
            path: The path below the target's prefix.
            most_bytes: About how much of a longer body is returned.
            timeout_s: Time limit of the whole exchange.
        """
        key = self._key.header_for(target.origin)
        head = b"GET %b%b HTTP/1.1\r\nhost: %b\r\n%b\r\n" % (
            target.prefix,
            path.encode("ascii"),
            target.authority,
            b"" if key is None else b"authorization: %b\r\n" % key.encode("ascii"),
        )
        async with asyncio.timeout(timeout_s):
            return await directly(self._get(target, head, most_bytes, 2 * timeout_s))

    async def _get(self, target: Target, head: bytes, most_bytes: int, silence_s: float) -> tuple[int, bytes]:
        idle_connection = self._pool.idle(target)
        if idle_connection is not None:
            try:
                return await self._exchange(target, idle_connection, head, most_bytes, silence_s)
            except Failure as failure:
                if failure.kind is not Kind.STALE:
                    raise
        return await self._exchange(target, await self._pool.connect(target), head, most_bytes, silence_s)

    async def _exchange(
        self, target: Target, connection: Connection, head: bytes, most_bytes: int, silence_s: float
    ) -> tuple[int, bytes]:
        body: list[bytes] = []
        size_bytes = 0

        def take(parts: list[bytes]) -> None:
            nonlocal size_bytes
            body.extend(parts)
            size_bytes += sum(map(len, parts))
            if size_bytes > most_bytes:
                connection.close()

        try:
            answer = await connection.ask(head, b"", silence_s)
            await connection.relay(take)
        except Failure:
            if size_bytes <= most_bytes:
                raise
        except BaseException:
            connection.close()
            raise
        else:
            self._pool.give_back(target, connection)
        return answer.status, b"".join(body)

    def close(self) -> None:
        """Close all idle connections."""
        self._pool.close()
