# SPDX-License-Identifier: Apache-2.0
"""Queries of engines for the facts that their registration lacks: their model, and where their events are.

This is the async shell around `engine_answers.py`. The queries repeat, because an engine that restarts may have other
ports, ranks or another model.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import random
from collections.abc import Callable, Mapping
from http import HTTPStatus

import aiohttp
import msgspec

from kvrouter.router.base.common.bounded_read import read_whole
from kvrouter.router.base.common.event_wait import set_within
from kvrouter.router.model.engines.engine import NotThisEngine
from kvrouter.router.model.engines.known import ENGINES
from kvrouter.router.model.workers.engine_answers import (
    GIVE_KEY,
    MODELS_PATH,
    NO_KEY_FITS,
    REFUSALS,
    WRITE_THEM,
    EngineAnswers,
    model_in,
)
from kvrouter.router.model.workers.engine_key import DEFAULT, EngineKey

PATHS = " nor ".join(engine.info_path for engine in ENGINES.values())

log = logging.getLogger(__name__)

# The time from an answered query to the next one, and so the delay until changes of a restarted engine are noticed. An
# answer costs an engine some microseconds.
AGAIN_S = 5.0
# The interval of queries without an answer. An engine takes minutes to load its weights, so a shorter interval would
# only fill its log.
RETRY_S = 2.0
# The share by which both intervals vary to either side, so that engines that started at once are not queried at once
# forever.
JITTER = 0.2
# An engine answers both queries at once.
TIMEOUT_S = 2.0
# Some tens of LoRA adapters and their paths, or a thousand ranks; an answer beyond this is no engine's.
MAX_ANSWER_BYTES = 1024**2
ENGINES_AT_ONCE = 16

NOT_AN_ENGINE = "write http://HOST:PORT of the engine itself"
START = "start the engine"
USE_HTTP = "write http:// in its url, or start the engine with TLS"
# OpenSSL's name for an answer that is not TLS.
NO_TLS = "WRONG_VERSION_NUMBER"


class ProbeRequest(msgspec.Struct, frozen=True):
    """The facts to query an engine for."""

    model: bool = False
    streams: bool = False
    # The name of the key that the engine gets, or None for the default one.
    engine_key: str | None = None


class ProbeFailed(Exception):
    """A query without a usable answer; the message is the reason."""

    def __init__(self, problem: str, fix: str = START) -> None:
        super().__init__(problem)
        # A text that says what to change so that the engine gives a usable answer.
        self.fix = fix


class NoSuchPath(ProbeFailed):
    """A query of a path that the server does not have."""


class EngineProber:
    """The repeated queries of engines, and their last answers."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        key: EngineKey,
        *,
        clock: Callable[[], float],
        rng: random.Random,
        changed: Callable[[], None],
        again_s: float = AGAIN_S,
        retry_s: float = RETRY_S,
    ) -> None:
        """Begin without queries.

        Args:
            session: Sends the queries.
            key: The API key for engines.
            clock: Returns the time in seconds, monotonic.
            rng: Varies the intervals.
            changed: Called when an engine's answers changed.
            again_s: The interval of queries that were answered.
            retry_s: The interval of queries without an answer.
        """
        self._session = session
        self._key = key
        self._clock = clock
        self._rng = rng
        self._changed = changed
        self._again_s = again_s
        self._retry_s = retry_s
        self._wanted: dict[str, ProbeRequest] = {}
        self._due_s: dict[str, float] = {}
        self._more = asyncio.Event()
        self._slots = asyncio.Semaphore(ENGINES_AT_ONCE)
        self._answers: dict[str, EngineAnswers] = {}

    def want(self, wanted: Mapping[str, ProbeRequest]) -> None:
        """Replace the facts to query for, by the engine's URL; new or changed queries are due at once."""
        for url in self._wanted.keys() - wanted.keys():
            self._answers.pop(url, None)
            self._due_s.pop(url, None)
        for url, request in wanted.items():
            if self._wanted.get(url) != request:
                self._due_s[url] = self._clock()
                self._more.set()
        self._wanted = dict(wanted)

    def answers_of(self, url: str) -> EngineAnswers | None:
        """Return the engine's last answers, or None before its first query has ended."""
        return self._answers.get(url)

    async def run(self) -> None:
        """Query the engines whenever they are due, until cancelled."""
        while True:
            self._more.clear()
            await self.look()
            pause_s = min(self._due_s.values(), default=self._clock() + self._again_s) - self._clock()
            await set_within(self._more, max(pause_s, 0.0))

    async def look(self) -> None:
        """Query all engines that are due, once."""
        now = self._clock()
        due = [url for url, due_s in self._due_s.items() if due_s <= now]
        await asyncio.gather(*map(self._ask, due))

    async def ask(self, url: str, what: ProbeRequest) -> EngineAnswers:
        """Query an engine once, outside the schedule, and return its answers."""
        async with self._slots:
            return await self._query(url, what, EngineAnswers())

    async def _ask(self, url: str) -> None:
        """Query an engine, schedule its next query, and report changed answers."""
        request, before = self._wanted.get(url), self._answers.get(url)
        if request is None:
            return
        async with self._slots:
            answers = await self._query(url, request, before or EngineAnswers())
        if url not in self._wanted:
            return
        is_whole = not ((request.model and answers.model is None) or (request.streams and answers.streams is None))
        pause_s = (self._again_s if is_whole else self._retry_s) * self._rng.uniform(1 - JITTER, 1 + JITTER)
        self._due_s[url] = self._clock() + pause_s
        if answers != before:
            self._answers[url] = answers
            level = logging.WARNING if answers.problem else logging.INFO
            message = "engine described itself in part or not at all" if answers.problem else "engine described itself"
            log.log(level, message, extra={"url": url, "model": answers.model, "problem": answers.problem})
            self._changed()

    async def _query(self, url: str, request: ProbeRequest, before: EngineAnswers) -> EngineAnswers:
        """Query the engine and return its current answers; keep those of `before` while it does not answer.

        Failures are returned as problems, not raised.
        """
        model, problems, fix, failure = before.model, [], "", ""
        if request.model:
            try:
                model = await self._model(url, request.engine_key)
            except ProbeFailed as error:
                failure = str(error)
                if model is None:
                    fix = _ways_out(error, "write model=NAME for this worker")
                    problems.append(_problem("its model is", error, "write model=NAME for this worker"))
        streams, silent, engine = before.streams, before.silent, before.engine
        if request.streams:
            try:
                answers = await self._streams(url, request.engine_key)
                streams, silent, engine = answers.streams, answers.silent, answers.engine
                problems.append(answers.problem)
            except ProbeFailed as error:
                if streams is not None:
                    problems.append(before.problem)
                elif not (problems and str(error) == failure):
                    # If the reason is the same as for the unknown model, it is not repeated.
                    problems.append(_problem("where its KV events are is", error, WRITE_THEM))
        return EngineAnswers(model, streams, silent, "; ".join(dict.fromkeys(filter(None, problems))), engine, fix)

    async def _model(self, url: str, key_name: str | None) -> str:
        """Return the model that the engine serves. Raises ProbeFailed."""
        answer = await self._get(url, MODELS_PATH, key_name)
        try:
            return model_in(answer)
        except ValueError as error:
            raise ProbeFailed(str(error), NOT_AN_ENGINE) from None

    async def _streams(self, url: str, key_name: str | None) -> EngineAnswers:
        """Return the streams that the first kind of engine names whose path exists. Raises ProbeFailed."""
        for engine in ENGINES.values():
            try:
                answer = await self._get(url, engine.info_path, key_name)
                return msgspec.structs.replace(engine.streams_in(answer, url), engine=engine.name)
            except (NoSuchPath, NotThisEngine):
                continue
            except ValueError as error:
                raise ProbeFailed(str(error), NOT_AN_ENGINE) from None
        try:
            await self._get(url, MODELS_PATH, key_name)
        except NoSuchPath:
            # The server may be a gateway whose engine is away, or another program.
            raise
        except ProbeFailed:
            # The server is an engine, which may want a key for this path.
            pass
        problem = (
            f"its engine does not report where its KV events are (no {PATHS}: vLLM before 0.31, or another engine): "
            f"{WRITE_THEM}"
        )
        return EngineAnswers(streams={}, silent=True, problem=problem)

    async def _get(self, url: str, path: str, key_name: str | None) -> bytes:
        """Return the answer's body. Raises ProbeFailed, or NoSuchPath if there is no such path."""
        whole = url.rstrip("/") + path
        # Engines in `_wanted` were named by the operator's sources, which decide the key there, also for a client's query.
        wanted = self._wanted.get(url)
        if wanted is not None:
            key_name = wanted.engine_key or DEFAULT
        key = self._key.header_for_url(url, named=wanted is not None, name=key_name)
        headers = {} if key is None else {"authorization": key}
        try:
            async with (
                asyncio.timeout(TIMEOUT_S),
                self._session.get(whole, headers=headers, allow_redirects=False) as answer,
            ):
                if answer.status in (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED):
                    raise NoSuchPath(f"{whole} answers {answer.status}", NOT_AN_ENGINE)
                if answer.status in REFUSALS:
                    raise ProbeFailed(f"{whole} answers {answer.status}: {NO_KEY_FITS}", GIVE_KEY)
                if answer.status != HTTPStatus.OK:
                    raise ProbeFailed(f"{whole} answers {answer.status}")
                return await read_whole(answer, MAX_ANSWER_BYTES)
        except TimeoutError:
            raise ProbeFailed(f"{whole} did not answer in {TIMEOUT_S:g} s") from None
        except aiohttp.ClientConnectorSSLError as error:
            if getattr(error.os_error, "reason", None) == NO_TLS:
                raise ProbeFailed(f"{url} does not speak TLS", USE_HTTP) from None
            raise ProbeFailed(f"{url} cannot be reached over TLS: {error.os_error}") from None
        except aiohttp.ClientConnectorError as error:
            raise ProbeFailed(f"{url} cannot be reached: {_reason(error.os_error)}") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise ProbeFailed(f"{whole} did not answer: {str(error) or type(error).__name__}") from None


def _reason(error: OSError) -> str:
    # asyncio's own text for a refused connection, "Connect call failed ('10.0.0.5', 8000)", does not say why.
    code = error.errno
    return os.strerror(code) if code is not None and code in errno.errorcode else str(error.strerror or error)


def _problem(unknown: str, error: ProbeFailed, other_way: str) -> str:
    """Return a sentence that names the unknown fact, the reason, and both ways out."""
    if isinstance(error, NoSuchPath):
        return f"no engine answers there ({error}): {error.fix}"
    return f"{unknown} not known ({error}): {_ways_out(error, other_way)}"


def _ways_out(error: ProbeFailed, other_way: str) -> str:
    """Return the ways out; if no engine answers, there is only one."""
    return error.fix if isinstance(error, NoSuchPath) else f"{error.fix}, or {other_way}"
