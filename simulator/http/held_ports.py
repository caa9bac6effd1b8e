# SPDX-License-Identifier: Apache-2.0
"""Reserved ports of a replica that is down: connections to them are refused, and no other process gets one of them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

# ZMQ frees a closed socket's address some milliseconds after the close.
TRIES = 100
PAUSE_S = 0.01


@contextlib.asynccontextmanager
async def held_ports(*endpoints: str | None) -> AsyncIterator[None]:
    """Reserve the ports of the TCP endpoints while the block runs, except ports that another process has already."""
    with contextlib.ExitStack() as stack:
        for endpoint in endpoints:
            if endpoint is not None and endpoint.startswith("tcp://"):
                host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
                await _hold(host.strip("[]"), int(port), stack)
        yield


async def _hold(host: str, port: int, stack: contextlib.ExitStack) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The socket does not listen, so connections are refused.
    holder = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    for _ in range(TRIES):
        with contextlib.suppress(OSError):
            holder.bind((host, port))
            return
        await asyncio.sleep(PAUSE_S)
