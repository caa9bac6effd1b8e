# SPDX-License-Identifier: Apache-2.0
"""Kept connections to the engines, by origin. A request takes a connection and gives it back, or closes it.

An origin never has more connections than requests under way plus MAX_IDLE. The number of clients is bounded, so the
number of connections is bounded too.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque

from kvrouter.router.model.upstream.connection import Connection
from kvrouter.router.model.upstream.failure import Failure, Kind
from kvrouter.router.model.upstream.origin import Target
from kvrouter.router.model.workers.allow_list import LINK_LOCAL, AllowList

# vLLM's HTTP server (uvicorn) closes connections that are idle for 5 s. The pool closes them earlier, so that no request
# meets a closed connection.
KEEP_IDLE_S = 4.0
# After a burst, as many connections are kept as an engine runs requests at once (vLLM's max_num_seqs).
MAX_IDLE = 256
# Connecting takes a millisecond within a data centre; a lost SYN is sent again after one second and after three.
CONNECT_TIMEOUT_S = 4.0


class Pool:
    """The connections of one event loop to all engines. Call `close` at the end."""

    def __init__(self, loop: asyncio.AbstractEventLoop, allowed: AllowList) -> None:
        """Start without connections; `allowed` decides on the addresses, including those that names resolve to."""
        self._loop = loop
        self._allowed = allowed
        # For each origin, the connection that is idle for longest comes first.
        self._idle: dict[tuple[str, int, bool], deque[Connection]] = {}
        self._sweeper: asyncio.TimerHandle | None = None
        self._tls: ssl.SSLContext | None = None

    def idle(self, target: Target) -> Connection | None:
        """Take the open idle connection to `target` that was used last, or return None if there is none."""
        connections = self._idle.get(target.origin)
        while connections:
            connection = connections.pop()
            if connection.is_open:
                return connection
        return None

    async def connect(self, target: Target) -> Connection:
        """Open a new connection. Raises Failure."""
        where = f"{target.host}:{target.port}"
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                transport, connection = await self._loop.create_connection(
                    lambda: Connection(self._loop), target.host, target.port, ssl=self._tls_for(target)
                )
        except TimeoutError:
            raise Failure(Kind.CONNECT_TIMEOUT, f"no connection to {where} in {CONNECT_TIMEOUT_S:g} s") from None
        except (OSError, UnicodeError) as error:
            # A host name that cannot be encoded for the look-up raises UnicodeError.
            what = getattr(error, "strerror", None) or error
            raise Failure(Kind.REFUSED, f"no connection to {where}: {what}") from error
        address = transport.get_extra_info("peername")[0]
        if not self._allowed.admits_address(target.host, address):
            # No request was sent yet, so closing loses nothing.
            connection.close()
            raise Failure(Kind.REFUSED, LINK_LOCAL.format(host=target.host))
        return connection

    def give_back(self, target: Target, connection: Connection) -> None:
        """Keep the connection after an exchange if another one may follow; otherwise close it."""
        connections = self._idle.setdefault(target.origin, deque())
        if len(connections) >= MAX_IDLE or not connection.reusable():
            connection.close()
            return
        connection.idle_s = self._loop.time()
        connections.append(connection)
        if self._sweeper is None:
            self._sweeper = self._loop.call_later(KEEP_IDLE_S, self._sweep)

    def close(self) -> None:
        """Close all idle connections."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        for connections in self._idle.values():
            for connection in connections:
                connection.close()
        self._idle.clear()

    def _sweep(self) -> None:
        """Close the connections that were idle for KEEP_IDLE_S, and schedule the next sweep while any is left."""
        now = self._loop.time()
        next_s = None
        for origin in list(self._idle):
            connections = self._idle[origin]
            while connections and connections[0].idle_s <= now - KEEP_IDLE_S:
                connections.popleft().close()
            if not connections:
                del self._idle[origin]
            elif next_s is None or connections[0].idle_s < next_s:
                next_s = connections[0].idle_s
        self._sweeper = None
        if next_s is not None:
            self._sweeper = self._loop.call_later(max(0.0, next_s + KEEP_IDLE_S - now), self._sweep)

    def _tls_for(self, target: Target) -> ssl.SSLContext | None:
        if not target.tls:
            return None
        if self._tls is None:
            self._tls = ssl.create_default_context()
        return self._tls
