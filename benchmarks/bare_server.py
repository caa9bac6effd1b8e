# SPDX-License-Identifier: Apache-2.0
"""A server on uvloop that reads a request to its end and replies with fixed bytes.

It shows the least that an HTTP exchange costs, as it interprets nothing of the request but its length. A GET is
answered with an empty 200.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import cast

import uvloop

EMPTY = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"


class Bare(asyncio.Protocol):
    def __init__(self, answer: bytes) -> None:
        self._answer = answer
        self._transport: asyncio.WriteTransport | None = None
        self._held = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transport is a class of its own, which does not derive from asyncio's.
        self._transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        received = self._held = self._held + data if self._held else data
        end = received.find(b"\r\n\r\n")
        if end < 0:
            return
        header = received.find(b"content-length: ", 0, end)
        body_bytes = 0 if header < 0 else int(received[header + 16 : received.index(b"\r", header)])
        if len(received) < end + 4 + body_bytes:
            return
        self._held = b""
        self._transport.write(EMPTY if received.startswith(b"GET ") else self._answer)


async def serve(port: int, answer: bytes) -> None:
    await asyncio.get_running_loop().create_server(lambda: Bare(answer), "127.0.0.1", port)
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("port", type=int)
    parser.add_argument("answer", type=Path, help="file with the bytes to send")
    arguments = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(arguments.port, arguments.answer.read_bytes()))


if __name__ == "__main__":
    main()
