# SPDX-License-Identifier: Apache-2.0
"""Asks one engine over HTTP, again and again, whether it lives, since when, and what load it has. The async shell
around `engine_liveness.py` and `load/gauges.py`."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Callable
from http import HTTPStatus

import aiohttp

from kvrouter.router.common.bounded_read import read_at_most
from kvrouter.router.ingest.engine_liveness import EngineLiveness, NoPulse, Pulse, VitalSign
from kvrouter.router.load.engine_metrics import EngineLoad, parse_engine_load
from kvrouter.router.streams.disk_watch import DiskSigns, parse_disk
from kvrouter.router.workers.provenance import engine_ranks

# Every second time /metrics is asked too, which takes an engine some 100 kB to write and says since when it lives and
# what load it has; only /health says whether its core lives. The load of what the router itself sent is known without
# asking.
METRICS_EVERY = 2
# A busy engine answers its /health within a second; what takes longer counts as a miss.
TIMEOUT_S = 2.0
# Of the interval, to either side: many engines registered at once are not asked at once for ever.
JITTER = 0.2
# Some hundred series for each of some hundred LoRA adapters.
MAX_METRICS_BYTES = 8 * 1024**2
# The whole line, so that a number cut in two is not taken for one.
START_TIME = re.compile(rb"^process_start_time_seconds ([0-9.eE+]+)\r?\n", re.MULTILINE)
# vLLM's /health answers 503 when its engine core is gone; below 500 somebody lives, whatever it thinks of the path.
FIRST_ERROR_STATUS = 500


class EnginePoller:
    """One engine's, at `url`. `run` until it is cancelled."""

    def __init__(
        self,
        url: str,
        *,
        session: aiohttp.ClientSession,
        interval_s: float,
        clock: Callable[[], float],
        rng: random.Random,
        tell: Callable[[VitalSign], None],
        load: Callable[[EngineLoad], None] = lambda said: None,
        ranks: Callable[[tuple[int, ...]], None] = lambda said: None,
        disk: Callable[[DiskSigns], None] = lambda said: None,
        dp_rank: int = 0,
        start_s: float | None = None,
    ) -> None:
        """load: told the engine's numbers of its core with this rank. ranks: called with the ranks of its cores; disk:
        with what it says of its disk. start_s: when its process started, as another process of the router was told."""
        self._url = url.rstrip("/")
        self._session = session
        self._interval_s = interval_s
        self._clock = clock
        self._rng = rng
        self._tell = tell
        self._load = load
        self._ranks = ranks
        self._disk = disk
        self._dp_rank = dp_rank
        self._wanted = asyncio.Event()
        self.vitals = EngineLiveness(start_s)

    def move(self, url: str) -> None:
        """The engine is asked there from now on."""
        self._url = url.rstrip("/")
        self._wanted.set()

    def ask_now(self) -> None:
        """Since when it lives is wanted at once: its stream was connected again."""
        self._wanted.set()

    async def run(self) -> None:
        number = 0
        while True:
            wanted = self._wanted.is_set()
            self._wanted.clear()
            with_start = wanted or self.vitals.start_s is None or number % METRICS_EVERY == 0
            number += 1
            sign, asked_s = await self._ask("/health"), self._clock()
            if with_start and isinstance(sign, Pulse):
                # Answered also while the core behind the HTTP is gone: no sign of life by itself.
                said = await self._ask("/metrics")
                sign = said if isinstance(said, Pulse) else sign
            for found in self.vitals.observe(sign, asked_s):
                self._tell(found)
            pause_s = self._interval_s * self._rng.uniform(1 - JITTER, 1 + JITTER)
            try:
                # Not wait_for, which swallows a cancellation at the moment of the event up to Python 3.11.
                async with asyncio.timeout(pause_s):
                    await self._wanted.wait()
            except TimeoutError:
                continue

    async def _ask(self, path: str) -> Pulse | NoPulse:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                async with self._session.get(self._url + path, allow_redirects=False) as answer:
                    if answer.status >= FIRST_ERROR_STATUS:
                        return NoPulse(f"{self._url}{path} answers {answer.status}")
                    return await self._pulse(answer) if path == "/metrics" else Pulse()
        except TimeoutError:
            return NoPulse(f"{self._url} did not answer in {TIMEOUT_S:g} s")
        except aiohttp.ClientConnectorError as error:
            refused = isinstance(error.os_error, ConnectionRefusedError)
            return NoPulse(f"{self._url} cannot be reached: {error.os_error.strerror or error.os_error}", gone=refused)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return NoPulse(f"{self._url} did not answer: {error or type(error).__name__}")

    async def _pulse(self, answer: aiohttp.ClientResponse) -> Pulse:
        if answer.status != HTTPStatus.OK:
            return Pulse()
        page, _ = await read_at_most(answer, MAX_METRICS_BYTES)
        if (said := parse_engine_load(page, self._dp_rank)) is not None:
            self._load(said)
        if ranks := engine_ranks(page):
            self._ranks(ranks)
        if (disk := parse_disk(page, self._dp_rank)) is not None:
            self._disk(disk)
        found = START_TIME.search(page)
        return Pulse(float(found[1]) if found else None)
