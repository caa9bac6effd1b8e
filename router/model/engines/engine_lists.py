# SPDX-License-Identifier: Apache-2.0
"""Periodic requests to engines for their models, LoRA adapters, kind and KV event streams. An async shell."""

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

# The period of the requests. Adapters are loaded while an engine runs, and requests for a new adapter have to wait until
# the next look.
LOOK_S = 5.0
# Engines answer both requests at once, so this is ample.
TIMEOUT_S = 2.0
# Room for some hundred adapters and their paths; no engine sends a longer answer.
MAX_ANSWER_BYTES = 1024**2
ENGINES_AT_ONCE = 16
# After this many looks, an engine without event sources is queried for them again. vLLM before 0.31 does not name its
# event streams and logs each request for them, so it is queried again only when it may have been replaced.
LOOKS_WITHOUT_SOURCES = 60


class _Model(msgspec.Struct):
    id: str
    root: str | None = None
    parent: str | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


_models = msgspec.json.Decoder(_Models)


class ServedModels(msgspec.Struct, frozen=True):
    """The model and the LoRA adapters that one engine serves."""

    # The names by which the engine accepts requests for its model.
    names: tuple[str, ...] = ()
    # The path of each LoRA adapter by its name.
    adapters: dict[str, str] = {}
    # The path or name from which the engine loaded its model, or "" if the engine does not name it.
    root: str = ""


def served_in(answer: bytes) -> ServedModels | None:
    """Return the models in an engine's list of models, or None if the answer is no such list."""
    try:
        models = _models.decode(answer).data
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    # vLLM 0.32.0 entrypoints/openai/models/serving.py: an adapter has its base model as parent, and the path that is
    # hashed as root.
    adapters = {model.id: model.root for model in models if model.parent is not None and model.root is not None}
    base_models = [model for model in models if model.parent is None]
    return ServedModels(
        tuple(model.id for model in base_models), adapters, next((m.root for m in base_models if m.root), "")
    )


class EngineLists:
    """The models, event sources and kinds of all engines, as they answered last.

    If an engine does not answer, its last answer stays. `run` keeps the answers up to date until it is cancelled.

    Args:
        session: The session for requests; without one, `run` and `look` must not be called.
        key: Decides which engines get the API key.
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
        # Engines that registered since the last look, which are queried before the next one.
        self._new: set[str] = set()
        self._came = asyncio.Event()
        # By URL, the number of the look that queries an engine without event sources for them again.
        self._sources_due: dict[str, int] = {}
        # By URL, the models that each engine named last.
        self.served: dict[str, ServedModels] = {}
        # By URL, the event stream of each rank.
        self.sources: dict[str, Mapping[int, Stream]] = {}
        # By URL, the kind of each engine whose answer showed it.
        self.kinds: dict[str, Engine] = {}
        # By URL, the status with which an engine refuses its list of models.
        self.refusing: dict[str, int] = {}

    @property
    def adapters(self) -> dict[str, dict[str, str]]:
        """By URL, the LoRA adapters of each engine that has any."""
        return {url: served.adapters for url, served in self.served.items() if served.adapters}

    async def run(self) -> None:
        """Query all engines every LOOK_S, and new engines at once, until cancelled."""
        while True:
            await self.look()
            with contextlib.suppress(TimeoutError):
                # Up to Python 3.11, wait_for would swallow a cancellation that comes together with the event.
                async with asyncio.timeout(LOOK_S):
                    while True:
                        await self._came.wait()
                        self._came.clear()
                        await self._look_at_new()

    def look_soon(self, url: str) -> None:
        """Query a new engine before the next look, because its registration is judged by its answers."""
        if url not in self.served:
            self._new.add(url)
            self._came.set()

    async def look(self) -> None:
        """Query all engines once, and drop the answers of engines that are no longer registered."""
        urls = set(self._urls())
        before = self._known()
        self._new.clear()
        for answers in (self.served, self.sources, self.kinds, self.refusing, self._sources_due):
            for url in answers.keys() - urls:
                del answers[url]
        await asyncio.gather(*map(self._ask, urls))
        self._looks += 1
        self._compare(before)

    async def _look_at_new(self) -> None:
        """Query only the new engines."""
        before = self._known()
        new, self._new = self._new, set()
        await asyncio.gather(*map(self._ask, new))
        self._compare(before)

    def _known(self) -> tuple[object, ...]:
        return dict(self.served), dict(self.sources), dict(self.kinds), dict(self.refusing)

    def _compare(self, before: tuple[object, ...]) -> None:
        """Report a change if the answers differ from those `before`, which `_known` returned."""
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
            # The former kind of the engine is tried first.
            former = self.kinds.get(url)
            for engine in sorted(ENGINES.values(), key=lambda kind: kind is not former):
                status, answer = await self._get(url, engine.info_path)
                if status is None:
                    return
                if status == HTTPStatus.OK:
                    try:
                        self.sources[url] = engine.streams_in(answer, url).streams or {}
                    except NotThisEngine:
                        continue
                    except ValueError:
                        # Callers that need the streams report the fault in the answer.
                        return
                    self.kinds[url] = engine
                    return
        self.sources.pop(url, None)
        self.kinds.pop(url, None)
        self._sources_due[url] = self._looks + LOOKS_WITHOUT_SOURCES

    async def _get(self, url: str, path: str) -> tuple[int | None, bytes]:
        """Return status and body of an answer, without a status if none came. Liveness is judged elsewhere."""
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
