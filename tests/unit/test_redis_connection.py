# SPDX-License-Identifier: Apache-2.0
"""The time limit of requests to Redis: one timer serves the requests of a connection."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from kvrouter.router.base.redis_client.connection import Connection
from kvrouter.router.base.redis_client.errors import StoreUnavailable

LONG_S, SHORT_S = 3_600.0, 0.01
PONG = b"+PONG\r\n"


class Writer:
    """A transport and its writer. `answers`: whether the server answers each request at once."""

    def __init__(self) -> None:
        self.transport = self
        self.answers = True
        self.is_closed = False

    def set_protocol(self, protocol: Connection) -> None:
        self.protocol = protocol

    def write(self, data: bytes) -> None:
        if self.answers:
            asyncio.get_running_loop().call_soon(self.protocol.data_received, PONG)

    def is_closing(self) -> bool:
        return self.is_closed

    def abort(self) -> None:
        self.is_closed = True


def connected() -> tuple[Writer, Connection]:
    writer = Writer()
    return writer, Connection(cast(Any, writer))


async def test_answered_requests_share_a_timer() -> None:
    _, connection = connected()
    await connection.run(b"x", 1, LONG_S)
    timer = connection._timer
    assert timer is not None
    for _ in range(3):
        assert await connection.run(b"x", 1, LONG_S) == [b"PONG"]
    assert connection._timer is timer
    connection.close()
    assert connection._timer is None and timer.cancelled()


async def test_a_request_with_less_time_than_the_one_before_fails_in_its_own_time() -> None:
    writer, connection = connected()
    await connection.run(b"x", 1, LONG_S)
    writer.answers = False
    async with asyncio.timeout(20):
        with pytest.raises(StoreUnavailable, match=r"did not answer in 0\.01 s"):
            await connection.run(b"x", 1, SHORT_S)


async def test_the_timer_of_an_answered_request_does_not_end_the_next_one() -> None:
    writer, connection = connected()
    await connection.run(b"x", 1, SHORT_S)
    first = connection._timer
    writer.answers = False
    waiting = asyncio.ensure_future(connection.run(b"x", 1, LONG_S))
    async with asyncio.timeout(20):
        while connection._timer is first or connection._timer is None:
            await asyncio.sleep(SHORT_S)
    assert not waiting.done()
    connection.data_received(PONG)
    assert await waiting == [b"PONG"]
    connection.connection_lost(None)
    assert connection._timer is None


async def test_a_timer_that_fires_between_requests_ends_nothing() -> None:
    _, connection = connected()
    await connection.run(b"x", 1, SHORT_S)
    async with asyncio.timeout(20):
        while connection._timer is not None:
            await asyncio.sleep(SHORT_S)
    assert await connection.run(b"x", 1, LONG_S) == [b"PONG"]
    connection.close()
