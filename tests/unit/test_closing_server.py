# SPDX-License-Identifier: Apache-2.0
"""Servers of the test harness that are closed while a connection arrives."""

from __future__ import annotations

import asyncio
import gc
import socket
import warnings

import pytest

from tests.chaos.harness.pulse import PulseServer
from tests.support.wire import Wire


@pytest.mark.parametrize("kind", [PulseServer, Wire])
@pytest.mark.parametrize("steps", range(5))
def test_a_connection_that_arrives_with_the_end_leaves_no_transport(kind: type, steps: int) -> None:
    async def close_at(steps: int) -> None:
        server = Wire() if kind is Wire else PulseServer(1.0)
        await server.open()
        with socket.create_connection(("127.0.0.1", server.port)):
            for _ in range(steps):
                await asyncio.sleep(0)
            await server.close()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # uvloop has other transports, but the harness runs on asyncio's own loop.
        asyncio.run(close_at(steps))
        gc.collect()
    assert not [str(warning.message) for warning in caught if "unclosed" in str(warning.message)]
