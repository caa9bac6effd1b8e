# SPDX-License-Identifier: Apache-2.0
"""A connection to an engine reads no further while the receiver of its answer is full.

The transport is a stand-in, so each callback comes at a chosen moment.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from kvrouter.router.base.common.direct_task import directly
from kvrouter.router.model.upstream.connection import MAX_WAITING_BYTES, Connection

REQUEST = b"POST / HTTP/1.1\r\n\r\n"
ENDLESS = b"HTTP/1.1 200 OK\r\n\r\n"
SILENCE_S = 60.0


class Transport:
    """A transport that records whether it is read."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self.closed = False
        self.paused = False

    def get_extra_info(self, name: str) -> Any:
        return self._end

    def is_closing(self) -> bool:
        return self.closed

    def abort(self) -> None:
        self.closed = True

    def write(self, data: bytes) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False


async def test_a_receiver_that_pauses_with_the_first_parts_stays_paused() -> None:
    ends = socket.socketpair()
    transport, connection = Transport(ends[0]), Connection(asyncio.get_running_loop())
    connection.connection_made(transport)  # type: ignore[arg-type]

    async def work() -> None:
        answered = connection.ask(REQUEST, b"", SILENCE_S)
        connection.data_received(ENDLESS + b"a" * (MAX_WAITING_BYTES + 1))
        assert transport.paused, "nobody takes the parts yet"
        await answered
        ended = connection.relay(lambda parts: connection.pause())
        assert transport.paused
        connection.resume()
        assert not transport.paused
        connection.connection_lost(None)
        await ended

    try:
        await directly(work())
    finally:
        connection.close()
        for end in ends:
            end.close()
