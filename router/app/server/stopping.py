# SPDX-License-Identifier: Apache-2.0
"""The end of a serving process: its signals, and the shutdown of uvicorn."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import uvicorn

from kvrouter.router.base.common import ticks
from kvrouter.router.base.common.shutdown import Shutdown, take_waiting

log = logging.getLogger(__name__)


# The signal by which a supervisor that got a second signal makes its processes stop at once. It is not SIGTERM, because
# a service manager may send that to all processes at once.
HURRY = signal.SIGINT


# The line that a supervisor writes to a process to make it read its files again. A signal would not do: SIGHUP ends a
# process that has not yet installed its handler.
RELOAD = b"reload\n"

# The interval at which a server that waits for its end checks for a second signal.
LOOK_S = 0.05

# The interval at which uvicorn's server checks whether it is to end; at every tenth check it makes a new Date.
SERVER_LOOK_S = 0.1

# Ends another server of the process: it takes no more requests, and those under way have the given seconds to end, or as
# long as a later call says.
EndBeside: TypeAlias = Callable[[float], Awaitable[None]]


def has_terminal() -> bool:
    """Return whether this process has a controlling terminal, which also sends SIGHUP when it is closed."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


class Server(uvicorn.Server):
    """A uvicorn server that reports when it serves and leaves signals alone.

    uvicorn itself would handle signals, and raise them again when HTTP is down, during our own shutdown.
    """

    def __init__(
        self, config: uvicorn.Config, started: Callable[[], None], end_beside: EndBeside | None = None
    ) -> None:
        """Create the server.

        Args:
            config: The settings of uvicorn.
            started: Called when the server serves.
            end_beside: Ends another server, which ends with this one.
        """
        super().__init__(config)
        self._tell = started
        self._beside = end_beside

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start serving, and report it."""
        await super().startup(sockets=sockets)
        self._tell()

    async def main_loop(self) -> None:
        """Call `on_tick` ten times a second, as uvicorn does, together with the other work of the process."""
        for counter in itertools.count():
            if await self.on_tick(counter):
                return
            await ticks.sleep(SERVER_LOOK_S)

    def end(self) -> None:
        """Make the server shut down."""
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept the waiting connections, then end this server and the one beside it."""
        await take_waiting(sockets or [], lambda: self.force_exit)
        await asyncio.gather(super().shutdown(sockets=sockets), self._end_beside())

    async def _end_beside(self) -> None:
        if self._beside is None:
            return
        ending = asyncio.ensure_future(self._beside(self.config.timeout_graceful_shutdown or 0))
        while not ending.done():
            await asyncio.wait({ending}, timeout=LOOK_S)
            if self.force_exit:
                await self._beside(0)
        await ending

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing, in place of uvicorn's handling of signals."""
        yield


class Stopping:
    """The reaction to signals.

    Before the server serves, a signal cancels the start. Later, the first signal ends the server after a delay, and the
    second one at once.
    """

    def __init__(self, delay_s: float, *, part: bool) -> None:
        """Create the reaction; `stopping_on_signals` installs it.

        Args:
            delay_s: How many seconds the server continues to accept connections, from clients that do not know of its
                end yet.
            part: Whether a supervisor sends the signals.
        """
        self.shutdown = Shutdown()
        self._delay_s = delay_s
        self._part = part
        self.server: Server | None = None
        self._starting: asyncio.Task[Server] | None = None
        # Reads the settings file, and the files that the settings name, again.
        self.reload: Callable[[], None] = lambda: None
        self._has_terminal = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN and has_terminal()

    def on_signal(self, number: int) -> None:
        """Begin the shutdown; once it has begun, end it at once, but under a supervisor only on HURRY."""
        server = self.server
        if self.shutdown.begun:
            if server is not None and (number == HURRY or not self._part):
                # Open connections are not waited for.
                server.should_exit = server.force_exit = True
            return
        self.shutdown.begin()
        if server is not None:
            log.info("stopping", extra={"delay_s": self._delay_s, "drain_s": server.config.timeout_graceful_shutdown})
            asyncio.get_running_loop().call_later(self._delay_s, server.end)
        elif self._starting is not None:
            self._starting.cancel()

    def on_hangup(self) -> None:
        """Read the files again, or stop as on SIGTERM if the signal came because the terminal was closed."""
        if self._has_terminal and not has_terminal():
            self.on_signal(signal.SIGTERM)
        else:
            self.reload()

    def on_supervisor(self) -> None:
        """Read the files again if the supervisor wrote a line, and stop as on SIGTERM if it has ended.

        Call it when stdin becomes readable, but only after the order, the supervisor's first line, has been read.
        """
        if os.read(sys.stdin.fileno(), len(RELOAD)):
            self.reload()
            return
        asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
        log.warning("the supervisor is gone")
        self.on_signal(signal.SIGTERM)

    async def unless_stopped(self, start: Coroutine[Any, Any, Server]) -> Server | None:
        """Run `start` and return the started server, or None if a signal came first."""
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
    """Install a `Stopping` for SIGINT, SIGTERM and SIGHUP within the block."""
    loop = asyncio.get_running_loop()
    stopping = Stopping(delay_s, part=part)
    signals = (signal.SIGINT, signal.SIGTERM)
    for number in signals:
        loop.add_signal_handler(number, stopping.on_signal, number)
    loop.add_signal_handler(signal.SIGHUP, stopping.on_hangup)
    try:
        yield stopping
    finally:
        for number in (*signals, signal.SIGHUP):
            loop.remove_signal_handler(number)
