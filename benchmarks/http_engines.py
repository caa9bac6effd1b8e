# SPDX-License-Identifier: Apache-2.0
"""A process with many engines' HTTP endpoints, one port each: `/health` answers 200, all else 404.

Their URLs are one line of JSON on stdout.
"""

from __future__ import annotations

import argparse
import asyncio
import json

import uvloop

ANSWERS = {
    True: b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n",
    False: b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n",
}
# Connections that wait to be accepted at one port.
BACKLOG = 16


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            writer.write(ANSWERS[head.startswith(b"GET /health ")])
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


async def serve(count: int) -> None:
    servers = [await asyncio.start_server(answer, "127.0.0.1", 0, backlog=BACKLOG) for _ in range(count)]
    ports = [server.sockets[0].getsockname()[1] for server in servers]
    print(json.dumps([f"http://127.0.0.1:{port}" for port in ports]), flush=True)
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int, help="engines")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(parser.parse_args().count))


if __name__ == "__main__":
    main()
