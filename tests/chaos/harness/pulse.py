# SPDX-License-Identifier: Apache-2.0
"""The HTTP server of a simulated engine, with /health and, in /metrics, the start time of its process."""

from __future__ import annotations

import asyncio
import contextlib

from tests.support.closing_server import close_server


class PulseServer:
    """The server of one life of an engine; while it is stalled, it accepts requests and answers none."""

    def __init__(self, start_s: float) -> None:
        self.stalled = False
        self.port = 0
        self._body = f"process_start_time_seconds {start_s}\n".encode()
        self._server: asyncio.Server | None = None
        # The task of each connection. A task that is cancelled before its first step cannot close the connection, so
        # the transport is kept beside it.
        self._connections: dict[asyncio.Task[None], asyncio.WriteTransport] = {}

    async def open(self) -> None:
        """Listen on a free port."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Stop listening, and cut all connections."""
        server, self._server = self._server, None
        if server is not None:
            await close_server(server)
        for task, transport in self._connections.items():
            task.cancel()
            transport.abort()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._server is None:
            writer.transport.abort()
            return
        task = asyncio.get_running_loop().create_task(self._answer(reader, writer))
        self._connections[task] = writer.transport
        task.add_done_callback(self._connections.pop)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while True:
                request = await reader.readuntil(b"\r\n\r\n")
                while self.stalled:
                    await asyncio.sleep(0.05)
                body = self._body if request.startswith(b"GET /metrics ") else b""
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
                await writer.drain()
        writer.transport.abort()
