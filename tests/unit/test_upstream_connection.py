# SPDX-License-Identifier: Apache-2.0
"""A connection to an engine reads no further while the receiver of its answer is full.

The transport is a stand-in, so each callback comes at a chosen moment.
"""

from __future__ import annotations

import asyncio
from typing import Any

from kvrouter.router.base.common.direct_task import directly
from kvrouter.router.model.upstream.connection import MAX_WAITING_BYTES, Connection
from tests.support.engine_link import connected

REQUEST = b"POST / HTTP/1.1\r\n\r\n"
ENDLESS = b"HTTP/1.1 200 OK\r\n\r\n"
SILENCE_S = 60.0


async def test_a_receiver_that_pauses_with_the_first_parts_stays_paused() -> None:
    with connected(Connection, asyncio.get_running_loop()) as connection:
        transport: Any = connection._transport

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

        await directly(work())
