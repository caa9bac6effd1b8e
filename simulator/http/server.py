# SPDX-License-Identifier: Apache-2.0
"""A simulated replica that listens: HTTP, event stream and replay, started and stopped together."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import NotRequired, TypedDict

import zmq
from aiohttp import web

from kvrouter.events.vllm.publisher import EventPublisher
from kvrouter.simulator.cache.peer import Lender
from kvrouter.simulator.cache.shapes import Geometry
from kvrouter.simulator.engine.realtime import Engine
from kvrouter.simulator.engine.replica import (
    DEFAULT_CHUNK_TOKENS,
    DEFAULT_MAX_RUNNING,
    DEFAULT_MAX_TEXT_TOKENS,
    Replica,
)
from kvrouter.simulator.engine.timing import INSTANT, Timing
from kvrouter.simulator.http.api import Api, EngineLife
from kvrouter.simulator.http.engine_flags import RECOMMENDED, EngineFlags
from kvrouter.simulator.http.event_stream import EventStream
from kvrouter.simulator.http.faults import Faults
from kvrouter.simulator.http.held_ports import held_ports

log = logging.getLogger(__name__)

# When the replica stops, a connection that still waits for an answer is cut after this time.
SHUTDOWN_S = 5.0
# More connections that wait to be accepted than clients open at once.
BACKLOG = 1024

ANY_PORT = "tcp://127.0.0.1:0"


class Endpoints(TypedDict):
    """The addresses at which a replica listens, with the ports that it got."""

    model: str
    url: str
    events: str
    replay: str | None
    # The address that names it as a source of blocks, if it lends them.
    peer: NotRequired[str]


class ReplicaServer:
    """One replica behind HTTP and ZMQ. The constructor binds; `open` and `close` belong to one event loop."""

    def __init__(
        self,
        geometry: Geometry,
        num_blocks: int,
        *,
        context: zmq.Context[zmq.Socket[bytes]],
        model: str,
        host: str = "127.0.0.1",
        # 0 for a free port.
        port: int = 0,
        events: str = ANY_PORT,
        replay: str | None = ANY_PORT,
        timing: Timing = INSTANT,
        cpu_chunks: int = 0,
        chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
        max_running: int = DEFAULT_MAX_RUNNING,
        max_text_tokens: int = DEFAULT_MAX_TEXT_TOKENS,
        dp_rank: int = 0,
        # Whether /kv_event_sources exists.
        event_sources: bool = True,
        flags: EngineFlags = RECOMMENDED,
        # The replicas of this process that lend, by port: this one is added, and its requests may name any of them. None
        # if it neither lends nor fetches.
        lenders: dict[int, Callable[[], Lender | None]] | None = None,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Bind the addresses. Raises OSError or zmq.ZMQError if one is taken, ValueError for a bad size."""
        self._context = context
        self._clock = clock

        def make_replica(on_step: EventStream) -> Replica:
            return Replica(
                geometry,
                num_blocks,
                on_step=on_step.send,
                cpu_chunks=cpu_chunks,
                chunk_tokens=chunk_tokens,
                max_running=max_running,
                max_text_tokens=max_text_tokens,
                hash_seed=flags.hash_seed,
                prefix_caching=flags.prefix_caching,
            )

        def make_life() -> EngineLife:
            stream = EventStream(geometry, self.publisher, clock=clock, dp_rank=dp_rank, is_published=flags.kv_events)
            return EngineLife(Engine(make_replica(stream), timing, clock=monotonic), stream, clock())

        self._make_life = make_life
        with contextlib.ExitStack() as undo:
            self._socket = socket.create_server((host, port), backlog=BACKLOG)
            undo.callback(self._socket.close)
            self.publisher = EventPublisher(events, replay, context=context)
            undo.callback(self.publisher.close)
            address = (host, self._socket.getsockname()[1])
            self.api = Api(
                make_life(),
                model=model,
                address=address,
                streams=(self.publisher.endpoint, self.publisher.replay_endpoint),
                clock=clock,
                restart=self._restart,
                dp_rank=dp_rank,
                event_sources=event_sources,
                flags=flags,
                lenders={} if lenders is None else lenders,
            )
            if lenders is not None:
                lenders[address[1]] = self._lender
            undo.pop_all()
        self.endpoints: Endpoints = {
            "model": model,
            "url": f"http://{host}:{self._socket.getsockname()[1]}",
            "events": self.publisher.endpoint,
            "replay": self.publisher.replay_endpoint,
        }
        if lenders is not None:
            self.endpoints["peer"] = f"{host}:{address[1]}"
        self._runner: web.AppRunner | None = None
        self._running: asyncio.Task[None] | None = None

    @property
    def replica(self) -> Replica:
        """Replica of the present life. Other threads may look at it while no request runs."""
        return self.api.life.engine.replica

    async def open(self) -> None:
        """Begin to answer. The socket listens already, so a client may connect before."""
        # A handler whose client disconnects is cancelled, which aborts the request.
        self._runner = web.AppRunner(
            self.api.app(), handler_cancellation=True, access_log=None, shutdown_timeout=SHUTDOWN_S
        )
        await self._runner.setup()
        await web.SockSite(self._runner, self._socket).start()
        self._running = asyncio.create_task(self._live())

    async def close(self) -> None:
        """Finish running requests, send the last events, free the ports. Safe to call twice, and before `open`."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
        await self._end_life()
        self.release()

    def release(self) -> None:
        """Free the ports of a replica that is not open. Safe to call twice."""
        self._socket.close()
        self.publisher.close()

    async def _end_life(self) -> None:
        if self._running is not None:
            self._running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._running
            self._running = None

    async def _live(self) -> None:
        """Run one life of the engine's process. If the engine fails, clients see its process gone."""
        try:
            await self.api.life.engine.run()
        except Exception:
            log.exception("the simulated engine failed: its process is gone")
            self.api.down = True

    def _lender(self) -> Lender | None:
        offload = self.api.life.engine.replica.offload
        return None if offload is None else offload.lender

    async def _restart(self, down_s: float) -> None:
        """Replace the process: the cache is empty, the event stream begins at 0, the addresses stay the same."""
        self.api.down = True
        await self._end_life()
        if (lender := self._lender()) is not None:
            lender.gone = True
        self.publisher.close()
        async with held_ports(self.endpoints["events"], self.endpoints["replay"]):
            await asyncio.sleep(down_s)
        self.publisher = EventPublisher(self.endpoints["events"], self.endpoints["replay"], context=self._context)
        self.api.life = self._make_life()
        self._running = asyncio.create_task(self._live())
        self.api.down = False


class ServerThread:
    """A thread with an event loop that serves replicas, for callers without an event loop."""

    def __init__(self, servers: Sequence[ReplicaServer], *, faults: Faults | None = None) -> None:
        """Create a thread that is not started; every replica has `faults` from the start."""
        self._servers = list(servers)
        self._faults = faults
        self._open = threading.Event()
        self._stop: Callable[[], None] | None = None
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True, name="kvrouter-sim")

    def start(self) -> None:
        """Start the replicas, and return when all of them answer. Raises the error that prevented it."""
        self._thread.start()
        self._open.wait()
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """Return when all of them have stopped and their ports are free. Safe to call twice, and before `start`."""
        if self._stop is not None:
            self._stop()
            self._thread.join()
        for server in self._servers:
            server.release()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as failure:
            self._failure = failure
            self._open.set()

    async def _serve(self) -> None:
        loop, stopped = asyncio.get_running_loop(), asyncio.Event()

        def stop() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended already
                loop.call_soon_threadsafe(stopped.set)

        self._stop = stop
        try:
            for server in self._servers:
                await server.open()
                if self._faults is not None:
                    await server.api.apply(self._faults)
            self._open.set()
            await stopped.wait()
        finally:
            for server in self._servers:
                await server.close()
