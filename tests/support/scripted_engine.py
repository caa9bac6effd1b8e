# SPDX-License-Identifier: Apache-2.0
"""An engine's HTTP server that answers by script, byte by byte, for faults that no ordinary server can produce."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Self

import msgspec

WAIT_S = 30.0


class Asked(msgspec.Struct):
    """One received request."""

    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes
    # Number of the connection that it came on, counted from 1.
    connection: int

    def all(self, name: str) -> list[str]:
        """Return the values of a header, in order."""
        return [value for header, value in self.headers if header == name]


class Wire:
    """The engine's side of a connection while one request is answered; `gone` is set once the other side has left."""

    def __init__(self, writer: asyncio.StreamWriter, gone: asyncio.Event) -> None:
        self._writer = writer
        self.gone = gone

    async def send(self, *pieces: bytes) -> None:
        """Send each piece separately, and wait while the other side does not read."""
        for piece in pieces:
            self._writer.write(piece)
            await self._writer.drain()
            await asyncio.sleep(0)

    @property
    def unsent_bytes(self) -> int:
        return self._writer.transport.get_write_buffer_size()

    def close(self) -> None:
        self._writer.close()

    async def closed(self) -> None:
        """Close the connection and wait until the socket is closed."""
        self._writer.close()
        await self._writer.wait_closed()

    def reset(self) -> None:
        """Reset the connection: the other side gets RST, not FIN."""
        raw_socket: socket.socket = self._writer.get_extra_info("socket")
        raw_socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()


Script = Callable[[Asked, Wire], Awaitable[None]]


def plain(body: bytes, status: str = "200 OK", headers: Sequence[str] = ()) -> Script:
    """Return a script that answers with this body and its length."""

    async def script(asked: Asked, wire: Wire) -> None:
        lines = [f"HTTP/1.1 {status}", "content-type: application/json", f"content-length: {len(body)}", *headers]
        await wire.send("\r\n".join([*lines, "", ""]).encode() + body)

    return script


STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def stream(pieces: Sequence[bytes]) -> Script:
    """Return a script that sends a complete stream, with each piece in its own chunk."""

    async def script(asked: Asked, wire: Wire) -> None:
        await wire.send(STREAM_HEAD, *map(chunk, pieces), b"0\r\n\r\n")

    return script


async def hang(asked: Asked, wire: Wire) -> None:
    """Send nothing until the other side gives up."""
    await wire.gone.wait()


async def reset(asked: Asked, wire: Wire) -> None:
    """Reset the connection before the first byte of an answer."""
    wire.reset()


class ScriptedEngine:
    """An engine that listens in its own thread.

    `script` answers each POST. A GET (/health, /metrics) is answered with 200 while `healthy`, unless `pages` has a
    script for the path.
    """

    def __init__(self, script: Script) -> None:
        self.script = script
        self.healthy = True
        self.pages: dict[str, Script] = {}
        self.asked: list[Asked] = []
        # Paths of the GET requests so far.
        self.looked: list[str] = []
        # Requests whose connection the other side ended while the script ran.
        self.given_up = 0
        # Connections so far, and those of them that are open.
        self.connections = 0
        self.open_connections = 0
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.port = self._listener.getsockname()[1]
        self._started = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._serve()))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._thread.start()
        self._started.wait(WAIT_S)
        return self

    def __exit__(self, *_: object) -> None:
        """Cut every connection and stop listening."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(WAIT_S)
            self._loop.close()

    kill = __exit__

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._connected, sock=self._listener)
        self._started.set()
        await self._stop.wait()
        server.close()
        # A connection of this turn has a task whose coroutine has not begun, so it could not suppress a cancellation.
        await asyncio.sleep(0)
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open_connections += 1
        number = self.connections
        try:
            # A cancellation ends here, because asyncio before 3.12 logs a task that it ended.
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
                while not writer.is_closing():
                    await self._answer(await _read(reader, number), reader, writer)
        finally:
            self.open_connections -= 1
            writer.close()

    async def _answer(self, request: Asked, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        gone = asyncio.Event()
        wire = Wire(writer, gone)
        if request.method == "GET":
            self.looked.append(request.target)
            status = "200 OK" if self.healthy else "503 Service Unavailable"
            await self.pages.get(request.target, plain(b"", status))(request, wire)
            return
        self.asked.append(request)
        answering = asyncio.ensure_future(self.script(request, wire))

        async def watch() -> None:
            with contextlib.suppress(ConnectionError):
                assert not await reader.read(1), "a request came before the answer to the one before"
            if not answering.done():
                self.given_up += 1
                gone.set()

        watching = asyncio.ensure_future(watch())
        try:
            await asyncio.wait({answering, watching}, return_when=asyncio.FIRST_COMPLETED)
            try:
                await answering
            except ConnectionError:
                # The script was still sending; `watch` may not have noticed the end yet.
                self.given_up += not gone.is_set()
        finally:
            watching.cancel()
            answering.cancel()
            await asyncio.gather(watching, answering, return_exceptions=True)


async def _read(reader: asyncio.StreamReader, connection: int) -> Asked:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    line, *lines = head.rstrip("\r\n").split("\r\n")
    method, target, _ = line.split(" ")
    headers = [(name.lower(), value.strip()) for name, _, value in (text.partition(":") for text in lines)]
    if ("transfer-encoding", "chunked") in headers:
        return Asked(method, target, headers, await _read_chunks(reader), connection)
    length = next((int(value) for name, value in headers if name == "content-length"), 0)
    return Asked(method, target, headers, await reader.readexactly(length), connection)


async def _read_chunks(reader: asyncio.StreamReader) -> bytes:
    """Read a chunked body without trailers."""
    body = b""
    while True:
        length = int(await reader.readuntil(b"\r\n"), 16)
        piece = await reader.readexactly(length + 2)
        if not length:
            return body
        body += piece[:-2]
