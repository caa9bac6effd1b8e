# SPDX-License-Identifier: Apache-2.0
"""One run beside another router: it reads that router's requests, queries the index for each, and sums up the answers.

This is the async shell. It changes nothing in the router that it queries, and sends no request to an engine.
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

# Questions to the router that run at the same time.
JUDGES = 16
# Mirrored requests that wait for their question to be sent.
MAX_QUEUED = 1_024
# The fleet is read again this often, as an unknown worker may be new.
FLEET_AGAIN_S = 5.0
# Time for questions under way when a signal ends the run.
FINISH_S = 2.0


class ShadowOptions(msgspec.Struct, frozen=True):
    """The options of one run."""

    url: str
    api_key: str | None
    # For https; None without TLS.
    tls: ssl.SSLContext | None
    # Host and port for mirrored requests; port 0 takes a free one.
    listen: tuple[str, int] | None
    # A file, or `-` for stdin.
    log: str | None
    follow: bool
    worker_header: str | None
    id_header: str
    max_age_s: float
    # How long a mirrored request waits for the log's line about it.
    wait_s: float
    interval_s: float


class _Job(NamedTuple):
    """An observation to judge."""

    observation: Observation
    # Called once, when the observation is judged or dropped.
    done: Callable[[], None]


class ShadowRun:
    """A run: its inputs, its questions to the router, and its sums.

    `clock` gives the seconds for ages and waits. `wall` gives seconds since 1970, which the times of log lines are
    compared with.
    """

    def __init__(self, options: ShadowOptions, *, clock: Callable[[], float], wall: Callable[[], float]) -> None:
        self._options = options
        self._clock = clock
        self._wall = wall
        self._began_s = clock()
        self._tally = Tally()
        # If both are read, the mirror has the prompts and the log has their outcomes.
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
        """Run until the log ends or a signal comes, and return the report. Raises StartError.

        Args:
            show: Called with the counters every interval.
            started: Called with one line about each input.
        """
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
        """Return the counters up to now."""
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

    # Inputs

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
            # The queue is never full: the reader has fewer lines under way, and without a mirror there is no other
            # input.
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

    # Judging

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
        """Read the list of workers again, to find new ones, unless it was read less than FLEET_AGAIN_S ago."""
        if self._clock() < self._fleet_due_s:
            return
        self._fleet_due_s = self._clock() + FLEET_AGAIN_S
        # If this fails, the request is counted under an unknown worker, and a later request tries again.
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
        """Stop the inputs, and count the requests that are left."""
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
    """Raise the exception of the first task that fails; no task ends in another way."""
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()
