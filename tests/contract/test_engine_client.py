# SPDX-License-Identifier: Apache-2.0
"""A router's own requests to engines: kept connections, bounded answers, and every way in which a request can fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvloop

from kvrouter.router.model.upstream.engine_client import EngineClient
from kvrouter.router.model.upstream.failure import Failure, Kind
from kvrouter.router.model.upstream.origin import target_of
from kvrouter.router.model.workers.allow_list import AllowList
from kvrouter.router.model.workers.engine_key import EngineKey
from tests.support.ports import free_port

MOST_BYTES = 64 * 1024
TIMEOUT_S = 0.5
WAIT_S = 30.0

Answer = Callable[[int, asyncio.StreamWriter], Awaitable[None]]


class Engine:
    """An engine that answers each request with `answer`, which gets the request's number and the writer."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self.heads: list[bytes] = []
        self.connections = 0

    async def serve(self) -> asyncio.Server:
        return await asyncio.start_server(self._connected, "127.0.0.1", 0)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while not writer.is_closing():
                self.heads.append(await reader.readuntil(b"\r\n\r\n"))
                await self._answer(len(self.heads), writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@pytest.fixture(autouse=True)
def loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    return uvloop.new_event_loop


def says(answer: bytes) -> Answer:
    async def write(number: int, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)

    return write


def whole(body: bytes, status: bytes = b"200 OK") -> bytes:
    return b"HTTP/1.1 %b\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body)


@asynccontextmanager
async def serving(engine: Engine) -> AsyncIterator[Callable[[str], Coroutine[Any, Any, tuple[int, bytes]]]]:
    """Serve `engine`, and provide a function that sends a GET to it by path."""
    server = await engine.serve()
    target = target_of(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/under/")
    client = EngineClient(asyncio.get_running_loop(), EngineKey("key", AllowList(["127.0.0.1"])))
    try:
        async with asyncio.timeout(WAIT_S):
            yield lambda path: client.get(target, path, MOST_BYTES, TIMEOUT_S)
    finally:
        client.close()
        server.close()


async def test_answers_come_over_one_kept_connection_and_each_request_has_the_headers() -> None:
    engine = Engine(says(whole(b"held")))

    async with serving(engine) as get:
        for _ in range(3):
            assert await get("/health") == (200, b"held")
    assert engine.connections == 1
    assert all(head.startswith(b"GET /under/health HTTP/1.1\r\nhost: 127.0.0.1:") for head in engine.heads)
    assert all(b"\r\nauthorization: Bearer key\r\n" in head for head in engine.heads)


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (whole(b""), (200, b"")),
        (b"HTTP/1.1 204 No Content\r\n\r\n", (204, b"")),
        (whole(b"elsewhere", b"307 Temporary Redirect"), (307, b"elsewhere")),
        (whole(b"busy", b"503 Service Unavailable"), (503, b"busy")),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n\r\n", (200, b"abc")),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + whole(b"then"), (200, b"then")),
    ],
)
async def test_every_status_is_an_answer(answer: bytes, found: tuple[int, bytes]) -> None:
    async with serving(Engine(says(answer))) as get:
        assert await get("/metrics") == found
        assert await get("/metrics") == found


async def test_an_answer_until_the_connection_ends_is_whole() -> None:
    async def ends(number: int, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.0 200 OK\r\n\r\nall of it")
        writer.close()

    engine = Engine(ends)

    async with serving(engine) as get:
        for _ in range(2):
            assert await get("/metrics") == (200, b"all of it")
    assert engine.connections == 2


async def test_a_kept_connection_that_the_engine_closed_is_replaced() -> None:
    async def closes(number: int, writer: asyncio.StreamWriter) -> None:
        writer.write(whole(b"held"))
        await writer.drain()
        writer.close()

    engine = Engine(closes)

    async with serving(engine) as get:
        for _ in range(20):
            assert await get("/health") == (200, b"held")
    assert engine.connections == 20


async def test_a_longer_answer_is_cut_and_its_connection_closed() -> None:
    engine = Engine(says(whole(b"x" * 10 * MOST_BYTES)))

    async with serving(engine) as get:
        for _ in range(2):
            status, body = await get("/metrics")
            # The body exceeds the limit by one read at most.
            assert status == 200 and MOST_BYTES < len(body) <= MOST_BYTES + 256 * 1024
    assert engine.connections == 2


async def test_an_answer_that_is_late_is_given_up_with_its_connection() -> None:
    closed = 0

    async def trickles(number: int, writer: asyncio.StreamWriter) -> None:
        nonlocal closed
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n")
        try:
            while True:
                writer.write(b".")
                await writer.drain()
                await asyncio.sleep(TIMEOUT_S / 20)
        except ConnectionError:
            closed += 1
            raise

    async with serving(Engine(trickles)) as get:
        with pytest.raises(TimeoutError):
            await get("/metrics")
        while not closed:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (b"SSH-2.0-x\r\n", Kind.MALFORMED),
        (b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n", Kind.MALFORMED),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nabc", Kind.CUT),
        (b"", Kind.RESET),
    ],
)
async def test_an_invalid_answer_is_a_failure(answer: bytes, kind: Kind) -> None:
    async def breaks(number: int, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        writer.close()

    async with serving(Engine(breaks)) as get:
        with pytest.raises(Failure) as caught:
            await get("/health")
        assert caught.value.kind is kind


async def test_a_refused_connection_is_distinguished_from_other_failures() -> None:
    client = EngineClient(asyncio.get_running_loop(), EngineKey(None, AllowList()))
    # The names have addresses of both families, and no listener at any of them.
    for host in ("127.0.0.1", "localhost"):
        with pytest.raises(Failure) as caught:
            await client.get(target_of(f"http://{host}:{free_port()}"), "/health", MOST_BYTES, TIMEOUT_S)
        assert isinstance(caught.value.__cause__, ConnectionRefusedError)
    client.close()


async def test_a_cancelled_request_closes_its_connection() -> None:
    gone = asyncio.Event()

    async def waits(number: int, writer: asyncio.StreamWriter) -> None:
        # A write fails once the other side has closed.
        try:
            while True:
                writer.write(b"HTTP/1.1 102 Processing\r\n\r\n")
                await writer.drain()
                await asyncio.sleep(0.01)
        except ConnectionError:
            gone.set()

    engine = Engine(waits)

    async with serving(engine) as get:
        task = asyncio.create_task(get("/health"))
        while not engine.heads:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await gone.wait()
