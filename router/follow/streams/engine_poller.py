# SPDX-License-Identifier: Apache-2.0
"""Asks one engine over HTTP, again and again, whether it lives, since when, and what load it has. The async shell
around `engine_liveness.py` and `load/engine_metrics.py`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http import HTTPStatus

from kvrouter.router.follow.streams.commit_loop import CommitLoop
from kvrouter.router.follow.streams.cpu_tier_watch import parse_cpu_tier
from kvrouter.router.follow.streams.disk_watch import parse_disk
from kvrouter.router.follow.streams.stream_services import StreamServices
from kvrouter.router.follow.streams.worker_record import WorkerRecord
from kvrouter.router.index.ingest.engine_liveness import (
    EngineBack,
    EngineLiveness,
    EngineLost,
    EngineRestarted,
    NoPulse,
    Pulse,
    VitalSign,
)
from kvrouter.router.model.engines.engine_metrics import EngineLoad, engine_life, engine_ranks, parse_engine_load
from kvrouter.router.model.upstream.engine_client import EngineClient
from kvrouter.router.model.upstream.failure import Failure
from kvrouter.router.model.upstream.origin import Target, target_of

# Every second poll requests /metrics too: some 100 kB, with the start time and the load of the engine; only its health
# path says whether its core lives. The load of what the router itself sent is known without a poll.
METRICS_EVERY = 2
METRICS_PATH = "/metrics"
# A busy engine answers its /health within a second; what takes longer counts as a miss.
TIMEOUT_S = 2.0
# A deadline that is noticed so much later says that this process stood still, not that the engine did.
STALL_S = 0.1
# Engines of one router that are polled at the same moment: of a thousand at once, each would wait for all. 128 answers
# take this process less than STALL_S; with a lower limit, engines that hang would hold up the others.
POLLS_AT_ONCE = 128
# The share of the interval by which polls vary to either side, so that many engines registered at once are not polled
# at once for ever.
JITTER = 0.2
# Some hundred series for each of some hundred LoRA adapters.
MAX_METRICS_BYTES = 8 * 1024**2
# vLLM's /health answers 503 when its engine core is gone; below 500 somebody lives, whatever it thinks of the path.
FIRST_ERROR_STATUS = 500


class EnginePoller:
    """The polls of one worker's engine while its stream is followed. The answers go to the worker's record; if another
    life may have begun, the stream is read again."""

    def __init__(
        self,
        record: WorkerRecord,
        commits: CommitLoop,
        services: StreamServices,
        engine_load: Callable[[EngineLoad], None],
    ) -> None:
        """engine_load: called with the numbers of the engine's core with this rank."""
        self._record = record
        self._commits = commits
        self._services = services
        self._engine_load = engine_load
        self._url = ""
        self._target: Target | None = None
        # Set by `ask_now` and at the end of a pause.
        self._due = asyncio.Event()
        self._wants_start = False
        # Reads the current stream again; None without one.
        self.expire: Callable[[str], None] | None = None

    def move(self, url: str) -> None:
        """Polls the engine there from now on."""
        self._url = url.rstrip("/")
        self._target = target_of(url)
        self.ask_now()

    def ask_now(self) -> None:
        """Since when it lives is wanted at once: its stream was connected again."""
        self._wants_start = True
        self._due.set()

    def judge_ranks(self) -> None:
        """Take what is known now of the ranks that its events may name."""
        if self._record.ingest.allow_ranks(self._record.allowed_ranks()) and self.expire is not None:
            self.expire("batches of its own rank were left out before the engine named its ranks")
        self._record.refresh()

    async def run(self) -> None:
        """Ends only where the engine cannot be polled, or by cancellation."""
        facts, services = self._record.facts, self._services
        url, interval_s = self._record.registration.url, services.config.health_interval_s
        if url is None or services.http is None or not interval_s:
            return
        self.move(url)
        contact = self._record.ingest.profile.contact
        facts.vitals = EngineLiveness(facts.vitals.start_s, absent=bool(contact.absent), lost=bool(contact.down))
        number = 0
        while True:
            with_start = self._wants_start or facts.vitals.start_s is None or number % METRICS_EVERY == 0
            self._wants_start = False
            self._due.clear()
            number += 1
            async with services.polls:
                sign = await self._ask(services.http, self._record.profile.engine.health_path)
                asked_s = services.clock()
                if with_start and isinstance(sign, Pulse):
                    # Answered also while the core behind the HTTP is gone: no sign of life by itself.
                    said = await self._ask(services.http, METRICS_PATH)
                    sign = said if isinstance(said, Pulse) else sign
            for found in () if sign is None else facts.vitals.observe(sign, asked_s):
                self._take(found)
            # Not asyncio.timeout, which ends every pause with two exceptions.
            pause_s = interval_s * services.rng.uniform(1 - JITTER, 1 + JITTER)
            timer = asyncio.get_running_loop().call_later(pause_s, self._due.set)
            try:
                await self._due.wait()
            finally:
                timer.cancel()

    def _take(self, sign: VitalSign) -> None:
        ingest = self._record.ingest
        ingest.on_liveness(sign)
        if isinstance(sign, EngineLost):
            self._record.facts.forget_process()
        if isinstance(sign, EngineBack | EngineRestarted) and self.expire is not None:
            self.expire("the engine answers again" if isinstance(sign, EngineBack) else sign.reason)
            ingest.reports.wants_snapshot = None
        self._record.refresh()
        self._record.have_written()

    async def _ask(self, http: EngineClient, path: str) -> Pulse | NoPulse | None:
        """None: the router was too slow to know."""
        assert self._target is not None
        due_s = self._services.clock() + TIMEOUT_S
        try:
            status, body = await http.get(self._target, path, MAX_METRICS_BYTES, TIMEOUT_S)
        except TimeoutError:
            if self._services.clock() > due_s + STALL_S:
                self._services.metrics.polls_unjudged.inc()
                return None
            return NoPulse(f"{self._url} did not answer in {TIMEOUT_S:g} s")
        except Failure as failure:
            # Raised from what the operating system said of the connection.
            gone = isinstance(failure.__cause__, ConnectionRefusedError)
            return NoPulse(f"{self._url} did not answer: {failure.text}", gone)
        if status >= FIRST_ERROR_STATUS:
            return NoPulse(f"{self._url}{path} answers {status}")
        return self._pulse(body) if path == METRICS_PATH and status == HTTPStatus.OK else Pulse()

    def _pulse(self, page: bytes) -> Pulse:
        facts, dp_rank = self._record.facts, self._record.registration.worker.dp_rank
        engine = self._record.profile.engine
        gauges, life = engine.gauges, engine_life(page, engine.gauges)
        if life is not None and facts.vitals.start_s not in (None, life):
            # The page is of another process than the last one.
            facts.forget_process()
        if (said := parse_engine_load(page, dp_rank, gauges)) is not None:
            self._engine_load(said)
        if (ranks := engine_ranks(page, gauges)) and ranks != facts.engine_ranks:
            facts.engine_ranks = ranks
            self.judge_ranks()
        if (disk := parse_disk(page, dp_rank)) is not None:
            facts.disk.observe(disk, self._services.clock())
            self._commits.wake()
        if (tier := parse_cpu_tier(page, dp_rank)) is not None:
            facts.cpu_tier.observe(tier, self._services.clock())
        if (cache := engine.cache_in(page, dp_rank)) is not None and cache != facts.cache:
            facts.cache = cache
            self._record.refresh()
            self._record.have_written()
        return Pulse(life)
