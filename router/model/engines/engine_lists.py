# SPDX-License-Identifier: Apache-2.0
"""Asks engines now and then which models and LoRA adapters they serve, what kind they are, and where their KV events
are. An async shell."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus

import aiohttp
import msgspec

from kvrouter.router.base.common.bounded_read import read_whole
from kvrouter.router.model.engines.engine import Engine, NotThisEngine
from kvrouter.router.model.engines.known import ENGINES
from kvrouter.router.model.workers.engine_answers import MODELS_PATH, REFUSALS, Stream
from kvrouter.router.model.workers.engine_key import EngineKey

log = logging.getLogger(__name__)

# Adapters are loaded while an engine runs; a request for one that is not known here yet has to wait for this.
LOOK_S = 5.0
# Both lists are answered at once.
TIMEOUT_S = 2.0
# Some hundred adapters and their paths; an answer beyond this is no engine's.
MAX_ANSWER_BYTES = 1024**2
ENGINES_AT_ONCE = 16
# vLLM before 0.31 says nothing of its event streams, and logs each request for it: it is queried again when it may have
# been exchanged.
LOOKS_WITHOUT_SOURCES = 60


class _Model(msgspec.Struct):
    id: str
    root: str | None = None
    parent: str | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


_models = msgspec.json.Decoder(_Models)


class ServedModels(msgspec.Struct, frozen=True):
    """names: by which the engine takes requests for its model. adapters: name and path of each LoRA adapter. root: what
    the engine loaded its model from, empty where it does not say."""

    names: tuple[str, ...] = ()
    adapters: dict[str, str] = {}
    root: str = ""


def served_in(answer: bytes) -> ServedModels | None:
    """What a list of models names; None where it is none."""
    try:
        models = _models.decode(answer).data
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    # vLLM 0.32.0 entrypoints/openai/models/serving.py: an adapter names its base as parent, and the path that it hashes
    # as root.
    adapters = {model.id: model.root for model in models if model.parent is not None and model.root is not None}
    own = [model for model in models if model.parent is None]
    return ServedModels(tuple(model.id for model in own), adapters, next((m.root for m in own if m.root), ""))


class EngineLists:
    """The lists of models and event sources that engines serve. `run` until it is cancelled, not without a session.

    If an engine does not answer, its last answer stays.

    Args:
        key: Decides which engines get a key.
        urls: Returns the URLs of the engines.
        changed: Called whenever an engine's answer differs from its last one.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession | None,
        key: EngineKey,
        urls: Callable[[], Iterable[str]],
        changed: Callable[[], None],
    ) -> None:
        self._session = session
        self._key = key
        self._urls = urls
        self._changed = changed
        self._slots = asyncio.Semaphore(ENGINES_AT_ONCE)
        self._looks = 0
        # Engines that came since, which are queried before the next look at all.
        self._new: set[str] = set()
        self._came = asyncio.Event()
        # The round in which an engine without event sources is queried for them again, by URL.
        self._sources_due: dict[str, int] = {}
        # The last answer of each engine, by URL.
        self.served: dict[str, ServedModels] = {}
        self.sources: dict[str, Mapping[int, Stream]] = {}
        # The kind of each engine that showed it, by URL.
        self.kinds: dict[str, Engine] = {}
        # The status with which an engine refuses its list of models, by URL.
        self.refusing: dict[str, int] = {}

    @property
    def adapters(self) -> dict[str, dict[str, str]]:
        """By URL, of the engines that have any."""
        return {url: served.adapters for url, served in self.served.items() if served.adapters}

    async def run(self) -> None:
        while True:
            await self.look()
            with contextlib.suppress(TimeoutError):
                # Not wait_for, which swallows a cancellation at the moment of the event up to Python 3.11.
                async with asyncio.timeout(LOOK_S):
                    while True:
                        await self._came.wait()
                        self._came.clear()
                        await self._look_at_new()

    def look_soon(self, url: str) -> None:
        """An engine came: what it is registered with is judged by what it says."""
        if url not in self.served:
            self._new.add(url)
            self._came.set()

    async def look(self) -> None:
        """Ask all of them once."""
        urls = set(self._urls())
        before = self._known()
        self._new.clear()
        for known in (self.served, self.sources, self.kinds, self.refusing, self._sources_due):
            for url in known.keys() - urls:
                del known[url]
        await asyncio.gather(*map(self._ask, urls))
        self._looks += 1
        self._compare(before)

    async def _look_at_new(self) -> None:
        """Ask those that came, not all for each."""
        before = self._known()
        new, self._new = self._new, set()
        await asyncio.gather(*map(self._ask, new))
        self._compare(before)

    def _known(self) -> tuple[object, ...]:
        return dict(self.served), dict(self.sources), dict(self.kinds), dict(self.refusing)

    def _compare(self, before: tuple[object, ...]) -> None:
        """What they said before."""
        if self._known() != before:
            log.info("engine lists changed", extra={"engines": len(self.served), "adapters": len(self.adapters)})
            self._changed()

    async def _ask(self, url: str) -> None:
        async with self._slots:
            status, answer = await self._get(url, MODELS_PATH)
            if status in REFUSALS:
                self.refusing[url] = status
            elif status is not None:
                self.refusing.pop(url, None)
            if status == HTTPStatus.OK and (served := served_in(answer)) is not None:
                self.served[url] = served
            if self._sources_due.get(url, 0) > self._looks:
                return
            # Try the kind that it was before first.
            known = self.kinds.get(url)
            for engine in sorted(ENGINES.values(), key=lambda one: one is not known):
                status, answer = await self._get(url, engine.info_path)
                if status is None:
                    return
                if status == HTTPStatus.OK:
                    try:
                        self.sources[url] = engine.streams_in(answer, url).streams or {}
                    except NotThisEngine:
                        continue
                    except ValueError:
                        # A caller that needs its streams names the fault in the answer.
                        return
                    self.kinds[url] = engine
                    return
        self.sources.pop(url, None)
        self.kinds.pop(url, None)
        self._sources_due[url] = self._looks + LOOKS_WITHOUT_SOURCES

    async def _get(self, url: str, path: str) -> tuple[int | None, bytes]:
        """Status and body; no status where nothing came. Liveness is judged elsewhere."""
        assert self._session is not None
        key = self._key.header_for_url(url)
        headers = {} if key is None else {"authorization": key}
        try:
            async with (
                asyncio.timeout(TIMEOUT_S),
                self._session.get(url.rstrip("/") + path, headers=headers, allow_redirects=False) as answer,
            ):
                if answer.status != HTTPStatus.OK:
                    return answer.status, b""
                return answer.status, await read_whole(answer, MAX_ANSWER_BYTES)
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError):
            return None, b""
