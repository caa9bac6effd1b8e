# SPDX-License-Identifier: Apache-2.0
"""TLS below a client's connection: the handshake, and the transport behind it.

The handshake begins behind the accept and not within it, as asyncio's servers have it: so it counts as a connection and
has a deadline of its own, a process that stops waits for it, and each connection takes the certificate of its moment."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import Any, Protocol

from uvicorn.server import ServerState

from kvrouter.router.base.common.direct_task import DirectTask
from kvrouter.router.base.common.sockets import untaken_bytes
from kvrouter.router.serve.api.http.deadlines import HttpLimits

# As plain transports have it. TLS' own default would keep half a megabyte for a client that does not read.
WRITE_HIGH_BYTES = 64 * 1024

# After a close: how often it is looked whether the client has taken everything. Many never say that they are done.
CLOSE_LOOK_S = 0.25
# asyncio's own limit for a close, within which it would also have to send all that is unsent: never the first.
LONGEST_CLOSE_S = 86_400.0


class SecuredConnection(Protocol):
    """The connection above."""

    def connection_made(self, transport: asyncio.Transport) -> None: ...

    def data_received(self, data: bytes) -> None: ...

    def shutdown(self) -> None: ...


class TlsTransport(asyncio.Transport):
    """A TLS transport and the plain one below it, as one: what either holds is unsent, and a close ends when the client
    has taken all of it."""

    def __init__(
        self,
        secured: asyncio.Transport,
        plain: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        stalled_s: float,
    ) -> None:
        """stalled_s: how long a client may take nothing once the connection is closed."""
        super().__init__()
        secured.set_write_buffer_limits(WRITE_HIGH_BYTES)
        self._secured = secured
        self._plain = plain
        self._loop = loop
        self._stalled_s = stalled_s
        self._closes = False
        # Of the last look: what was left, and since when no less.
        self._left_bytes = 0
        self._left_since_s = 0.0
        self.write = secured.write  # type: ignore[method-assign]
        self.pause_reading = secured.pause_reading  # type: ignore[method-assign]
        self.resume_reading = secured.resume_reading  # type: ignore[method-assign]
        self.get_extra_info = secured.get_extra_info  # type: ignore[method-assign]
        self.abort = secured.abort  # type: ignore[method-assign]

    def is_closing(self) -> bool:
        return self._closes or self._secured.is_closing()

    def can_write_eof(self) -> bool:
        """Neither side can close a half."""
        return False

    def get_write_buffer_size(self) -> int:
        return self._secured.get_write_buffer_size() + self._plain.get_write_buffer_size()

    def close(self) -> None:
        if self._closes:
            return
        self._closes = True
        self._secured.close()
        self._left_bytes, self._left_since_s = self._untaken_bytes(), self._loop.time()
        self._loop.call_later(CLOSE_LOOK_S, self._look_at_close)

    def _untaken_bytes(self) -> int:
        return self._secured.get_write_buffer_size() + untaken_bytes(self._plain)

    def _look_at_close(self) -> None:
        if self._plain.is_closing() and not self._plain.get_write_buffer_size():
            # The client said that it is done, or is gone.
            return
        left_bytes, now_s = self._untaken_bytes(), self._loop.time()
        if left_bytes < self._left_bytes:
            self._left_bytes, self._left_since_s = left_bytes, now_s
        if not left_bytes or now_s - self._left_since_s >= self._stalled_s:
            self._plain.abort()
        else:
            self._loop.call_later(CLOSE_LOOK_S, self._look_at_close)


class TlsHandshake(asyncio.Protocol):
    """A connection until its handshake is done; then `made` has it."""

    _transport: asyncio.Transport

    def __init__(
        self,
        made: SecuredConnection,
        context: ssl.SSLContext,
        limits: HttpLimits,
        server: ServerState,
        count_cut: Callable[[str], None],
    ) -> None:
        self._made = made
        self._context = context
        self._limits = limits
        self._server = server
        self._count_cut = count_cut
        self._loop = asyncio.get_running_loop()
        self._stops = False
        # What came with the end of the handshake, where the loop hands it out before it says that there is one.
        self._early: list[bytes] = []

    # The transport's side.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        self._server.connections.add(self)  # type: ignore[arg-type]
        if len(self._server.connections) > self._limits.max_connections:
            # An answer that says so would cost a handshake.
            self._count_cut("connections")
            transport.abort()
            return
        # At once: the first bytes may be here already.
        task = DirectTask(self._shake(), self._loop, self._on_shaken)
        self._server.tasks.add(task)  # type: ignore[arg-type]
        task.resume()

    def data_received(self, data: bytes) -> None:
        self._early.append(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.connections.discard(self)

    # uvicorn's side.

    def shutdown(self) -> None:
        """The server stops: whoever is in the handshake is served, as one request is on its way."""
        self._stops = True

    async def _shake(self) -> None:
        plain = self._transport
        try:
            secured = await self._loop.start_tls(
                plain,
                self,
                self._context,
                server_side=True,
                ssl_handshake_timeout=self._limits.handshake_timeout_s,
                ssl_shutdown_timeout=LONGEST_CLOSE_S,
            )
        except (OSError, EOFError):
            # No TLS, none that both speak, no certificate of the client, or none in time.
            self._count_cut("handshake")
            plain.abort()
            return
        except BaseException:
            plain.abort()
            raise
        if secured is None or secured.is_closing():
            # It hung up meanwhile.
            self._count_cut("handshake")
            plain.abort()
            return
        secured.set_protocol(self._made)  # type: ignore[arg-type]
        self._server.connections.discard(self)
        self._made.connection_made(TlsTransport(secured, plain, self._loop, self._limits.send_timeout_s))
        if self._stops:
            self._made.shutdown()
        for data in self._early:
            self._made.data_received(data)

    def _on_shaken(self, task: Any) -> None:
        self._server.tasks.discard(task)
        # Where it failed.
        self._server.connections.discard(self)
