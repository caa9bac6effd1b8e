# SPDX-License-Identifier: Apache-2.0
"""The listener for a gateway's copies of requests. Each is answered with 204 once it is read, and goes no further.

A body has at most MAX_BODY_BYTES, and all bodies that are read or wait have at most MAX_HELD_BYTES. Requests beyond
that are only counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aiohttp import ClientError, web

from kvrouter.router.base.common.content_coding import BodyDecoder, ContentCoding, coding_of
from kvrouter.router.base.common.errors import RouterError, TooLarge
from kvrouter.router.route.tokens.client_body import CHAT_PATH, GENERATE_PATH, SGLANG_GENERATE_PATH, TEXT_PATH
from kvrouter.shadow.observation import Skip, Unjudged

MAX_BODY_BYTES = 32 << 20
MAX_HELD_BYTES = 256 << 20
# A gateway has the whole body before it sends the copy.
BODY_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 1.0

# Paths of requests that can be judged, below any prefix.
JUDGED_PATHS = (CHAT_PATH, TEXT_PATH, GENERATE_PATH, SGLANG_GENERATE_PATH)


class HeldBytes:
    """The size of all bodies together, which stays within a limit."""

    def __init__(self, limit: int = MAX_HELD_BYTES) -> None:
        self._limit = limit
        self.size = 0

    def take(self, size: int) -> bool:
        """Return whether `size` more bytes fit, and count them if they do."""
        if self.size + size > self._limit:
            return False
        self.size += size
        return True

    def release(self, size: int) -> None:
        """Give back bytes of a body that is done."""
        self.size -= size


class MirrorListener:
    """An HTTP server that hands on the requests that can be judged."""

    def __init__(
        self,
        # Called with each body that can be judged, and with its worker and its id as the headers name them. It releases
        # the body's bytes of `held` when it is done with the body.
        take: Callable[[bytes, str | None, str | None], None],
        # Called with the reason and its detail for a POST that is not judged.
        skip: Callable[[Skip, str], None],
        held: HeldBytes,
        *,
        worker_header: str | None,
        id_header: str,
    ) -> None:
        self._take = take
        self._skip = skip
        self._held = held
        self._worker_header = worker_header
        self._id_header = id_header
        self._runner: web.AppRunner | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen, and return the port. Raises OSError."""
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        # Bodies are decoded here, because aiohttp accepts other codings, and does not bound the number of members.
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=STOP_TIMEOUT_S, auto_decompress=False)
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port).start()
        return int(self._runner.addresses[0][1])

    async def stop(self) -> None:
        """Stop listening."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.Response:
        if request.method == "POST":
            try:
                if not request.path.endswith(JUDGED_PATHS):
                    raise Unjudged(Skip.NO_PROMPT)
                body = await self._decoded(request, await self._body(request))
                self._take(body, self._header(request, self._worker_header), self._header(request, self._id_header))
            except Unjudged as problem:
                self._skip(problem.reason, problem.detail)
        return web.Response(status=204)

    async def _body(self, request: web.Request) -> bytes:
        """Return the request's body, counted in `held`. Raises Unjudged."""
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                async for part in request.content.iter_any():
                    if size + len(part) > MAX_BODY_BYTES:
                        raise Unjudged(Skip.TOO_LARGE)
                    if not self._held.take(len(part)):
                        raise Unjudged(Skip.OVERFLOW)
                    size += len(part)
                    parts.append(part)
        except BaseException as error:
            self._held.release(size)
            if isinstance(error, TimeoutError | ClientError | web.HTTPException | OSError):
                raise Unjudged(Skip.BROKEN, f"its body broke off: {error}") from None
            raise
        return b"".join(parts)

    async def _decoded(self, request: web.Request, body: bytes) -> bytes:
        """Return the body without its content coding, counted in `held` in its place. Raises Unjudged."""
        encoding = ", ".join(request.headers.getall("content-encoding", ()))
        if not encoding:
            return body
        try:
            coding = coding_of(encoding.encode("utf-8", "surrogateescape"))
            if coding is not ContentCoding.IDENTITY:
                plain = await asyncio.to_thread(BodyDecoder(coding, body, MAX_BODY_BYTES).whole)
                if not self._held.take(len(plain)):
                    raise Unjudged(Skip.OVERFLOW)
                self._held.release(len(body))
                body = plain
        except BaseException as error:
            self._held.release(len(body))
            if isinstance(error, TooLarge):
                raise Unjudged(Skip.TOO_LARGE) from None
            if isinstance(error, RouterError):
                raise Unjudged(Skip.BROKEN, error.message) from None
            raise
        return body

    def _header(self, request: web.Request, name: str | None) -> str | None:
        return (request.headers.get(name) or None) if name else None
