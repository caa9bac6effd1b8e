# SPDX-License-Identifier: Apache-2.0
"""An engine's HTTP server in its own process that dies of one prompt, like an engine whose kernels crash on it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from typing import Self

STOP_TIMEOUT_S = 15.0
# A body that contains it kills the process. It is a number, so that a prompt of token ids can contain it too.
POISON = b"6661313"
GIVEN = b'{"id": "c", "choices": [], "kv_transfer_params": {"remote_engine_id": "e", "remote_block_ids": [1]}}'


class MortalEngine:
    """The engine's process, which runs from entry to exit."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen([sys.executable, __file__], stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        self.url = f"http://127.0.0.1:{int(self._process.stdout.readline())}"
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None and self._process.stdout is not None
        self._process.kill()
        self._process.wait(STOP_TIMEOUT_S)
        self._process.stdout.close()

    @property
    def died(self) -> bool:
        assert self._process is not None
        return self._process.poll() is not None


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()
            return
        lengths = [line.split(b":")[1] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        body = await reader.readexactly(int(lengths[0]) if lengths else 0)
        if POISON in body:
            # A crash: the kernel closes the connections.
            os._exit(1)
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(GIVEN) + GIVEN
        )


async def _main() -> None:
    server = await asyncio.start_server(_serve, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_main())
