# SPDX-License-Identifier: Apache-2.0
"""Asks engines now and then which LoRA adapters they have: `/v1/models` names an adapter's base as its parent. An async shell."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from http import HTTPStatus

import aiohttp
import msgspec

from kvrouter.router.bounded import read_whole

log = logging.getLogger(__name__)

# Adapters are loaded while an engine runs; a request for one that is not known here yet has to wait for this.
LOOK_S = 5.0
# A list of models is answered at once.
TIMEOUT_S = 2.0
# Some hundred adapters and their paths; an answer beyond this is no engine's.
MAX_ANSWER_BYTES = 1024**2
ENGINES_AT_ONCE = 16


class _Model(msgspec.Struct):
    id: str
    root: str | None = None
    parent: str | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


_models = msgspec.json.Decoder(_Models)


def adapters_in(answer: bytes) -> dict[str, str] | None:
    """Name and path of each adapter that the engine lists; None where it is no list of models."""
    try:
        models = _models.decode(answer).data
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    # vLLM 0.32.0 entrypoints/openai/models/serving.py: the root of an adapter is the path that it hashes.
    return {model.id: model.root for model in models if model.parent is not None and model.root is not None}


class AdapterWatch:
    """urls: of the engines. changed: told whenever the adapters of one are others than before. `run` until it is cancelled."""

    def __init__(
        self, session: aiohttp.ClientSession, urls: Callable[[], Iterable[str]], changed: Callable[[], None]
    ) -> None:
        self._session = session
        self._urls = urls
        self._changed = changed
        self._slots = asyncio.Semaphore(ENGINES_AT_ONCE)
        # By URL; what an engine that does not answer had stays.
        self.listed: dict[str, dict[str, str]] = {}

    async def run(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """Ask all of them once."""
        urls = set(self._urls())
        before = dict(self.listed)
        for url in self.listed.keys() - urls:
            del self.listed[url]
        await asyncio.gather(*map(self._ask, urls))
        if self.listed != before:
            log.info("adapters changed", extra={"adapters": sum(map(len, self.listed.values()))})
            self._changed()

    async def _ask(self, url: str) -> None:
        try:
            async with (
                self._slots,
                asyncio.timeout(TIMEOUT_S),
                self._session.get(f"{url.rstrip('/')}/v1/models", allow_redirects=False) as answer,
            ):
                if answer.status != HTTPStatus.OK:
                    return
                found = adapters_in(await read_whole(answer, MAX_ANSWER_BYTES))
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError):
            # Whether it lives is asked and told elsewhere.
            return
        if found:
            self.listed[url] = found
        elif found is not None:
            self.listed.pop(url, None)
