# SPDX-License-Identifier: Apache-2.0
"""What an engine's HTTP server says of its life: /health, and in /metrics since when its process lives."""

from __future__ import annotations

import asyncio
import contextlib


class PulseServer:
    """One life's. Stalled, it takes requests and answers none."""

    def __init__(self, start_s: float) -> None:
        self.stalled = False
        self.port = 0
        self._body = f"process_start_time_seconds {start_s}\n".encode()
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

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
