# SPDX-License-Identifier: Apache-2.0
"""The end of an asyncio server that leaves no transport open."""

from __future__ import annotations

import asyncio


async def close_server(server: asyncio.Server) -> None:
    """Close a server once every connection that it has accepted has its transport.

    asyncio makes the transport in a task of its own. If the server is closed before that task's first step, the step
    fails, and its transport stays unclosed.
    """
    loop = asyncio.get_running_loop()
    for listening in server.sockets:
        loop.remove_reader(listening.fileno())
    # The tasks of the last connections take their first step.
    await asyncio.sleep(0)
    server.close()
