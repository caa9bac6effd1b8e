# SPDX-License-Identifier: Apache-2.0
"""The end of a serving process: its signals, and uvicorn's part of it."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import uvicorn

from kvrouter.router.base.common.shutdown import Shutdown, take_waiting

log = logging.getLogger(__name__)


# Notifies a part that the supervisor got a second signal. Not SIGTERM, which a service manager may send to all
# processes at once.
HURRY = signal.SIGINT


# How often a server that waits for its end looks for a second signal.
LOOK_S = 0.05


class Beside(Protocol):
    """Another server of the process, which ends with HTTP."""

    async def stop(self, grace_s: float) -> None:
        """Takes no more requests; those under way have this long to end, or what a later call says."""


class Server(uvicorn.Server):
    """uvicorn that reports when it serves and leaves signals alone: it would handle them itself and raise them again
    when HTTP is down, during our own shutdown."""

    def __init__(self, config: uvicorn.Config, started: Callable[[], None], beside: Beside | None = None) -> None:
        super().__init__(config)
        self._tell = started
        self._beside = beside

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self._tell()

    def end(self) -> None:
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await take_waiting(sockets or [], lambda: self.force_exit)
        await asyncio.gather(super().shutdown(sockets=sockets), self._end_beside())

    async def _end_beside(self) -> None:
        if self._beside is None:
            return
        ending = asyncio.ensure_future(self._beside.stop(self.config.timeout_graceful_shutdown or 0))
        while not ending.done():
            await asyncio.wait({ending}, timeout=LOOK_S)
            if self.force_exit:
                await self._beside.stop(0)
        await ending

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Stopping:
    """What a signal does: before the server serves it cancels the start, after that it ends the server; the second one
    at once.

    delay_s: for so long it goes on taking connections, of those who do not know yet. part: whether a supervisor sends
    them."""

    def __init__(self, delay_s: float, *, part: bool) -> None:
        self.shutdown = Shutdown()
        self._delay_s = delay_s
        self._part = part
        self.server: Server | None = None
        self._starting: asyncio.Task[Server] | None = None

    def on_signal(self, number: int) -> None:
        server = self.server
        if self.shutdown.begun:
            if server is not None and (number == HURRY or not self._part):
                # Without waiting for open connections.
                server.should_exit = server.force_exit = True
            return
        self.shutdown.begin()
        if server is not None:
            log.info("stopping", extra={"delay_s": self._delay_s, "drain_s": server.config.timeout_graceful_shutdown})
            asyncio.get_running_loop().call_later(self._delay_s, server.end)
        elif self._starting is not None:
            self._starting.cancel()

    def on_supervisor_gone(self) -> None:
        """Nothing more comes on stdin, so it was closed."""
        asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
        log.warning("the supervisor is gone")
        self.on_signal(signal.SIGTERM)

    async def unless_stopped(self, start: Coroutine[Any, Any, Server]) -> Server | None:
        """The started server, or None when a signal came first."""
        self._starting = asyncio.get_running_loop().create_task(start)
        try:
            server = await self._starting
            return None if self.shutdown.begun else server
        except asyncio.CancelledError:
            if self.shutdown.begun:
                return None
            raise


@contextmanager
def stopping_on_signals(delay_s: float, part: bool) -> Iterator[Stopping]:
    loop = asyncio.get_running_loop()
    stopping = Stopping(delay_s, part=part)
    signals = (signal.SIGINT, signal.SIGTERM)
    for number in signals:
        loop.add_signal_handler(number, stopping.on_signal, number)
    try:
        yield stopping
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
