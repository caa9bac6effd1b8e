# SPDX-License-Identifier: Apache-2.0
"""Kept connections to the engines, by origin. A request takes one and gives it back, or closes it.

There are never more than requests under way plus MAX_IDLE for each origin: clients are bounded, so connections are.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque

from kvrouter.router.model.upstream.connection import Connection
from kvrouter.router.model.upstream.failure import Failure, Kind
from kvrouter.router.model.upstream.origin import Target
from kvrouter.router.model.workers.allow_list import LINK_LOCAL, AllowList

# vLLM's HTTP server (uvicorn) closes what is idle for 5 s: who closes first does not meet a closed connection.
KEEP_IDLE_S = 4.0
# A burst's connections are kept up to as many as an engine runs requests at once (vLLM's max_num_seqs).
MAX_IDLE = 256
# Within a data centre a connection takes a millisecond; a SYN that was lost is sent again after one second and after
# three.
CONNECT_TIMEOUT_S = 4.0


class Pool:
    """Belongs to one loop. `close` at the end."""

    def __init__(self, loop: asyncio.AbstractEventLoop, allowed: AllowList) -> None:
        """allowed: which addresses may be connected to, by a name as well."""
        self._loop = loop
        self._allowed = allowed
        # The longest idle first.
        self._idle: dict[tuple[str, int, bool], deque[Connection]] = {}
        self._sweeper: asyncio.TimerHandle | None = None
        self._tls: ssl.SSLContext | None = None

    def idle(self, target: Target) -> Connection | None:
        """The kept connection to `target` that was used last, None when there is none."""
        kept = self._idle.get(target.origin)
        while kept:
            connection = kept.pop()
            if connection.is_open:
                return connection
        return None

    async def connect(self, target: Target) -> Connection:
        """A new connection. Raises Failure."""
        where = f"{target.host}:{target.port}"
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                transport, connection = await self._loop.create_connection(
                    lambda: Connection(self._loop), target.host, target.port, ssl=self._tls_for(target)
                )
        except TimeoutError:
            raise Failure(Kind.CONNECT_TIMEOUT, f"no connection to {where} in {CONNECT_TIMEOUT_S:g} s") from None
        except (OSError, UnicodeError) as error:
            # UnicodeError: a host name that cannot be looked up.
            what = getattr(error, "strerror", None) or error
            raise Failure(Kind.REFUSED, f"no connection to {where}: {what}") from error
        address = transport.get_extra_info("peername")[0]
        if not self._allowed.admits_address(target.host, address):
            # No request was sent yet, so nothing is lost.
            connection.close()
            raise Failure(Kind.REFUSED, LINK_LOCAL.format(host=target.host))
        return connection

    def give_back(self, target: Target, connection: Connection) -> None:
        """After an exchange: keeps the connection where another may follow, and closes it otherwise."""
        kept = self._idle.setdefault(target.origin, deque())
        if len(kept) >= MAX_IDLE or not connection.reusable():
            connection.close()
            return
        connection.idle_s = self._loop.time()
        kept.append(connection)
        if self._sweeper is None:
            self._sweeper = self._loop.call_later(KEEP_IDLE_S, self._sweep)

    def close(self) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        for kept in self._idle.values():
            for connection in kept:
                connection.close()
        self._idle.clear()

    def _sweep(self) -> None:
        """Closes what was idle for long; runs while anything is kept."""
        now = self._loop.time()
        next_s = None
        for origin in list(self._idle):
            kept = self._idle[origin]
            while kept and kept[0].idle_s <= now - KEEP_IDLE_S:
                kept.popleft().close()
            if not kept:
                del self._idle[origin]
            elif next_s is None or kept[0].idle_s < next_s:
                next_s = kept[0].idle_s
        self._sweeper = None
        if next_s is not None:
            self._sweeper = self._loop.call_later(max(0.0, next_s + KEEP_IDLE_S - now), self._sweep)

    def _tls_for(self, target: Target) -> ssl.SSLContext | None:
        if not target.tls:
            return None
        if self._tls is None:
            self._tls = ssl.create_default_context()
        return self._tls
