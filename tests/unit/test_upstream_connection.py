# SPDX-License-Identifier: Apache-2.0
"""A connection to an engine reads no further while the receiver of its answer is full, and hands chunks on at once.

The transport is a stand-in, so each callback comes at a chosen moment.
"""

from __future__ import annotations

import asyncio
import math
from typing import Any

from kvrouter.router.base.common.direct_task import directly
from kvrouter.router.model.upstream.connection import MAX_WAITING_BYTES, Connection
from tests.support.engine_link import connected

REQUEST = b"POST / HTTP/1.1\r\n\r\n"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
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


async def test_chunks_of_a_stream_end_the_silence_and_pass_in_their_order_also_where_reads_cut_them() -> None:
    with connected(Connection, asyncio.get_running_loop()) as connection:
        taken: list[bytes] = []

        async def work(cuts: bool) -> None:
            answered = connection.ask(REQUEST, b"", SILENCE_S)
            connection.data_received(CHUNKED + b"1\r\na\r\n")
            await answered
            ended = connection.relay(taken.extend)
            connection._heard_s = -math.inf
            connection.data_received(b"1\r\nb\r\n2\r\ncc\r\n")
            assert connection._heard_s > 0.0
            assert taken == [b"a", b"b", b"cc"]
            assert not ended.is_set
            if cuts:
                # From here on the general parser reads.
                connection.data_received(b"2\r\nd")
                connection.data_received(b"d\r\n")
            connection.data_received(b"1\r\ne\r\n0\r\n\r\n")
            await ended
            assert b"".join(taken) == (b"abccdde" if cuts else b"abcce")
            assert connection.reusable()

        for cuts in (False, True):
            taken.clear()
            await directly(work(cuts))
