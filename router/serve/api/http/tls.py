# SPDX-License-Identifier: Apache-2.0
"""TLS below a client's connection: the handshake, and the transport above it.

The handshake begins after the accept, and not within it as in asyncio's servers. Therefore it counts as a connection
and has its own deadline, a process that stops waits for it, and each connection takes the current certificate.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import Any, Protocol

from uvicorn.server import ServerState

from kvrouter.router.base.common.direct_task import DirectTask
from kvrouter.router.base.common.sockets import untaken_bytes
from kvrouter.router.serve.api.http.deadlines import HttpLimits

# Plain transports have the same limit. The default of TLS would keep half a megabyte for a client that does not read.
WRITE_HIGH_BYTES = 64 * 1024

# The seconds between checks, after a close, whether the client has taken everything. Many clients never send a close of
# their own.
CLOSE_LOOK_S = 0.25
# asyncio's limit for a close, within which it would also have to send all unsent bytes. It is so large that another
# limit always comes first.
LONGEST_CLOSE_S = 86_400.0


class SecuredConnection(Protocol):
    """The connection above TLS."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Take the transport, once the handshake is done."""
        ...

    def data_received(self, data: bytes) -> None:
        """Take decrypted bytes."""
        ...

    def shutdown(self) -> None:
        """Finish current requests and close, because the server stops."""
        ...


class TlsTransport(asyncio.Transport):
    """A TLS transport and the plain one below it, as one transport.

    The bytes that either holds count as unsent, and a close ends when the client has taken all of them.
    """

    def __init__(
        self,
        secured: asyncio.Transport,
        plain: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        stalled_s: float,
    ) -> None:
        """Join the two transports.

        `stalled_s` says for how many seconds a client may take nothing after the connection is closed.
        """
        super().__init__()
        secured.set_write_buffer_limits(WRITE_HIGH_BYTES)
        self._secured = secured
        self._plain = plain
        self._loop = loop
        self._stalled_s = stalled_s
        self._closes = False
        # The bytes that were left at the last check, and the time since which they have not decreased.
        self._left_bytes = 0
        self._left_since_s = 0.0
        self.write = secured.write  # type: ignore[method-assign]
        self.pause_reading = secured.pause_reading  # type: ignore[method-assign]
        self.resume_reading = secured.resume_reading  # type: ignore[method-assign]
        self.get_extra_info = secured.get_extra_info  # type: ignore[method-assign]
        self.abort = secured.abort  # type: ignore[method-assign]

    def is_closing(self) -> bool:
        """Return whether the connection is closing."""
        return self._closes or self._secured.is_closing()

    def can_write_eof(self) -> bool:
        """Return False, because TLS has no half-closed connections here."""
        return False

    def get_write_buffer_size(self) -> int:
        """Return the number of unsent bytes in both transports."""
        return self._secured.get_write_buffer_size() + self._plain.get_write_buffer_size()

    def close(self) -> None:
        """Close the connection once the client has taken everything, or has stalled."""
        if self._closes:
            return
        self._closes = True
        self._secured.close()
        self._left_bytes, self._left_since_s = self._untaken_bytes(), self._loop.time()
        self._loop.call_later(CLOSE_LOOK_S, self._look_at_close)

    def _untaken_bytes(self) -> int:
        """Return the number of bytes that the client has not taken."""
        return self._secured.get_write_buffer_size() + untaken_bytes(self._plain)

    def _look_at_close(self) -> None:
        """Abort the plain transport if everything is taken or the client has stalled, and check again later if not."""
        if self._plain.is_closing() and not self._plain.get_write_buffer_size():
            # The client closed its side, or is gone.
            return
        left_bytes, now_s = self._untaken_bytes(), self._loop.time()
        if left_bytes < self._left_bytes:
            self._left_bytes, self._left_since_s = left_bytes, now_s
        if not left_bytes or now_s - self._left_since_s >= self._stalled_s:
            self._plain.abort()
        else:
            self._loop.call_later(CLOSE_LOOK_S, self._look_at_close)


class TlsHandshake(asyncio.Protocol):
    """A connection until its handshake is done; then `made` takes over."""

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
        # Bytes that came with the end of the handshake, if the loop delivers them before it reports that end.
        self._early: list[bytes] = []

    # -- calls of the transport

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin the handshake, or close the connection if there are too many."""
        self._transport = transport
        self._server.connections.add(self)  # type: ignore[arg-type]
        if len(self._server.connections) > self._limits.max_connections:
            # An answer with the reason would cost a handshake.
            self._count_cut("connections")
            transport.abort()
            return
        # The task starts at once, because the first bytes may be here already.
        task = DirectTask(self._shake(), self._loop, self._on_shaken)
        self._server.tasks.add(task)  # type: ignore[arg-type]
        task.resume()

    def data_received(self, data: bytes) -> None:
        """Keep bytes that arrive before the handshake is known to be done."""
        self._early.append(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._server.connections.discard(self)

    # uvicorn's side.

    def shutdown(self) -> None:
        """Note that the server stops. A client in the handshake is still served, because its request is on its way."""
        self._stops = True

    async def _shake(self) -> None:
        """Do the TLS handshake, then hand the secured connection over to `_made`; abort the connection if it fails."""
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
            # The client speaks no TLS, or no common version, or shows no valid certificate, or is too slow.
            self._count_cut("handshake")
            plain.abort()
            return
        except BaseException:
            plain.abort()
            raise
        if secured is None or secured.is_closing():
            # The client hung up in the meantime.
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
        # A successful handshake has already removed the connection; a failed one has not.
        self._server.connections.discard(self)
