# SPDX-License-Identifier: Apache-2.0
"""One run beside another router: what comes in, the index's answer to each, and the sums. The async shell.

It asks the router for hits and changes nothing there; no request goes to an engine from here.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import ssl
from collections.abc import Callable
from typing import NamedTuple

import aiohttp
import msgspec

from kvrouter.router.base.common.errors import StartError
from kvrouter.shadow.awaited import Awaited, Pair
from kvrouter.shadow.index_client import IndexClient
from kvrouter.shadow.log_line import LogReading, read_outcome, read_request
from kvrouter.shadow.log_reader import LogReader
from kvrouter.shadow.mirror_listener import HeldBytes, MirrorListener
from kvrouter.shadow.observation import Observation, Outcome, Skip, Unjudged
from kvrouter.shadow.question import fields_of, question_of
from kvrouter.shadow.tally import Report, Tally
from kvrouter.shadow.verdict import judge, snapshot_of
from kvrouter.shadow.worker_names import FleetNames

# Questions to the router at a time.
JUDGES = 16
# Mirrored requests that wait for their question.
MAX_QUEUED = 1_024
# A worker that is not known may be new.
FLEET_AGAIN_S = 5.0
# For what is under way when the run is ended by a signal.
FINISH_S = 2.0


class ShadowOptions(msgspec.Struct, frozen=True):
    """tls: for https; None: plain. listen: host and port, 0: a free one. log: file, `-` for stdin. wait_s: for the log's
    line about a mirrored request."""

    url: str
    api_key: str | None
    tls: ssl.SSLContext | None
    listen: tuple[str, int] | None
    log: str | None
    follow: bool
    worker_header: str | None
    id_header: str
    max_age_s: float
    wait_s: float
    interval_s: float


class _Job(NamedTuple):
    """done: called once, when it is judged or dropped."""

    observation: Observation
    done: Callable[[], None]


class ShadowRun:
    """clock: seconds, for ages and waits; wall: seconds since 1970, which lines of a log are compared with."""

    def __init__(self, options: ShadowOptions, *, clock: Callable[[], float], wall: Callable[[], float]) -> None:
        self._options = options
        self._clock = clock
        self._wall = wall
        self._began_s = clock()
        self._tally = Tally()
        # Where both are read, the mirror has the prompts, and the log what came of them.
        joins = options.listen is not None and options.log is not None
        self._awaited = Awaited(options.wait_s) if joins else None
        self._held = HeldBytes()
        self._jobs: asyncio.Queue[_Job] = asyncio.Queue(MAX_QUEUED)
        self._fleet = FleetNames({}, frozenset())
        self._fleet_due_s = 0.0
        self._log_grows = True
        self._log: LogReader | None = None
        self._ended = asyncio.Event()
        self._is_cut = False

    async def run(self, show: Callable[[Report], None], started: Callable[[str], None]) -> Report:
        """Until the log ends or a signal comes. show: given the counters every interval. started: given one line about
        what it reads. Raises StartError."""
        options = self._options
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._cut)
        headers = {} if options.api_key is None else {"authorization": f"Bearer {options.api_key}"}
        connector = aiohttp.TCPConnector(ssl=True if options.tls is None else options.tls)
        async with aiohttp.ClientSession(headers=headers, connector=connector) as session:
            client = IndexClient(session, options.url)
            try:
                self._fleet = await client.fleet()
            except Unjudged as problem:
                raise StartError(problem.detail) from None
            self._fleet_due_s = self._clock() + FLEET_AGAIN_S
            listener = await self._start_inputs(started, loop)
            tasks = [asyncio.create_task(self._judge_all(client)) for _ in range(JUDGES)]
            tasks.append(asyncio.create_task(self._tick(client, show)))
            failed = asyncio.create_task(_first_failure(tasks))
            ended = asyncio.create_task(self._ended.wait())
            try:
                await asyncio.wait({failed, ended}, return_when=asyncio.FIRST_COMPLETED)
                if failed.done():
                    failed.result()
                await self._finish(listener)
            finally:
                for task in (*tasks, failed, ended):
                    task.cancel()
                await asyncio.gather(*tasks, failed, ended, return_exceptions=True)
        return self.report(is_final=True)

    def report(self, *, is_final: bool) -> Report:
        waiting = self._jobs.qsize() + (0 if self._awaited is None else self._awaited.waiting)
        return self._tally.report(self._clock() - self._began_s, waiting=waiting, is_final=is_final)

    def _cut(self) -> None:
        self._is_cut = True
        self._ended.set()

    async def _start_inputs(
        self, started: Callable[[str], None], loop: asyncio.AbstractEventLoop
    ) -> MirrorListener | None:
        options = self._options
        if options.log is not None:
            try:
                self._log = LogReader(
                    options.log,
                    follow=options.follow,
                    on_line=self._on_line if self._awaited is None else self._on_outcome,
                    on_long=lambda: self._tally.skip(Skip.TOO_LARGE),
                    on_end=self._on_log_end,
                )
            except OSError as error:
                raise StartError(f"cannot read --log {options.log}: {error.strerror}; name a readable file") from None
            self._log_grows = self._log.grows
        listener = None
        if options.listen is not None:
            host, port = options.listen
            listener = MirrorListener(
                self._on_mirrored,
                self._tally.skip,
                self._held,
                worker_header=options.worker_header,
                id_header=options.id_header,
            )
            try:
                port = await listener.start(host, port)
            except OSError as error:
                raise StartError(f"cannot listen on {host}:{port}: {error.strerror or error}; pass --listen") from None
            started(f"mirror requests to http://{f'[{host}]' if ':' in host else host}:{port}")
        if self._log is not None:
            self._log.start(loop)
            started(f"reading {'stdin' if options.log == '-' else options.log}")
        return listener

    # -- what comes in

    def _on_mirrored(self, body: bytes, worker: str | None, request_id: str | None) -> None:
        try:
            question = question_of(fields_of(body), self._fleet.only_model)
            observation = Observation(question, Outcome(worker), self._clock(), request_id)
            self._jobs.put_nowait(_Job(observation, lambda: self._held.release(len(body))))
        except (Unjudged, asyncio.QueueFull) as problem:
            self._held.release(len(body))
            if isinstance(problem, Unjudged):
                self._tally.skip(problem.reason, problem.detail)
            else:
                self._tally.skip(Skip.OVERFLOW)

    def _on_line(self, line: bytes) -> None:
        assert self._log is not None
        reading = LogReading(self._log_grows, self._fleet.only_model)
        try:
            observation = read_request(line, reading, now_s=self._clock(), wall_s=self._wall())
            # Never full: the reader has fewer lines under way, and without it nothing else comes.
            self._jobs.put_nowait(_Job(observation, self._log.done))
        except Unjudged as problem:
            self._tally.skip(problem.reason, problem.detail)
            self._log.done()

    def _on_outcome(self, line: bytes) -> None:
        assert self._log is not None and self._awaited is not None
        try:
            request_id, outcome = read_outcome(line)
        except Unjudged as problem:
            self._tally.skip(problem.reason, problem.detail)
        else:
            for pair in self._awaited.add_outcome(request_id, outcome, self._clock()):
                self._count(pair)
        self._log.done()

    def _on_log_end(self, problem: str) -> None:
        if problem:
            self._tally.skip(Skip.BROKEN, f"the log cannot be read further: {problem}")
        if self._options.listen is None:
            self._ended.set()

    # -- what becomes of it

    async def _judge_all(self, client: IndexClient) -> None:
        while True:
            job = await self._jobs.get()
            try:
                await self._judge(client, job.observation)
            except asyncio.CancelledError:
                self._tally.skip(Skip.UNFINISHED)
                raise
            finally:
                job.done()
                self._jobs.task_done()

    async def _judge(self, client: IndexClient, observation: Observation) -> None:
        try:
            if (age_s := self._clock() - observation.seen_s) > self._options.max_age_s:
                raise Unjudged(Skip.TOO_LATE, f"{age_s:.1f} s")
            answer = await client.select(observation.question)
            try:
                snapshot = snapshot_of(answer, is_before=not observation.is_served)
            except (KeyError, TypeError, ValueError):
                raise Unjudged(Skip.REFUSED, "the answer does not come from a router of this version") from None
        except Unjudged as problem:
            self._tally.skip(problem.reason, problem.detail)
            return
        pairs = [Pair(snapshot, observation.outcome)]
        if self._awaited is not None and observation.request_id is not None:
            pairs = self._awaited.add_snapshot(observation.request_id, pairs[0], self._clock())
        for pair in pairs:
            if pair.outcome.worker is not None and not self._fleet.ranks(pair.outcome.worker):
                await self._look_again(client)
            self._count(pair)

    def _count(self, pair: Pair) -> None:
        try:
            self._tally.count(judge(pair.snapshot, pair.outcome, self._fleet))
        except Unjudged as problem:
            self._tally.skip(problem.reason, problem.detail)

    async def _look_again(self, client: IndexClient) -> None:
        """At the fleet, which has no worker of that name."""
        if self._clock() < self._fleet_due_s:
            return
        self._fleet_due_s = self._clock() + FLEET_AGAIN_S
        # The request counts as one of an unknown worker then, and the next one looks again.
        with contextlib.suppress(Unjudged):
            self._fleet = await client.fleet()

    async def _tick(self, client: IndexClient, show: Callable[[Report], None]) -> None:
        while True:
            await asyncio.sleep(self._options.interval_s)
            await self._look_again(client)
            if self._awaited is not None:
                for pair in self._awaited.expired(self._clock()):
                    self._count(pair)
            show(self.report(is_final=False))

    async def _finish(self, listener: MirrorListener | None) -> None:
        """Stops what comes in, and counts what is left."""
        if listener is not None:
            await listener.stop()
        if self._log is not None:
            self._log.stop()
        try:
            async with asyncio.timeout(FINISH_S if self._is_cut else None):
                await self._jobs.join()
        except TimeoutError:
            while not self._jobs.empty():
                self._jobs.get_nowait()
                self._tally.skip(Skip.UNFINISHED)
        if self._awaited is not None:
            for pair in self._awaited.rest():
                self._count(pair)
            if self._awaited.unmatched:
                self._tally.skip(Skip.UNMATCHED, requests=self._awaited.unmatched)


async def _first_failure(tasks: list[asyncio.Task[None]]) -> None:
    """Raises what the first of them raises: none of them ends otherwise."""
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()
