# SPDX-License-Identifier: Apache-2.0
"""A TCP proxy with faults, whose target may be slow, silent or gone, or may change."""

from __future__ import annotations

import asyncio
import contextlib

from tests.support.closing_server import close_server

CHUNK_BYTES = 16_384


class _Pair:
    """One proxied connection."""

    def __init__(self, near: asyncio.StreamWriter) -> None:
        self.near = near
        self.far: asyncio.StreamWriter | None = None
        # Whether bytes were swallowed; the bytes after them would be out of step.
        self.poisoned = False

    def abort(self) -> None:
        for writer in (self.near, self.far):
            if writer is not None:
                writer.transport.abort()


class Wire:
    """A proxy from `port` to the port `target`; its faults are attributes, and `heal` ends them all."""

    def __init__(self) -> None:
        self.port = 0
        # None: no connection is accepted.
        self.target: int | None = None
        # Refusing: no connection is accepted. Swallowing: bytes are read and dropped, and new connections get no peer.
        self.refusing = self.swallowing = False
        # Delay of each chunk, and rate of each direction; 0 for none.
        self.delay_s = 0.0
        self.rate_bytes_s = 0.0
        # Bytes of the target's answers after which the connection is cut, once.
        self.cut_after_bytes: int | None = None
        self._moving = asyncio.Event()
        self._moving.set()
        self._pairs: set[_Pair] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    @property
    def endpoint(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    @property
    def stalled(self) -> bool:
        return not self._moving.is_set()

    @property
    def impaired(self) -> bool:
        """Whether messages may arrive late or never."""
        return self.stalled or self.refusing or self.swallowing or self.delay_s > 0 or self.rate_bytes_s > 0

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=CHUNK_BYTES)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            await close_server(server)
        self.cut()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def stall(self) -> None:
        self._moving.clear()

    def cut(self) -> None:
        """Cut every connection at once."""
        for pair in list(self._pairs):
            pair.abort()

    def heal(self) -> None:
        self.refusing = self.swallowing = False
        self.delay_s = self.rate_bytes_s = 0.0
        self.cut_after_bytes = None
        self._moving.set()
        for pair in list(self._pairs):
            if pair.poisoned:
                pair.abort()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Start the task of a connection, whose end cuts the connection even if its first step never came."""
        pair = _Pair(writer)
        if self._server is None:
            pair.abort()
            return
        task = asyncio.get_running_loop().create_task(self._proxy(reader, writer, pair))
        self._pairs.add(pair)
        self._tasks.add(task)

        def end(task: asyncio.Task[None]) -> None:
            pair.abort()
            self._pairs.discard(pair)
            self._tasks.discard(task)

        task.add_done_callback(end)

    async def _proxy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pair: _Pair) -> None:
        if self.refusing or (self.target is None and not self.swallowing):
            return
        with contextlib.suppress(OSError):
            if self.swallowing or self.target is None:
                pair.poisoned = True
                while await reader.read(CHUNK_BYTES):
                    pass
                return
            far_reader, pair.far = await asyncio.open_connection("127.0.0.1", self.target, limit=CHUNK_BYTES)
            near = asyncio.ensure_future(self._pump(reader, pair.far, pair, answers=False))
            far = asyncio.ensure_future(self._pump(far_reader, writer, pair, answers=True))
            try:
                await asyncio.wait((near, far), return_when=asyncio.FIRST_COMPLETED)
            finally:
                near.cancel()
                far.cancel()
                await asyncio.gather(near, far, return_exceptions=True)

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pair: _Pair, *, answers: bool
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(CHUNK_BYTES):
                if self.swallowing:
                    pair.poisoned = True
                    continue
                await self._moving.wait()
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                if self.rate_bytes_s:
                    await asyncio.sleep(len(data) / self.rate_bytes_s)
                if pair.poisoned:
                    continue
                if answers and self.cut_after_bytes is not None:
                    self.cut_after_bytes -= len(data)
                    if self.cut_after_bytes < 0:
                        writer.write(data[: self.cut_after_bytes])
                        await writer.drain()
                        self.cut_after_bytes = None
                        return
                writer.write(data)
                await writer.drain()
