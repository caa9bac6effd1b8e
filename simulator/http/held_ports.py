# SPDX-License-Identifier: Apache-2.0
"""Ports of a replica that is down for a while: nobody answers there, and no other process's connection gets one."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

# ZMQ frees a closed socket's address in its own time, some milliseconds after the close.
TRIES = 100
PAUSE_S = 0.01


@contextlib.asynccontextmanager
async def held_ports(*endpoints: str | None) -> AsyncIterator[None]:
    """Those of the ZMQ endpoints that are TCP's; one that somebody else has already is left."""
    with contextlib.ExitStack() as stack:
        for endpoint in endpoints:
            if endpoint is not None and endpoint.startswith("tcp://"):
                host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
                await _hold(host.strip("[]"), int(port), stack)
        yield


async def _hold(host: str, port: int, stack: contextlib.ExitStack) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # It does not listen, so connections are refused.
    holder = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    for _ in range(TRIES):
        with contextlib.suppress(OSError):
            holder.bind((host, port))
            return
        await asyncio.sleep(PAUSE_S)
