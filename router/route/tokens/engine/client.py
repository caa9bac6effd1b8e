# SPDX-License-Identifier: Apache-2.0
"""Requests to engines over HTTP for the tokens of a prompt.

They are bounded in time, in the size of answers, and in the number of requests to one engine at once.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from http import HTTPStatus
from typing import NamedTuple

import aiohttp

from kvrouter.router.base.common.bounded_read import read_at_most
from kvrouter.router.base.common.escaping import printable
from kvrouter.router.model.engines.engine import TokenEndpoints
from kvrouter.router.model.workers.engine_answers import KEY_WANTED
from kvrouter.router.model.workers.engine_key import EngineKey
from kvrouter.router.model.workers.renderer_spec import RendererKeys
from kvrouter.router.route.tokens.engine.wire import refusal_of
from kvrouter.router.route.tokens.prompt_tokens import TokensUnknown

# Requests to one engine at once. vLLM renders in a pool of few threads; further requests would wait there, beside the
# requests that it serves, instead of here.
ASKS_PER_ENGINE = 8
# The size allowed for an answer, by the size of the request. A token takes some seven digits of JSON, and stands for
# some four bytes of text, or for one byte at worst.
ANSWER_BYTES_PER_BYTE = 16
# Further bytes of an answer besides the tokens: a template's own text, and fields without use here.
ANSWER_BYTES = 4 * 1024**2

# Statuses of an endpoint that does not exist, is switched off (vLLM's render without --enable-scale-out), or does not
# take such a model.
ABSENT = frozenset(
    {HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED, HTTPStatus.NOT_IMPLEMENTED}
)
# Errors of a connection that was established and ended without a complete answer.
ENDS = (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError, aiohttp.ClientPayloadError)
REFUSED = frozenset({HTTPStatus.BAD_REQUEST, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, HTTPStatus.UNPROCESSABLE_ENTITY})


class Engine(NamedTuple):
    """An engine that may be queried."""

    url: str
    # Changes when the engine restarts, perhaps with another template.
    life: str
    # Its endpoints for tokens.
    ways: TokenEndpoints
    # Whether it takes no new requests, because it will stop.
    drains: bool = False


class Absent(Exception):
    """The error for an endpoint that the engine does not have."""


class EngineClient:
    """The client for token requests to engines."""

    def __init__(self, session: aiohttp.ClientSession, key: EngineKey | RendererKeys) -> None:
        # It has the limits on connections; callers set the deadline.
        self._session = session
        # The engines' key, for requests that bring none.
        self._key = key
        self._slots: dict[str, asyncio.Semaphore] = {}
        # Requests that run or wait, by URL.
        self._asks: Counter[str] = Counter()

    def asks(self, url: str) -> int:
        """Return how many requests to an engine run or wait."""
        return self._asks[url]

    def forget(self, url: str) -> None:
        """Drop the state of an engine that is no longer queried."""
        self._slots.pop(url, None)
        self._asks.pop(url, None)

    async def post(self, url: str, path: str, body: bytes, authorization: str | None = None) -> bytes:
        """Send a request to an engine, and return the body of its answer.

        Args:
            url: The engine's URL.
            path: The path of the endpoint.
            body: The request's body.
            authorization: The header to send; None for the engines' own key, if there is one.

        Raises:
            Absent: The engine has no such endpoint.
            TokensUnknown: The engine does not answer, or answers with an error.
        """
        headers = {"content-type": "application/json"}
        authorization = authorization or self._key.header_for_url(url)
        if authorization is not None:
            headers["authorization"] = authorization
        slots = self._slots.setdefault(url, asyncio.Semaphore(ASKS_PER_ENGINE))
        self._asks[url] += 1
        try:
            async with slots:
                return await self._post(url.rstrip("/") + path, body, headers)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            reason = printable(str(error)) or type(error).__name__
            broke = isinstance(error, ENDS) and not isinstance(error, aiohttp.ClientConnectorError)
            raise TokensUnknown("unreachable", f"{url} did not answer: {reason}", broke_engine=broke) from None
        finally:
            self._asks[url] -= 1

    async def get(self, url: str, path: str) -> bytes:
        """Return the answer to a GET, or b"" if there is none; at most ANSWER_BYTES of it are read."""
        authorization = self._key.header_for_url(url)
        headers = {} if authorization is None else {"authorization": authorization}
        try:
            async with self._session.get(url.rstrip("/") + path, headers=headers, allow_redirects=False) as answer:
                content, complete = await read_at_most(answer, ANSWER_BYTES)
                return content if complete and answer.status == HTTPStatus.OK else b""
        except (aiohttp.ClientError, OSError, ValueError):
            return b""

    async def _post(self, url: str, body: bytes, headers: dict[str, str]) -> bytes:
        # A redirect could lead to hosts that are not registered, so it is not followed.
        async with self._session.post(url, data=body, headers=headers, allow_redirects=False) as answer:
            max_bytes = _most_bytes(body)
            content, complete = await read_at_most(answer, max_bytes)
            if not complete:
                raise TokensUnknown(
                    "unreachable", f"{answer.url} answers with more than {max_bytes} bytes, which cannot be tokens"
                )
            return _judged(answer.status, content, url)


def _most_bytes(body: bytes) -> int:
    """Return the largest size of an answer to this request."""
    return ANSWER_BYTES + ANSWER_BYTES_PER_BYTE * len(body)


def _judged(status: int, content: bytes, url: str) -> bytes:
    """Return the content of a good answer, or raise the error that the status stands for."""
    if status == HTTPStatus.OK:
        return content
    if status in ABSENT:
        raise Absent(f"{url} answers {status}")
    if status in REFUSED:
        raise TokensUnknown("refused", refusal_of(content) or f"{url} answers {status}")
    if status == HTTPStatus.UNAUTHORIZED:
        raise TokensUnknown("unauthorized", f"{url} answers 401: {KEY_WANTED}")
    raise TokensUnknown("unreachable", f"{url} answers {status}")
