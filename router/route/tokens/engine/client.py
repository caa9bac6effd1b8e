# SPDX-License-Identifier: Apache-2.0
"""Asks engines over HTTP for the tokens of a prompt: bounded in time, in answers' size, and in how many ask one engine
at once."""

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
from kvrouter.router.route.tokens.engine.wire import refusal_of
from kvrouter.router.route.tokens.prompt_tokens import TokensUnknown

# vLLM renders in a pool of few threads; more at once would wait there instead of here, beside the requests it serves.
ASKS_PER_ENGINE = 8
# Tokens are some seven digits a token of JSON and a token some four bytes of text, or one byte at the worst.
ANSWER_BYTES_PER_BYTE = 16
# Bytes of an answer beside the tokens: a template's own text, fields without use here.
ANSWER_BYTES = 4 * 1024**2

# The endpoint is not there, is switched off (vLLM's render without --enable-scale-out), or takes no such model.
ABSENT = frozenset(
    {HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED, HTTPStatus.NOT_IMPLEMENTED}
)
# The connection was there and ended without an answer, or within it.
ENDS = (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError, aiohttp.ClientPayloadError)
REFUSED = frozenset({HTTPStatus.BAD_REQUEST, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, HTTPStatus.UNPROCESSABLE_ENTITY})


class Engine(NamedTuple):
    """An engine that may be queried. life: changes when it restarts, maybe with another template. ways: its endpoints
    for tokens."""

    url: str
    life: str
    ways: TokenEndpoints


class Absent(Exception):
    """The engine has no such endpoint."""


class EngineClient:
    """Token requests to engines. session: has the limits on connections; the caller sets the deadline. key: the
    engines' key, for requests that bring none."""

    def __init__(self, session: aiohttp.ClientSession, key: EngineKey) -> None:
        self._session = session
        self._key = key
        self._slots: dict[str, asyncio.Semaphore] = {}
        self._asks: Counter[str] = Counter()

    def asks(self, url: str) -> int:
        """How many ask it now, or wait to."""
        return self._asks[url]

    def forget(self, url: str) -> None:
        """It is no longer queried."""
        self._slots.pop(url, None)
        self._asks.pop(url, None)

    async def post(self, url: str, path: str, body: bytes, authorization: str | None = None) -> bytes:
        """The answer's body. Raises Absent, and Unknown where there is none to be had."""
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
            why = printable(str(error)) or type(error).__name__
            broke = isinstance(error, ENDS) and not isinstance(error, aiohttp.ClientConnectorError)
            raise TokensUnknown("unreachable", f"{url} did not answer: {why}", broke_engine=broke) from None
        finally:
            self._asks[url] -= 1

    async def _post(self, where: str, body: bytes, headers: dict[str, str]) -> bytes:
        # A redirect would take us to hosts that nobody registered.
        async with self._session.post(where, data=body, headers=headers, allow_redirects=False) as answer:
            most_bytes = _most_bytes(body)
            said, whole = await read_at_most(answer, most_bytes)
            if not whole:
                raise TokensUnknown(
                    "unreachable", f"{answer.url} answers with more than {most_bytes} bytes, which cannot be tokens"
                )
            return _judged(answer.status, said, where)


def _most_bytes(body: bytes) -> int:
    return ANSWER_BYTES + ANSWER_BYTES_PER_BYTE * len(body)


def _judged(status: int, content: bytes, where: str) -> bytes:
    if status == HTTPStatus.OK:
        return content
    if status in ABSENT:
        raise Absent(f"{where} answers {status}")
    if status in REFUSED:
        raise TokensUnknown("refused", refusal_of(content) or f"{where} answers {status}")
    if status == HTTPStatus.UNAUTHORIZED:
        raise TokensUnknown("unauthorized", f"{where} answers 401: {KEY_WANTED}")
    raise TokensUnknown("unreachable", f"{where} answers {status}")
