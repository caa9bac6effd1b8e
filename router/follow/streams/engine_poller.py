# SPDX-License-Identifier: Apache-2.0
"""The HTTP polls of one engine: whether it lives, when its process started, and its load.

This is the async shell around `engine_liveness.py` and `model/engines/engine_metrics.py`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from http import HTTPStatus

from kvrouter.router.base.common import ticks
from kvrouter.router.follow.streams.commits import Commits
from kvrouter.router.follow.streams.offload_watch import parse_offload
from kvrouter.router.follow.streams.stream_services import StreamServices
from kvrouter.router.follow.streams.worker_state import WorkerState
from kvrouter.router.index.ingest.engine_liveness import (
    EngineBack,
    EngineLiveness,
    EngineRestarted,
    NoPulse,
    Pulse,
    VitalSign,
)
from kvrouter.router.model.engines.engine_metrics import engine_life, engine_ranks, parse_engine_load
from kvrouter.router.model.upstream.engine_client import EngineClient
from kvrouter.router.model.upstream.failure import Failure
from kvrouter.router.model.upstream.origin import Target, target_of

# Every second poll also requests /metrics, a page of some 100 kB with the start time and the load of the engine. Only
# the health path shows whether the engine's core lives. The load that the router itself caused is known without a poll.
METRICS_EVERY = 2
METRICS_PATH = "/metrics"
# A busy engine answers its /health within a second; a slower answer counts as a miss.
TIMEOUT_S = 2.0
# If a deadline is noticed later than this, this process stood still, and the engine may be well.
STALL_S = 0.1
# How many engines one router polls at the same moment. If a thousand ran at once, each would wait for all. 128 answers
# take this process less than STALL_S; with a lower limit, engines that hang would hold up the others.
POLLS_AT_ONCE = 128
# The share of the interval by which polls vary to either side, so that engines that were registered at once are not
# polled at once forever.
JITTER = 0.2
# Enough for some hundred series for each of some hundred LoRA adapters.
MAX_METRICS_BYTES = 8 * 1024**2
# vLLM's /health answers 503 when its engine core is gone. An answer below 500 comes from a live server, even if it does
# not know the path.
FIRST_ERROR_STATUS = 500


# Why the stream is read again when the ranks of a worker's own become known.
RANKS_LATE = "batches of its own rank were left out before the engine named its ranks"


class EnginePoller:
    """The polls of one worker's engine while this process follows its stream.

    The answers go to the worker's state. If another life of the engine may have begun, the stream is read again.
    """

    def __init__(self, state: WorkerState, commits: Commits, services: StreamServices) -> None:
        """Begin without polling.

        Args:
            state: The worker's state, which takes the answers.
            commits: Writes changes of the worker's state to the store.
            services: The services that all streams of the process share.
        """
        self._state = state
        self._commits = commits
        self._services = services
        self._url = ""
        self._target: Target | None = None
        # Set by `ask_now` and at the end of a pause.
        self._due = asyncio.Event()
        # Whether the next poll must request the engine's start time.
        self._wants_start = False
        # Has the followed stream read again, for the given reason; None while no stream is followed.
        self.expire: Callable[[str, float], None] | None = None
        # When the engine's process was last known to be the same, by the clock.
        self._same_s = -math.inf

    def move(self, url: str) -> None:
        """Poll the engine at this URL from now on."""
        self._url = url.rstrip("/")
        self._target = target_of(url)
        self.ask_now()

    def ask_now(self) -> None:
        """Poll at once for the engine's start time, because its stream was connected again."""
        self._wants_start = True
        self._due.set()

    def read_again(self, reason: str, age_s: float = math.inf) -> None:
        """Have the followed stream read again, if one is followed; a connection older than `age_s` is opened again."""
        if self.expire is not None:
            self.expire(reason, age_s)

    async def run(self) -> None:
        """Poll until cancelled; return at once if the engine cannot be polled."""
        state, services = self._state, self._services
        url, interval_s = state.registration.url, services.config.health_interval_s
        if url is None or services.http is None or not interval_s:
            return
        self.move(url)
        contact = state.ingest.profile.contact
        liveness = EngineLiveness(state.facts.engine_start_s, absent=bool(contact.absent), lost=bool(contact.down))
        number = 0
        while True:
            with_start = self._wants_start or liveness.start_s is None or number % METRICS_EVERY == 0
            self._wants_start = False
            self._due.clear()
            number += 1
            async with services.polls:
                sign = await self._ask(services.http, state.profile.engine.health_path)
                requested_s = services.clock()
                if with_start and isinstance(sign, Pulse):
                    # This is no sign of life by itself, as /metrics is answered even while the engine core is gone.
                    metrics_sign = await self._ask(services.http, METRICS_PATH)
                    sign = metrics_sign if isinstance(metrics_sign, Pulse) else sign
            if sign is not None:
                signs = liveness.observe(sign, requested_s)
                state.on_engine_start(liveness.start_s)
                for vital_sign in signs:
                    self._take(vital_sign)
                if isinstance(sign, Pulse) and (sign.start_s is not None or liveness.start_s is None):
                    self._same_s = requested_s
            # Not asyncio.timeout, because it would end every pause with two exceptions.
            pause_s = interval_s * services.rng.uniform(1 - JITTER, 1 + JITTER)
            timer = asyncio.get_running_loop().call_later(ticks.pause_s(pause_s), self._due.set)
            try:
                await self._due.wait()
            finally:
                timer.cancel()

    def _take(self, sign: VitalSign) -> None:
        """Report a change of the engine's life, and have the stream read again if another life may have begun."""
        if isinstance(sign, EngineBack | EngineRestarted):
            reason = "the engine answers again" if isinstance(sign, EngineBack) else sign.reason
            # An older connection may lead to the former process, whose machine may have died without a word.
            self.read_again(reason, self._services.clock() - self._same_s)
        self._state.on_life_sign(sign)

    async def _ask(self, http: EngineClient, path: str) -> Pulse | NoPulse | None:
        """Request the path and return the sign of life, or None if this process was too slow to judge."""
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
            # The cause is the operating system's error.
            gone = isinstance(failure.__cause__, ConnectionRefusedError)
            return NoPulse(f"{self._url} did not answer: {failure.text}", gone)
        if status >= FIRST_ERROR_STATUS:
            return NoPulse(f"{self._url}{path} answers {status}")
        return self._pulse(body) if path == METRICS_PATH and status == HTTPStatus.OK else Pulse()

    def _pulse(self, page: bytes) -> Pulse:
        """Take the facts of a metrics page, and return the sign of life in it."""
        state, engine = self._state, self._state.profile.engine
        dp_rank, gauges = state.worker.dp_rank, engine.gauges
        life, offload = engine_life(page, gauges), parse_offload(page, dp_rank)
        state.on_metrics_page(life, offload, engine.cache_in(page, dp_rank))
        if offload is not None:
            self._commits.wake()
        if (load := parse_engine_load(page, dp_rank, gauges)) is not None:
            self._services.engine_load(state.worker, load)
        ranks = engine_ranks(page, gauges)
        if ranks and ranks != state.facts.engine_ranks and state.on_ranks(ranks):
            self.read_again(RANKS_LATE)
        return Pulse(life)
